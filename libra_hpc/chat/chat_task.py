"""A task of messages and tools: `ChatTask`, and how its episodes speak tokens.

- The prompt is rendered once, by the policy's own template. Then the context only grows: by what was sampled, and by
  what the template writes after it (`dialects.py`).
- ``chat.thinking = "template"``, and the template drops thinking that the context has -> the conversation is rendered
  again, as the prompt of a new sample.
- Tool calls of one turn run in parallel and are answered in order.
- Unknown tool, bad JSON, missing argument -> an answer to the policy, counted; past ``chat.max_bad_calls`` it ends.
- No call -> `ChatTask.answer` goes on, or the episode ends. At its end, truncated or not, `ChatTask.reward` is asked.
- A tool raises -> an answer to the policy, counted; the log of the host has the first traceback of each tool and class.
  `EnvironmentFailed` is none: the trajectory is sampled again.
- Another exception of the task drops the trajectory and is reported.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import traceback
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from libra_hpc.errors import OperationError, UserError, invalid
from libra_hpc.protocol.env import Signal
from libra_hpc.tasks.base import Episode, PolicyTurn, Task, TaskMaker, ToolResult, Tools, Turn, Why
from libra_hpc.tasks.data_task import Rows, open_rows, row_at
from libra_hpc.tasks.tokenizer import Message, TaskTokenizer
from libra_hpc.tasks.tool_outcome import signal_of

from .dialects import TAIL, Reply, ToolCall, message_call
from .selftest import choose_dialect
from .tool_methods import BAD_CALL, MARK, BadCall, answer_text, find_tool, tool_methods


def tool(function: Any = None, *, timeout_s: float | None = None) -> Any:
    """Make ``async def name(self, box, argument: TYPE, ...) -> str`` of a `ChatTask` a tool: ``@tool``, ``@tool(...)``.

    ``row``, ``box`` and ``chat`` are the episode's, and may be left out. The docstring is what the policy reads.
    `ValueError` is an answer too, for arguments that make no sense. ``timeout_s`` is the most seconds of a call, waits
    for a free tool process included.
    """
    if function is None:
        return partial(tool, timeout_s=timeout_s)
    setattr(function, MARK, timeout_s)
    return function


@dataclass
class Chat:
    """A conversation so far."""

    messages: list[Message]
    """In OpenAI's form; thinking is ``reasoning_content``."""
    turns: int = 0
    """Turns of the policy."""
    tool_calls: int = 0
    bad_calls: int = 0
    """Calls that reached no tool."""
    tool_errors: int = 0
    """Calls whose tool raised another exception than `ValueError`."""
    stop: str = ""
    """Why it ended: ``answer`` | ``length`` (``max_tokens`` cut the last turn) | ``turns`` | ``bad_calls`` |
    ``truncated`` (no room in the context); empty before.
    """
    reply: Reply = field(default_factory=lambda: Reply(""))
    """The policy's last turn."""
    turn_reward: float = 0.0
    """A tool or `ChatTask.answer` may set it: the reward of that turn, for your own ``algorithm.advantage``."""

    @property
    def text(self) -> str:
        """Text of the policy's last turn, without thinking and calls."""
        return self.reply.text


class ChatTask(TaskMaker):
    """Write `reward`, tools if any, and `row` unless the run file has ``task.data``. ``box`` runs code (`Tools`)."""

    tools: Mapping[str, Callable[..., Any]] = {}
    """Functions for ``box.call``: see `Task`."""
    tool_limits: Mapping[str, float] = {}
    step_limit_s: float = 0.0
    max_turns: int = 16
    max_tokens: int = 1024
    """Most generated tokens of one turn."""

    def __init__(self, tokenizer: TaskTokenizer, *, seed: int = 0, data: str = "", prompt: str = "prompt") -> None:
        self.tokenizer, self.seed, self.prompt = tokenizer, seed, prompt
        self.rows: Rows | None = open_rows(data) if data or type(self).row is ChatTask.row else None

    def row(self, index: int) -> Any:
        """Row ``index`` (>= 0, any size) of the data order: the same for all samples of a prompt. By default those of
        ``task.data``, in an order of its own in each epoch.
        """
        assert self.rows is not None
        return self.rows[row_at(index, len(self.rows), self.seed)[1]]

    async def open(self, row: Any, box: Tools) -> str | list[Message]:
        """The prompt: text of the user, or messages. The default is the column ``task.prompt``."""
        if self.prompt not in row:
            raise invalid("task.prompt", self.prompt, "the row has no such column", list(row))
        prompt: str | list[Message] = row[self.prompt]
        return prompt

    async def answer(self, row: Any, chat: Chat, box: Tools) -> str | None:
        """The user's answer to a turn without calls; None ends the episode."""
        return None

    @abstractmethod
    async def reward(self, row: Any, chat: Chat, box: Tools) -> float | dict[str, float]:
        """Return the reward of a conversation that ended. Parts are columns of `metrics.jsonl`; the reward is the part
        ``reward``, else their sum.
        """

    async def close(self, row: Any, box: Tools) -> None:
        """Free what `open` took: called once at every end."""

    def make(self, settings: Mapping[str, Any]) -> Task:
        return ChatEnvironment(
            self, int(settings.get("max_bad_calls", 3)), drops_thinking=settings.get("thinking") == "template"
        )


