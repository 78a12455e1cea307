"""The task whose agent is any program: ``task.command``, or a coroutine ``task.agent``; then ``task.reward`` judges.

- An agent gets an address and a key: OpenAI's and Anthropic's SDKs find both in its environment. Each of its requests
  is a turn, token for token (`conversation.py`).
- A program runs in the episode's box. When it has ended, all its processes are killed; then the reward is asked.
- It fails, or a limit ends it -> the reward is asked all the same. Its box fails -> the trajectory is sampled again.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import secrets
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from libra_hpc.boxes.box import OF_AGENT, Box, Ran
from libra_hpc.boxes.providers import SOCKET, Provider, chosen
from libra_hpc.chat.selftest import choose_dialect
from libra_hpc.config.job import EnvSection
from libra_hpc.errors import LONGEST_VALUE, OperationError, UserError, invalid
from libra_hpc.protocol.env import Signal
from libra_hpc.tasks.base import Episode, PolicyTurn, Task, TaskMaker, Tools, Turn, Why
from libra_hpc.tasks.data_task import NO_LIMIT, Row, Rows, open_rows, row_at
from libra_hpc.tasks.tokenizer import TaskTokenizer
from libra_hpc.tasks.tool_outcome import signal_of
from libra_hpc.user_file import load_function

from .agent_clock import AgentClock
from .agent_endpoint import AgentEndpoint, Asked, SynchronousClient
from .agent_request import CONTEXT_FULL, REFUSED, AgentRequest, Answer, RequestRefused
from .conversation import Conversation, GrowingSample, PlacedTurn
from .forward import NOT_FOUND

INSIDE_PORT = 8000
"""Port of the endpoint in a box without network."""
LEAVE_S = 30.0
"""Seconds for an agent to end that has learnt that its context is full."""
FORWARD = "/run/forward.py"
LINES = 60
"""Lines of a failed agent's output, or of its traceback, in the log of the host."""
LOOK_S = 0.05
"""Seconds between two looks for the retry of a request whose client has gone."""


class Address(NamedTuple):
    """Where a coroutine that is an agent finds the policy."""

    url: str
    """OpenAI's base URL; Anthropic's is the same without ``/v1``."""
    key: str


class AgentTask(TaskMaker):
    """``task.command`` or ``task.agent``, with the other keys of its table."""

    leave_s = LEAVE_S
    drops_thinking: bool
    agent: Callable[..., Any] | None
    judge: Callable[..., Any]

    def __init__(
        self,
        tokenizer: TaskTokenizer,
        *,
        seed: int = 0,
        data: str = "",
        prompt: str = "prompt",
        command: Sequence[str] = (),
        agent: str = "",
        reward: str = "",
        max_tokens: int = NO_LIMIT,
    ) -> None:
        if bool(command) == bool(agent):
            raise invalid("task.command", list(command), "one of task.command and task.agent is the agent")
        self.tokenizer, self.seed, self.data, self.prompt = tokenizer, seed, data, prompt
        self.command, self.max_tokens = tuple(command), max_tokens
        self.agent = _coroutine("task.agent", agent) if agent else None
        self.named = f"task.agent = {agent!r}" if agent else f"task.command = {list(command)!r:.{LONGEST_VALUE}}"
        """The agent's key and value."""
        self.reward, self.judge = reward, _coroutine("task.reward", reward)

    def make(self, settings: Mapping[str, Any]) -> Task:
        env = msgspec.convert(settings.get("env", {}), EnvSection)
        self.drops_thinking = settings.get("thinking") == "template"
        return AgentEnvironment(self, open_rows(self.data), chosen(env), env, settings.get("context", NO_LIMIT))


