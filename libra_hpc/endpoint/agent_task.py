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
from collections import deque
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
from .conversation import Conversation, PlacedTurn
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


class AgentEpisode(Episode):
    """One agent at work."""

    def __init__(self, task: AgentEnvironment, row: Row, prompt_id: str) -> None:
        self.prompt_id, self._task, self._row = prompt_id, task, row
        self.max_tokens, self.stop_ids = task.made.max_tokens, task.choice.dialect.stop_ids
        self._conversation = Conversation(task.choice.dialect, task.made.drops_thinking)
        self._key = secrets.token_hex(16)
        self._asked: deque[Asked] = deque()
        self._news = asyncio.Event()
        """Set by a request, and by the agent's end."""
        self._pending: Asked | None = None
        """The request that gets the next turn."""
        self._turns, self._context = 0, 0
        self._answered_at = 0.0
        self._called: dict[str, str] = {}
        """Names of the tools of the last turn, by the call's id."""
        self._box: Box | None = None
        self._agent: asyncio.Task[Ran] | None = None
        self._limit = ""
        """The limit that ended it from outside."""

    async def start(self, tools: Tools) -> None:
        await self._task.endpoint.start()
        self._box = self._task.new_box()
        loop = asyncio.get_running_loop()
        self._clock = AgentClock(self._task.wall_s, loop.time())
        self._timer = loop.call_later(self._task.wall_s, self._end_agent, "time")
        self._agent = asyncio.create_task(self._work(self._box))
        self._agent.add_done_callback(self._ended)
        self._numbers = self._task.endpoint.open(self._key, self._ask, self._waits)
        placed = await self._next(self._task.context)
        if placed is None:
            raise self._silent(self._ran())
        self.prompt = placed.tokens

    def _silent(self, ran: Ran) -> Exception:
        """The error of an agent that ended without a request; a program that is not there may be on another node."""
        last = ran.output.strip().rpartition("\n")[2][-200:]
        why = f"{self._task.made.named}: it ended without a request ({_ending(ran)}){last and f': {last}'}"
        return OperationError(f"{why}.") if ran.exit_code == NOT_FOUND else RuntimeError(why)

    async def step(self, turn: PolicyTurn, tools: Tools) -> Turn:
        assert self._pending is not None
        answer = self._conversation.said(turn.tokens, turn.stop == "length", f"{self._turns:06d}")
        self._turns += 1
        self._called = {one.id: one.name for one in answer.calls}
        self._context = answer.prompt_tokens + len(turn.tokens) + turn.room
        dropped = len(turn.tokens) - answer.new_tokens
        asked = self._pending
        # The retry of a request whose client has gone may come; a replay has no tokens of a turn that nobody read.
        while (asked.left or not turn.tokens) and not asked.answer.done():
            await asyncio.sleep(LOOK_S)
        if asked.answer.done():
            self._conversation.unread()
            dropped = len(turn.tokens)
            self._numbers["unread_turns"] += 1
        self._answer(answer)
        placed = await self._next(self._context)
        if placed is None:
            return replace(await self._judged(), dropped=dropped)
        return Turn(placed.tokens, self._signals, new_sample=placed.new_sample, dropped=dropped)

    async def truncated(self, tools: Tools) -> Turn:
        """The agent learns that its context is full, and may end."""
        full = f"The messages do not fit the context of {self._context} tokens."
        self._answer(RequestRefused(400, CONTEXT_FULL, full))
        try:
            async with asyncio.timeout(self._task.made.leave_s):
                await self._next(0)
        except TimeoutError:
            self._end_agent()
        return await self._judged()

    async def close(self, why: Why) -> None:
        self._end_agent()
        self._task.endpoint.close(self._key)
        if self._box is not None:
            await self._box.close()

    def _end_agent(self, limit: str = "context") -> None:
        if self._agent is not None:
            self._limit = self._limit or limit
            self._agent.cancel()

    def _ended(self, agent: asyncio.Task[Ran]) -> None:
        """What outlives the agent, such as a thread of a coroutine, gets no turn."""
        self._task.endpoint.close(self._key)
        self._waits(False)
        self._news.set()

    def _ran(self) -> Ran:
        """How the agent ended."""
        assert self._agent is not None
        return Ran(1, "", self._limit) if self._agent.cancelled() else self._agent.result()

    def _waits(self, waits: bool) -> None:
        """The agent's clock stands from now on, or goes on."""
        self._timer.cancel()
        loop = asyncio.get_running_loop()
        if self._agent is not None and not self._agent.done():
            self._timer = loop.call_later(self._clock.left(loop.time(), waits), self._end_agent, "time")

    def _answer(self, answer: Answer | RequestRefused) -> None:
        pending, self._pending = self._pending, None
        self._answered_at = time.perf_counter()
        if pending is not None and not pending.answer.done():
            if isinstance(answer, RequestRefused):
                pending.answer.set_exception(answer)
            else:
                pending.answer.set_result(answer)

    def _ask(self, asked: Asked) -> None:
        if asked.request.unenforced and self._task.env.unenforced == "refuse":
            asked.answer.set_exception(RequestRefused(400, REFUSED, asked.request.unenforced))
            return
        self._numbers["unenforced_requests"] += bool(asked.request.unenforced)
        self._asked.append(asked)
        self._news.set()

    async def _next(self, most: int) -> PlacedTurn | None:
        """What the agent's next request goes on with, in a context of ``most`` tokens; None when it has ended."""
        assert self._agent is not None
        while not self._agent.done():
            if not self._asked:
                self._news.clear()
                await self._news.wait()
                continue
            asked = self._pending = self._asked.popleft()
            request = asked.request
            if asked.answer.done():
                continue
            try:
                if request.counts:
                    counted = partial(self._conversation.counted, request, most)
                    self._answer(await self._task.endpoint.apart(asked.size, counted))
                    continue
                placed = await self._task.endpoint.apart(asked.size, partial(self._conversation.place, request, most))
            except RequestRefused as why:
                self._answer(why)
                continue
            asked.answer.add_done_callback(lambda one: (one.cancelled() or one.exception()) and self.unwanted())
            self.max_tokens = min(request.max_tokens or NO_LIMIT, self._task.made.max_tokens)
            self._signals = self._signals_of(request, len(placed.tokens))
            return placed
        return None

    def _signals_of(self, request: AgentRequest, tokens: int) -> list[Signal]:
        """What the turn's tools returned: the messages behind the policy's last one. They share the time between."""
        seconds = time.perf_counter() - self._answered_at if self._turns else 0.0
        new = list(takewhile(lambda one: one["role"] != "assistant", reversed(request.messages)))[::-1]
        new = new if self._turns else []
        names = [self._called.get(one.get("tool_call_id", ""), "agent") for one in new]
        share = tokens // max(1, len(new))
        return [signal_of(name, one["content"], share, seconds) for name, one in zip(names, new, strict=True)]

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

    async def _judged(self) -> Turn:
        """The end: nothing of the agent runs any more when the reward is asked."""
        assert self._box is not None
        assert self._agent is not None
        await asyncio.wait({self._agent})
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
        self._numbers.update(moved_aside=self._box.moved_aside, unread=int(unread))
        numbers = {"turns": self._turns, "samples": self._conversation.samples, "agent_failed": float(failed)}
        causes = {f"new_{cause}": count for cause, count in self._conversation.causes.items()}
        limit = {f"limit_{ran.limit}": 1.0} if ran.limit else {}
        return Turn.end(found, (), **numbers, **causes, **+self._numbers, **limit)


def _coroutine(field: str, name: str) -> Callable[..., Any]:
    found = load_function(field, name)
    if not inspect.iscoroutinefunction(found):
        raise invalid(field, name, "it is no coroutine function", "`async def NAME(...)`")
    return found


def _ending(ran: Ran) -> str:
    return f"its limit of {ran.limit}" if ran.limit else f"exit code {ran.exit_code}"