class ChatEnvironment(Task):
    """A `ChatTask` as the host serves it; raises `UserError` when the policy's template cannot be followed exactly."""

    def __init__(self, made: ChatTask, max_bad_calls: int, drops_thinking: bool = False) -> None:
        super().__init__(made.tokenizer, seed=made.seed)
        for method in (made.open, made.answer, made.reward, made.close):
            if not inspect.iscoroutinefunction(method):
                why = f"{method.__name__} is no coroutine function"
                raise invalid("task.name", type(made).__name__, why, f"`async def {method.__name__}(self, ...)`")
        self.made, self.max_bad_calls, self.drops_thinking = made, max_bad_calls, drops_thinking
        self.tools, self.tool_limits = made.tools, made.tool_limits
        self.methods = tool_methods(type(made))
        self.step_limit_s = max(made.step_limit_s, *(one.timeout_s for one in self.methods.values()), 0.0)
        self.schemas = [one.schema for one in self.methods.values()]
        self.choice = choose_dialect(made.tokenizer, bool(self.methods))
        self.chats = (self.choice.found,)
        self._reported: set[tuple[str, type]] = set()
        print(f"chat: {self.choice.found}", file=sys.stderr)

    def raised(self, name: str, error: Exception) -> ToolResult:
        """The answer to a call whose tool raised."""
        if (name, type(error)) not in self._reported:
            self._reported.add((name, type(error)))
            traceback.print_exception(error)
        return ToolResult("error", f"error: {type(error).__name__}: {error}", 0.0)

    def open(self, index: int, sample: int, progress: float) -> Episode:
        prompt_id = f"{type(self.made).__name__}-{self.seed}-{index}"
        return ChatEpisode(self, self.made.row(index), prompt_id, partial(self._place, index))

    def _place(self, index: int) -> str:
        if (rows := self.made.rows) is None:
            return f"row {index} of {type(self.made).__name__}"
        return rows.place(row_at(index, len(rows), self.made.seed)[1])