class AgentEnvironment(Task):
    """An `AgentTask` as the host serves it; raises `UserError` for a template that cannot be followed exactly."""

    def __init__(
        self, made: AgentTask, rows: Rows | list[Row], provider: Provider, env: EnvSection, context: int = NO_LIMIT
    ) -> None:
        super().__init__(made.tokenizer, seed=made.seed)
        self.made, self.rows, self._name = made, rows, Path(made.data).stem
        self._provider, self.env, self.wall_s = provider, env, env.limits.wall_s
        self.forwarded = provider.network and env.network == "none"
        """Whether a box reaches the endpoint by its socket alone."""
        self.step_limit_s = self.wall_s + made.leave_s
        self.choice = choose_dialect(made.tokenizer, with_tools=True)
        self.chats = (self.choice.found,)
        self.context, self.endpoint = context, AgentEndpoint(context, made.tokenizer.longest)
        self._failures: set[str] = set()

    def open(self, index: int, sample: int, progress: float) -> Episode:
        epoch, number = row_at(index, len(self.rows), self.seed)
        return AgentEpisode(self, {**self.rows[number]}, f"{self._name}-{epoch}.{number}")

    def check(self) -> None:
        row = self.rows[0]
        for part in self.made.command:
            for name in re.findall(r"{(\w+)}", part):
                if name != "prompt" and name not in row:
                    raise invalid("task.command", part, f"the rows have no column {name!r}", list(row))
        if any("{prompt}" in part for part in self.made.command) and self.made.prompt not in row:
            raise invalid("task.prompt", self.made.prompt, "the rows have no such column", list(row))
        program = next(iter(self.made.command), "")
        # A site's own box has programs of its own.
        if not self.env.box and program and "{" not in program and shutil.which(program) is None:
            raise OperationError(f"{self.made.named}: there is no program {program!r} on this machine.")

    def new_box(self) -> Box:
        # In the temporary folder, which the host's starter removes even when the host is killed.
        return Box(tempfile.gettempdir(), self._provider, self.env)

    def report(self, ran: Ran) -> None:
        """Log how a program failed, once for each last line."""
        lines = ran.output.splitlines()[-LINES:]
        if (last := lines[-1] if lines else "") not in self._failures:
            self._failures.add(last)
            print(f"an agent failed ({_ending(ran)}):", *lines, sep="\n  ", file=sys.stderr)

    def command_for(self, row: Row) -> list[str]:
        """The agent's program, with the row's columns in it."""
        values = row | {"prompt": row.get(self.made.prompt, "")}
        return [re.sub(r"{(\w+)}", lambda m: str(values.get(m[1], m[0])), part) for part in self.made.command]


class AgentSample(Episode):
    """One growing sample of an agent's episode: its turns follow one another, beside those of others."""

    def __init__(self, whole: AgentEpisode | None = None) -> None:
        self._whole = whole
        self._asked: Asked
        """The request that gets the next turn."""
        self.placed: PlacedTurn | None = None
        """What that turn follows."""
        self.turns = 0
        self._called: dict[str, str] = {}
        """Names of the tools of the last turn, by the call's id."""
        self._signals: list[Signal] = []
        self.news, self.over = asyncio.Event(), asyncio.Event()
        """Set by a request that goes on here, and by the agent's end; set when no turn follows."""

    @property
    def whole(self) -> AgentEpisode:
        assert self._whole is not None
        return self._whole

    @property
    def sample(self) -> GrowingSample | None:
        return self.placed and self.placed.sample

    def wants(self, asked: Asked, placed: PlacedTurn, max_tokens: int) -> None:
        """A request goes on here."""
        self._signals = self._signals_of(asked.request, len(placed.tokens))
        self._asked, self.placed, self.max_tokens = asked, placed, max_tokens
        asked.answer.add_done_callback(lambda one: (one.cancelled() or one.exception()) and self.unwanted())
        self.news.set()

    async def step(self, turn: PolicyTurn, tools: Tools) -> Turn:
        assert self.placed is not None
        whole, asked, sample = self.whole, self._asked, self.placed.sample
        answer = whole.conversation.said(
            sample, turn.tokens, turn.stop == "length", f"{whole.samples.index(self):03d}_{self.turns:03d}"
        )
        self.turns += 1
        self._called = {one.id: one.name for one in answer.calls}
        whole.context = answer.prompt_tokens + len(turn.tokens) + turn.room
        dropped = len(turn.tokens) - answer.new_tokens
        # The retry of a request whose client has gone may come; a replay has no tokens of a turn that nobody read.
        while (asked.left or not turn.tokens) and not asked.answer.done():
            await asyncio.sleep(LOOK_S)
        if asked.answer.done():
            whole.conversation.unread(sample)
            dropped = len(turn.tokens)
            whole.numbers["unread_turns"] += 1
        whole.answer(asked, answer)
        return replace(await self._following(), dropped=dropped)

    async def _following(self) -> Turn:
        """What the next request here adds, or the end."""
        with self.outside():
            await self.news.wait()
        self.news.clear()
        if not self.whole.ended and self.placed is not None:
            return Turn(self.placed.tokens, self._signals)
        self.over.set()
        return await self.ends()

    async def ends(self) -> Turn:
        """The last answer: the agent has ended."""
        return Turn(done=True)

    async def truncated(self, tools: Tools) -> Turn:
        """The agent learns that its context is full, and may end."""
        whole = self.whole
        full = f"The messages do not fit the context of {whole.context} tokens."
        whole.answer(self._asked, RequestRefused(400, CONTEXT_FULL, full))
        whole.context = 0
        await whole.leave()
        return await self._following()

    def _signals_of(self, request: AgentRequest, tokens: int) -> list[Signal]:
        """What the turn's tools returned: the messages behind the policy's last one. They share the time between."""
        if not self.turns:
            return []
        seconds = time.perf_counter() - self.whole.answered_at
        new = list(takewhile(lambda one: one["role"] != "assistant", reversed(request.messages)))[::-1]
        names = [self._called.get(one.get("tool_call_id", ""), "agent") for one in new]
        share = tokens // max(1, len(new))
        return [signal_of(name, one["content"], share, seconds) for name, one in zip(names, new, strict=True)]


