"""What an agent that is a program costs: a request at the endpoint, the loop, and boxes.

    python -m bench.agents [--episodes 32] [--repeat 3]

The agents' clients are a process of their own, and turns of the policy are fixed tokens: a request costs the CPU
seconds of this process, by its own clock, so other work on the machine changes little. Boxes have the wall clock.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from bench.chat_model import write_chat_model
from bench.harness import ROOT, Figures, median, options, rate, report, spread
from bench.loop import RolloutRun, configuration
from libra_hpc.boxes.box import Box
from libra_hpc.boxes.providers import chosen
from libra_hpc.chat.chat_task import Chat, ChatTask, tool
from libra_hpc.config.job import EnvSection
from libra_hpc.config.load import validate
from libra_hpc.config.run import RunConfig
from libra_hpc.endpoint.agent_task import AgentTask
from libra_hpc.facts.rundir import RunDir
from libra_hpc.tasks.base import PolicyTurn, Task, Tools
from libra_hpc.tasks.tokenizer import TaskTokenizer

THIS = ROOT / "bench" / "agents.py"
TURNS, LOOP_TURNS = 9, 3
ROOM = 1 << 18
PROMPTS = {"700": 250, "32k": 32_000}
"""Tokens of the first message, by those of a context in the middle of a conversation."""
IDLE, IDLE_S = 512, 3.0
COMMANDS = 16
PARAMETERS = {"type": "object", "properties": {"thing": {"type": "string"}}, "required": ["thing"]}
LOOK = {"name": "look", "description": "Look at a thing.", "parameters": PARAMETERS}
SEEN = "There is a table, and on it a letter that nobody has opened. "
SAID = '<tool_call>\n{"name": "look", "arguments": {"thing": "the letter on the table"}}\n</tool_call><|im_end|>'
GO_ON = "go on"


class InProcess(ChatTask):
    """The conversation of `converse` as a class."""

    max_turns, max_tokens = TURNS, 24

    @tool
    async def look(self, thing: str) -> str:
        """Look at a thing."""
        return SEEN

    async def answer(self, row: Any, chat: Chat, box: Tools) -> str | None:
        return GO_ON

    async def reward(self, row: Any, chat: Chat, box: Tools) -> float:
        return 1.0


class Short(InProcess):
    """That of the loop."""

    max_turns = LOOP_TURNS


async def converse(url: str, key: str, prompt: str, turns: int) -> None:
    """A conversation of OpenAI's chat completions."""
    from aiohttp import ClientSession

    messages: list[Any] = [{"role": "user", "content": prompt}]
    async with ClientSession(headers={"Authorization": f"Bearer {key}"}) as session:
        for _ in range(turns):
            body = {"model": "policy", "messages": messages, "tools": [{"type": "function", "function": LOOK}]}
            async with session.post(f"{url}/chat/completions", json=body) as answered:
                made = (await answered.json())["choices"][0]["message"]
            calls = [{"role": "tool", "tool_call_id": c["id"], "content": SEEN} for c in made.get("tool_calls", ())]
            messages += [made, *(calls or [{"role": "user", "content": GO_ON}])]


async def elsewhere(row: Any, endpoint: Any, box: Any) -> None:
    """An agent in the process of clients."""
    reader, writer = await asyncio.open_connection("127.0.0.1", row["port"])
    writer.write(json.dumps([*endpoint, row["prompt"], row["turns"]]).encode() + b"\n")
    assert await reader.readline() == b"done\n"
    writer.close()


async def here(row: Any, endpoint: Any, box: Any) -> None:
    """An agent in the host."""
    await converse(endpoint.url, endpoint.key, row["prompt"], LOOP_TURNS)


async def one(row: Any, box: Any) -> float:
    return 1.0


def clients(ready: Any) -> None:
    """The process of clients: a line is a conversation, or a number of connections to hold open."""
    held: list[Any] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        url, key, prompt, turns = json.loads(await reader.readline())
        if key:
            await converse(url, key, prompt, turns)
        else:
            held.extend([await asyncio.open_connection("127.0.0.1", int(url)) for _ in range(turns)])
        writer.write(b"done\n")

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 24)
        ready.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


