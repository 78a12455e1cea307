"""What a chat costs: its host's CPU time and memory, what follows a turn in a long context, and the loop's throughput.

- Host: episodes of two turns, a call of a tool that answers at once, and its answer; the box is not counted.
- Loop: rollout through leader, agent half, host and vLLM, of the sums of `bench.chat_learning`, against the same
  episodes written by hand over the token API (`HandSums`), one after the other.

    python -m bench.chat_cost [--model FOLDER] [--episodes 2000] [--repeat 3] [--batches 12]

``--model`` is a folder with a chat template; with ``--repeat 0``, without the loop, it needs no weights.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.chat_learning import SIZES, TOOL, chat_policy
from bench.chat_tasks import SAID, OneLook
from bench.harness import Rates, child, options, progress, rate, report, spread
from bench.loop import RolloutRun, configuration
from libra_hpc.chat.chat_task import ChatEnvironment
from libra_hpc.chat.dialects import TAIL
from libra_hpc.facts.rundir import RunDir
from libra_hpc.tasks.base import PolicyTurn
from libra_hpc.tasks.task_registry import build_task
from libra_hpc.tasks.tokenizer import TaskTokenizer
from tests.host.leader import Leader, host_settings, play

LONG = 32_768
"""Tokens of the long context."""
ROUNDS, TOGETHER = 200, 50
"""Repetitions of what is timed; episodes of a host at a time."""
TASKS = Path(__file__).with_name("chat_tasks.py")
ROWS = {"chat layer": TOOL, "token API": f"{TASKS}:HandSums"}


def host_cost(model: Path, end: str, episodes: int) -> dict[str, float]:
    """CPU seconds and memory of a host process that serves `OneLook`."""
    tokenizer = TaskTokenizer(model)
    turns = [tokenizer.encode(text + end) for text in SAID]
    answered = tokenizer.need("<tool_response>")
    with Leader(host_settings(task=f"{TASKS}:OneLook", model=str(model))) as leader:
        folder = Path("/proc", str(leader.process.pid))

        def play_some(first: int) -> None:
            names = {f"e{index}": index for index in range(first, first + TOGETHER)}
            ends = play(leader, lambda name, context: turns[answered in context], names)
            assert all(one.info["tool_calls"] == 1 for one in ends.values())

        play_some(0)
        before = cpu_s(folder)
        for first in range(0, episodes, TOGETHER):
            play_some(first)
        return {"episode_ms": 1e3 * (cpu_s(folder) - before) / episodes, "host_mb": resident(folder) / 1e6}


def cpu_s(folder: Path) -> float:
    """CPU seconds of a process so far."""
    user, system = (folder / "stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def delta_ms(environment: ChatEnvironment, sampled: list[int]) -> float:
    """CPU milliseconds for what follows a turn in a context of `LONG` tokens."""
    context = environment.tokenizer.encode("What is there? " * LONG)[:LONG]
    answer = [{"role": "tool", "tool_call_id": "call00000", "name": "look", "content": "nine o'clock " * 20}]
    started = time.process_time()
    for _ in range(ROUNDS):
        environment.choice.dialect.delta(context[-TAIL:], sampled, answer, environment.schemas)
    return 1e3 * (time.process_time() - started) / ROUNDS


async def same_episodes(tokenizer: TaskTokenizer) -> None:
    """Both tasks of the loop write the same tokens: the prompt, and what follows a call."""
    said = PolicyTurn(
        tokenizer.encode('<tool_call>\n{"name": "calc", "arguments": {"expression": "1 + 2"}}\n</tool_call>')
    )
    said = PolicyTurn([*said.tokens, tokenizer.need("<|im_end|>")])
    written, box = [], object()
    for name in ROWS.values():
        episode = build_task(name, SIZES, 0, tokenizer).open(5, 0, 0.0)
        await episode.start(box)  # type: ignore[arg-type]
        answer = await episode.step(said, box)  # type: ignore[arg-type]
        written.append((episode.prompt, sorted(episode.stop_ids), answer.tokens))
    assert written[0] == written[1], written


def loop_rate(model: Path, task: str, batches: int) -> dict[str, float]:
    """Generated tokens of the rollout side per second, and per CPU second of all its processes."""
    base = configuration(model, batches)
    config = base.changed(task={"name": task, "options": SIZES}, rollout={"max_model_len": 320})
    with tempfile.TemporaryDirectory(prefix="libra-chat-") as name:
        run = RolloutRun(config, RunDir.create(Path(name), "chat"))
        used: Rates = []

        async def watched() -> None:
            playing = asyncio.create_task(run.run(batches))
            while not playing.done():
                if run.points:
                    used.append((sum(map(cpu_s, tree(os.getpid()))), run.points[-1][1]))
                await asyncio.sleep(0.1)
            await playing

        asyncio.run(watched())
        return {"second": rate(run.points), "CPU second": rate(used)}


def tree(pid: int) -> Iterator[Path]:
    """Folders below /proc of a process and all that it has started."""
    yield Path("/proc", str(pid))
    for children in Path("/proc", str(pid), "task").glob("*/children"):
        for child_pid in children.read_text().split():
            yield from tree(int(child_pid))


def resident(folder: Path) -> int:
    """Bytes of a process in memory."""
    found = re.search(r"VmRSS:\s+(\d+) kB", (folder / "status").read_text())
    return 1024 * int(found[1]) if found else 0


def main() -> None:
    given = options("chat_cost", __doc__, model="", episodes=2000, repeat=3, batches=12, only="")
    model = Path(given.model or chat_policy(0, 1500))
    if given.only:
        print(json.dumps(loop_rate(model, ROWS[given.only], given.batches)))
        return
    tokenizer = TaskTokenizer(model)
    environment = OneLook(tokenizer).make({})
    assert isinstance(environment, ChatEnvironment)
    end = tokenizer.decode(environment.choice.dialect.stop_ids[-1:])
    found: dict[str, Any] = host_cost(model, end, given.episodes)
    found["delta_ms"] = delta_ms(environment, tokenizer.encode(SAID[0] + end))
    rows: list[list[Any]] = [
        ["episodes per CPU second of the host", 1e3 / found["episode_ms"], ">= 500"],
        ["memory of the host, MB", found["host_mb"], "<= 120"],
        ["what follows a turn at 32k tokens, ms", found["delta_ms"], "<= 2"],
    ]
    if given.repeat:
        asyncio.run(same_episodes(tokenizer))
        found["loop"] = loop = {name: list[dict[str, float]]() for name in ROWS}
        for turn in range(given.repeat):
            for name in list(ROWS)[:: -1 if turn % 2 else 1]:
                words = ("--model", str(model), "--batches", str(given.batches), "--only", name)
                loop[name].append(child("-m", "bench.chat_cost", *words))
                progress(f"{name}: {loop[name][-1]}")
        for unit in ("second", "CPU second"):
            ours, theirs = ([one[unit] for one in ran] for ran in loop.values())
            ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
            what = f"tokens per {unit} of the loop: {statistics.median(ours):,.0f} of {statistics.median(theirs):,.0f}"
            rows.append([what, spread(ratios), ">= 0.90"])
    notes = [f"renderer {environment.choice.dialect.name!r}; medians of {given.repeat} runs, by turns"]
    report(given, "What a chat costs", columns=["", "found", "goal"], rows=rows, notes=notes, raw=found)


if __name__ == "__main__":
    main()