class ChatEpisode(Episode):
    """One conversation."""

    def __init__(self, environment: ChatEnvironment, row: Any, prompt_id: str, place: Callable[[], str]) -> None:
        """``place``: where the row is, for messages."""
        self._place = place
        self.prompt_id, self._row, self._environment, self._made = prompt_id, row, environment, environment.made
        self._dialect = environment.choice.dialect
        self.max_tokens, self.stop_ids = self._made.max_tokens, self._dialect.stop_ids
        self._box: Tools | None = None
        self._thinking: list[int] = []
        """Numbers of the messages whose thinking the context has."""
        self._cut = False
        """Whether `max_tokens` ended the last turn."""

    async def start(self, tools: Tools) -> None:
        self._box = tools
        try:
            opened = await self._made.open(self._row, tools)
            self.chat = Chat([{"role": "user", "content": opened}] if isinstance(opened, str) else list(opened))
            self.prompt = self._dialect.first(self.chat.messages, self._environment.schemas)
        except UserError as error:
            raise UserError(f"{self._place()}: {error}") from error
        if self.chat.messages[-1]["role"] == "assistant":
            why = "its prompt ends with the assistant's answer, which the policy would read"
            raise invalid("task.name", type(self._made).__name__, why, "a method `open` that drops it")
        self._tail = self.prompt[-TAIL:]

    async def step(self, turn: PolicyTurn, tools: Tools) -> Turn:
        chat, schemas = self.chat, self._environment.schemas
        chat.reply = self._dialect.parse(self._tail, turn.tokens, schemas)
        chat.turns, chat.turn_reward = chat.turns + 1, 0.0
        if chat.reply.thinking:
            self._thinking.append(len(chat.messages))
        chat.messages.append(_spoken(chat.reply, chat.tool_calls))
        self._cut = turn.stop == "length"
        answers, called = await self._answers(turn, tools)
        chat.messages += answers
        if chat.stop:
            return await self._end(tools)
        if self._environment.drops_thinking and (prompt := self._rendered_again()):
            self._tail = prompt[-TAIL:]
            return Turn(prompt, _signals(called, 0), reward=chat.turn_reward, new_sample=True)
        delta = self._dialect.delta(self._tail, turn.tokens, answers, schemas)
        self._tail = [*self._tail, *turn.tokens, *delta][-TAIL:]
        return Turn(delta, _signals(called, len(delta)), reward=chat.turn_reward)

    def _rendered_again(self) -> list[int]:
        """The conversation as the template writes it now, if that drops thinking of the context; else empty."""
        messages, schemas = self.chat.messages, self._environment.schemas
        try:
            kept = self._dialect.keeps(messages, schemas, self._thinking) if self._thinking else []
            if kept == self._thinking:
                return []
            prompt = self._dialect.first(messages, schemas)
        except UserError:
            return []  # it refuses what the policy wrote, an odd call for example: the context grows as it is
        self._thinking = kept
        return prompt

    async def truncated(self, tools: Tools) -> Turn:
        self.chat.stop = "truncated"
        return await self._end(tools)

    async def close(self, why: Why) -> None:
        if self._box is not None:
            await self._made.close(self._row, self._box)

    async def _answers(self, turn: PolicyTurn, box: Tools) -> tuple[list[Message], list[tuple[str, ToolResult]]]:
        """Messages that follow a turn, and what its calls returned by the name of the tool; sets ``chat.stop``."""
        chat, answers, called = self.chat, list[Message](), list[tuple[str, ToolResult]]()
        if chat.reply.calls:
            called = await self._call(chat.reply.calls, box)
            for one, (_, result) in zip(chat.reply.calls, called, strict=True):
                identity = {"tool_call_id": _call_id(chat.tool_calls), "name": one.name or "tool"}
                answers.append({"role": "tool", **identity, "content": answer_text(result)})
                chat.tool_calls += 1
        elif turn.stop == "length":
            chat.stop = "length"
        else:
            answer = await self._made.answer(self._row, chat, box)
            chat.stop = "answer" if answer is None else ""
            answers += [] if answer is None else [{"role": "user", "content": answer}]
        if chat.bad_calls > self._environment.max_bad_calls:
            chat.stop = "bad_calls"
        elif chat.turns >= self._made.max_turns:
            chat.stop = chat.stop or "turns"
        return answers, called

    async def _call(self, calls: Sequence[ToolCall], box: Tools) -> list[tuple[str, ToolResult]]:
        """Run the calls of one turn in parallel; raises the first error that is the task's alone."""
        running: list[Any] = []
        for call in calls:
            try:
                method, arguments = find_tool(self._environment.methods, call)
            except BadCall as error:
                self.chat.bad_calls += 1
                running.append(_refused(f"error: {error}"))
            else:
                given = {"row": self._row, "box": box, "chat": self.chat}
                running.append(method.run(self._made, given, arguments))
        results: list[Any] = await asyncio.gather(*running, return_exceptions=True)  # none is left behind
        for place, result in enumerate(results):
            if isinstance(result, Exception) and not isinstance(result, OperationError | UserError):
                self.chat.tool_errors += 1
                results[place] = self._environment.raised(calls[place].name, result)
            elif isinstance(result, BaseException):
                raise result
        names = [call.name if call.name in self._environment.methods else BAD_CALL for call in calls]
        return list(zip(names, results, strict=True))

    async def _end(self, box: Tools) -> Turn:
        chat = self.chat
        found = await self._made.reward(self._row, chat, box)
        calls = {"tool_calls": chat.tool_calls, "bad_calls": chat.bad_calls, "tool_errors": chat.tool_errors}
        return Turn.end(found, (), turns=chat.turns, **calls, truncated=float(self._cut))


async def _refused(text: str) -> ToolResult:
    return ToolResult("error", text, 0.0)


def _call_id(number: int) -> str:
    return f"call{number:05d}"


def _spoken(reply: Reply, first_call: int) -> Message:
    """The message of a turn; calls that could not be read keep their text as arguments."""
    message: Message = {"role": "assistant", "content": reply.text}
    if reply.thinking:
        message["reasoning_content"] = reply.thinking
    if reply.calls:
        message["tool_calls"] = [
            message_call(_call_id(first_call + number), one.name, one.raw if one.error else one.arguments)
            for number, one in enumerate(reply.calls)
        ]
    return message


def _signals(called: Sequence[tuple[str, ToolResult]], tokens: int) -> list[Signal]:
    """One signal for each call; the delta's tokens are shared by the length of the answers."""
    lengths = [len(answer_text(result)) + 1 for _, result in called]
    return [
        signal_of(name, result, tokens * length // sum(lengths))
        for (name, result), length in zip(called, lengths, strict=True)
    ]