class AgentEpisode(AgentSample):
    """One agent at work, and the first of its samples."""

    def __init__(self, task: AgentEnvironment, row: Row, prompt_id: str) -> None:
        super().__init__()
        self.prompt_id, self._task, self._row = prompt_id, task, row
        self.stop_ids, self.context = task.choice.dialect.stop_ids, task.context
        self.conversation = Conversation(task.choice.dialect, task.made.drops_thinking)
        self.samples: list[AgentSample] = []
        """In the order in which they began."""
        self._key = secrets.token_hex(16)
        self._requests = asyncio.Queue[Asked]()
        self.answered_at = 0.0
        self._box: Box | None = None
        self._agent: asyncio.Task[Ran] | None = None
        self._placing: asyncio.Task[None] | None = None
        self._broken: Exception | None = None
        self._limit = ""
        """The limit that ended it from outside."""

    @property
    def whole(self) -> AgentEpisode:
        return self

    @property
    def ended(self) -> bool:
        return self._agent is None or self._agent.done()

    async def start(self, tools: Tools) -> None:
        await self._task.endpoint.start()
        self._box = self._task.new_box()
        loop = asyncio.get_running_loop()
        self._clock = AgentClock(self._task.wall_s, loop.time())
        self._timer = loop.call_later(self._task.wall_s, self._end_agent, "time")
        self._agent = asyncio.create_task(self._work(self._box))
        self._agent.add_done_callback(self._ended)
        self.numbers = self._task.endpoint.open(self._key, self._ask, self._waits)
        self._placing = asyncio.create_task(self._place_all())
        await self.news.wait()
        if self.placed is None:
            raise self._silent(self._ran())
        self.prompt = self.placed.tokens
        if not self.ended:
            self.news.clear()

    def _silent(self, ran: Ran) -> Exception:
        """The error of an agent that ended without a request; a program that is not there may be on another node."""
        last = ran.output.strip().rpartition("\n")[2][-200:]
        why = f"{self._task.made.named}: it ended without a request ({_ending(ran)}){last and f': {last}'}"
        return OperationError(f"{why}.") if ran.exit_code == NOT_FOUND else RuntimeError(why)

    async def leave(self) -> None:
        """Wait for an agent that may end, and end it."""
        assert self._agent is not None
        await asyncio.wait({self._agent}, timeout=self._task.made.leave_s)
        self._end_agent()

    async def close(self, why: Why) -> None:
        self._end_agent()
        self._task.endpoint.close(self._key)
        if self._placing is not None:
            self._placing.cancel()
        if self._box is not None:
            await self._box.close()

    def _end_agent(self, limit: str = "context") -> None:
        if self._agent is not None and not self._agent.done():
            self._limit = self._limit or limit
            self._agent.cancel()

    def _ended(self, agent: asyncio.Task[Ran]) -> None:
        """What outlives the agent, such as a thread of a coroutine, gets no turn."""
        self._task.endpoint.close(self._key)
        self._waits(False)
        for one in (self, *self.samples):
            one.news.set()

    def _ran(self) -> Ran:
        """How the agent ended; raises what broke the episode."""
        if self._broken is not None:
            raise self._broken
        assert self._agent is not None
        return Ran(1, "", self._limit) if self._agent.cancelled() else self._agent.result()

    def _waits(self, waits: bool) -> None:
        """The agent's clock stands from now on, or goes on."""
        self._timer.cancel()
        loop = asyncio.get_running_loop()
        if not self.ended:
            self._timer = loop.call_later(self._clock.left(loop.time(), waits), self._end_agent, "time")

    def answer(self, asked: Asked, answer: Answer | RequestRefused) -> None:
        self.answered_at = time.perf_counter()
        if not asked.answer.done():
            if isinstance(answer, RequestRefused):
                asked.answer.set_exception(answer)
            else:
                asked.answer.set_result(answer)

    def _ask(self, asked: Asked) -> None:
        if asked.request.unenforced and self._task.env.unenforced == "refuse":
            asked.answer.set_exception(RequestRefused(400, REFUSED, asked.request.unenforced))
            return
        self.numbers["unenforced_requests"] += bool(asked.request.unenforced)
        self._requests.put_nowait(asked)

    async def _place_all(self) -> None:
        """Give each request its sample, one after the other; their turns run at the same time."""
        while True:
            asked = await self._requests.get()
            if not asked.answer.done():
                try:
                    await self._place(asked)
                except RequestRefused as why:
                    self.answer(asked, why)
                except Exception as error:
                    self._broken = error
                    self._end_agent()
                    return

    async def _place(self, asked: Asked) -> None:
        """Raises `RequestRefused`."""
        request, apart = asked.request, partial(self._task.endpoint.apart, asked.size)
        if request.counts:
            self.answer(asked, await apart(partial(self.conversation.counted, request, self.context)))
            return
        placed = await apart(partial(self.conversation.place, request, self.context))
        if self.ended:
            return
        max_tokens = min(request.max_tokens or NO_LIMIT, self._task.made.max_tokens)
        if not placed.new_sample:
            next(one for one in self.samples if one.sample is placed.sample).wants(asked, placed, max_tokens)
            return
        own = AgentSample(self) if self.samples else self
        self.samples.append(own)
        own.wants(asked, placed, max_tokens)
        if own is not self:
            own.news.clear()
            own.prompt_id, own.stop_ids, own.prompt = self.prompt_id, self.stop_ids, placed.tokens
            self.branch(own)

    async def _work(self, box: Box) -> Ran:
        """Run the agent to its end; raises `OperationError` when its box fails."""
        task, url = self._task, f"{self._task.endpoint.url}/v1"
        if task.made.agent is None:
            return await self._program(box)
        OF_AGENT.set(True)
        try:
            await task.made.agent(self._row, Address(url, self._key), box)
        except SynchronousClient as error:
            raise UserError(f"{task.made.named}: {error}.") from error
        except OperationError:
            raise
        except Exception as error:
            return Ran(1, "".join(traceback.format_exception(error)))
        return Ran(0, "")

    async def _program(self, box: Box) -> Ran:
        task = self._task
        command, url, mount = task.command_for(self._row), task.endpoint.url, dict[str, str]()
        socket = task.endpoint.socket if task.forwarded else None
        if socket is not None:
            url = f"http://127.0.0.1:{INSIDE_PORT}"
            mount = {FORWARD: str(Path(__file__).with_name("forward.py"))}
            command = [sys.executable, "-IS", FORWARD, SOCKET, str(INSIDE_PORT), *command]
        env = {
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": self._key,
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": self._key,
        }
        return await box.run(command, timeout_s=0.0, env=env, mount=mount, socket=socket)

    async def ends(self) -> Turn:
        """The reward: nothing of the agent runs any more when it is asked, and all its turns are there."""
        assert self._box is not None
        with self.outside():
            for one in self.samples:
                await one.over.wait()
        ran = self._ran()
        await self._box.end_processes()
        self._box.judge()
        failed = ran.exit_code != 0 and not ran.limit
        if failed:
            self._task.report(ran)
        found, unread = 0.0, False
        try:
            found = await self._task.made.judge(self._row, self._box)
        except OperationError:
            raise
        except Exception as error:
            # A file as the agent left it is no failed attempt, which would be sampled again.
            if not (unread := error is self._box.unread):
                why = f"it fails for {self.prompt_id} ({type(error).__name__}: {error})"
                raise UserError(f"task.reward = {self._task.made.reward!r}: {why}.") from error
        self.numbers.update(moved_aside=self._box.moved_aside, unread=int(unread))
        turns = sum(one.turns for one in self.samples)
        numbers = {"turns": turns, "samples": len(self.samples), "agent_failed": float(failed)}
        causes = {f"new_{cause}": count for cause, count in self.conversation.causes.items()}
        limit = {f"limit_{ran.limit}": 1.0} if ran.limit else {}
        return Turn.end(found, (), **numbers, **causes, **+self.numbers, **limit)


def _coroutine(field: str, name: str) -> Callable[..., Any]:
    found = load_function(field, name)
    if not inspect.iscoroutinefunction(found):
        raise invalid(field, name, "it is no coroutine function", "`async def NAME(...)`")
    return found


def _ending(ran: Ran) -> str:
    return f"its limit of {ran.limit}" if ran.limit else f"exit code {ran.exit_code}"