async def play(task: Task, index: int, sampled: list[int], turns: int) -> None:
    """An episode whose policy always samples the same tokens."""
    tools: Any = None
    episode = task.open(index, 0, 0.0)
    await episode.start(tools)
    for number in range(turns):
        turn = await episode.step(PolicyTurn(sampled, "stop", ROOM), tools)
        assert turn.done == (number == turns - 1)
    await episode.close("done")


class Measured:
    """CPU seconds of requests, and of the same turns in process."""

    def __init__(self, tokenizer: TaskTokenizer, folder: Path, port: int, episodes: int) -> None:
        self.tokenizer, self.folder, self.port, self.episodes = tokenizer, folder, port, episodes
        self.sampled = tokenizer.encode(SAID)

    def task(self, tokens: int, turns: int, agent: bool = True) -> Any:
        """The task with first messages of that length; each episode has a row of its own."""
        words = self.tokenizer.decode(self.tokenizer.encode(SEEN * (1 + tokens // 8))[:tokens])
        rows = [{"prompt": f"{n} {words}", "turns": turns, "port": self.port} for n in range(self.episodes)]
        data = self.folder / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        if not agent:
            return type("Turns", (InProcess,), {"max_turns": turns})(self.tokenizer, data=str(data)).make({})
        names: dict[str, Any] = {"agent": f"{THIS}:elsewhere", "reward": f"{THIS}:one"}
        return AgentTask(self.tokenizer, data=str(data), **names).make({"env": {"sandbox": "none"}})

    async def cpu_s(self, task: Any, turns: int) -> float:
        """CPU seconds of this process for all episodes, eight at a time."""
        began = time.process_time()
        for first in range(0, self.episodes, 8):
            some = range(first, min(first + 8, self.episodes))
            await asyncio.gather(*(play(task, index, self.sampled, turns) for index in some))
        return time.process_time() - began

    async def turn_ms(self, tokens: int, agent: bool = True) -> Figures:
        """Milliseconds of CPU of a first request, with its episode, and of one that goes on."""
        seconds = []
        for turns in (1, TURNS):
            task = self.task(tokens, turns, agent)
            seconds.append(await self.cpu_s(task, turns))
            if agent:
                await task.endpoint.stop()
        first, all_of_them = (1e3 * one / self.episodes for one in seconds)
        return {"first": first, "next": (all_of_them - first) / (TURNS - 1), "mean": all_of_them / TURNS}

    async def idle(self) -> Figures:
        """What connections cost that are open and silent."""
        task, found = self.task(PROMPTS["700"], TURNS), Figures()
        found["without"] = 1e3 * await self.cpu_s(task, TURNS) / self.episodes / TURNS
        before = psutil.Process().memory_info().rss
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(json.dumps([task.endpoint.url.rpartition(":")[2], "", "", IDLE]).encode() + b"\n")
        await reader.readline()
        found["kb"] = (psutil.Process().memory_info().rss - before) / IDLE / 1024
        began = time.process_time()
        await asyncio.sleep(IDLE_S)
        found["idle_percent"] = 100 * (time.process_time() - began) / IDLE_S
        found["with"] = 1e3 * await self.cpu_s(task, TURNS) / self.episodes / TURNS
        await task.endpoint.stop()
        return found


async def requests(episodes: int) -> dict[str, Figures]:
    ready, child = multiprocessing.get_context("spawn").Pipe()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_chat_model(folder)
        process = multiprocessing.get_context("spawn").Process(target=clients, args=(child,), daemon=True)
        process.start()
        measured = Measured(TaskTokenizer(folder), folder, ready.recv(), episodes)
        await measured.turn_ms(PROMPTS["700"])
        found = {label: await measured.turn_ms(tokens) for label, tokens in PROMPTS.items()}
        found["in process"] = await measured.turn_ms(PROMPTS["700"], agent=False)
        found["idle"] = await measured.idle()
        process.kill()
    return found


async def played(config: RunConfig, folder: Path, batches: int) -> Figures:
    """A loop with a real engine: tokens a second."""
    run = RolloutRun(config, RunDir.create(folder, "loop"))
    await run.run(batches)
    return {"tokens_s": rate(run.points)}


def loops(batches: int, repeat: int) -> list[dict[str, Figures]]:
    """The same task in process and by the endpoint, in turn."""
    found = []
    kinds: dict[str, dict[str, Any]] = {
        "in process": {"name": f"{THIS}:Short"},
        "endpoint": {"agent": f"{THIS}:here", "reward": f"{THIS}:one", "options": {"max_tokens": Short.max_tokens}},
    }
    for _ in range(repeat):
        found.append(dict[str, Figures]())
        for kind, task in kinds.items():
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                write_chat_model(folder / "policy")
                rows = folder / "rows.jsonl"
                rows.write_text("".join(json.dumps({"prompt": f"{n} {SEEN * 8}"}) + "\n" for n in range(64)))
                text = configuration(folder / "policy", batches).as_data()
                text |= {"task": {**task, "data": str(rows)}, "env": {"sandbox": "none"}}
                found[-1][kind] = asyncio.run(played(validate(text), folder, batches))
    return found


async def boxes() -> Figures:
    """Boxes of this machine: one after the other, many at once, and many that sleep."""
    env, me = EnvSection(), psutil.Process()
    provider, starts, commands = chosen(env), list[float](), list[float]()
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(COMMANDS):
            began = time.perf_counter()
            box = Box(folder, provider, env)
            await box.run(["true"])
            middle = time.perf_counter()
            await box.run(["true"])
            starts.append(middle - began)
            commands.append(time.perf_counter() - middle)
            await box.close()

        def boxed() -> list[psutil.Process]:
            return [one for one in me.children(recursive=True) if one.name() in ("bwrap", "sh", "touch", "sleep")]

        async def many(count: int) -> tuple[float, float, float]:
            """Seconds until all of them run a command that sleeps, MB of each, and seconds until all are dead."""
            began = time.perf_counter()
            made = [Box(folder, provider, env) for _ in range(count)]
            running = [asyncio.create_task(box.run("touch up; exec sleep 600")) for box in made]
            while not all((box.root / "up").exists() for box in made):
                await asyncio.sleep(0.01)
            ready = time.perf_counter() - began
            used = sum(one.memory_full_info().uss for one in boxed()) / count / 1e6
            began = time.perf_counter()
            await asyncio.gather(*(box.end_processes() for box in made))
            await asyncio.gather(*running)
            dead = time.perf_counter() - began
            assert not boxed()
            await asyncio.gather(*(box.close() for box in made))
            return ready, used, dead

        ready, _, _ = await many(64)
        all_ready, used, dead = await many(512)
    milli = {"start_ms": 1e3 * median(starts), "command_ms": 1e3 * median(commands)}
    return {**milli, "ready_64_s": ready, "ready_512_s": all_ready, "mb": used, "dead_s": dead}


def main() -> None:
    given = options("agents", __doc__, episodes=32, repeat=3, batches=20)
    asked = [asyncio.run(requests(given.episodes)) for _ in range(given.repeat)]
    boxed = [asyncio.run(boxes()) for _ in range(given.repeat)]
    looped = loops(given.batches, given.repeat) if given.batches else []

    def of(part: str, name: str) -> str:
        return spread([one[part][name] for one in asked])

    rows: list[list[Any]] = [
        [f"{part}, {name} request, CPU ms", of(part, name)]
        for part in (*PROMPTS, "in process")
        for name in ("first", "next", "mean")
    ]
    rows.append(["requests a CPU second at 700 tokens", spread([1e3 / one["700"]["mean"] for one in asked], ".0f")])
    rows += [[f"{IDLE} connections idle: {name}", of("idle", name)] for name in asked[0]["idle"]]
    rows += [[f"boxes: {name}", spread([one[name] for one in boxed], ".3g")] for name in boxed[0]]
    rows += [
        [
            f"loop, endpoint / in process, {name}",
            spread([one["endpoint"][name] / one["in process"][name] for one in looped]),
        ]
        for name in (looped[0]["endpoint"] if looped else ())
    ]
    report(
        given,
        "What agents cost",
        columns=["", "median (range)"],
        rows=rows,
        notes=["A row's first request has the start of its episode; a mean is over conversations of 9."],
        raw=[asked, boxed, looped],
    )


if __name__ == "__main__":
    main()
