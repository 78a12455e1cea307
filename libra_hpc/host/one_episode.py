"""One episode of a task outside a run, for its author: prompt, turns, tool calls and end are reported as they come.

It has the sandbox, limits and checks of an environment host. Raises `OperationError` when the task's code fails.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from libra_hpc.config.run import RunConfig
from libra_hpc.errors import OperationError, UserError
from libra_hpc.tasks.base import PolicyTurn, ToolResult, Turn, Why
from libra_hpc.tasks.tokenizer import TaskTokenizer

from . import answers
from .declared import step_limit, tool_limits
from .live_episode import LiveEpisode
from .sandbox import Sandbox
from .settings import task_of
from .step import Work

Writer = Callable[[list[int], int, tuple[int, ...]], list[int] | None]
"""(context, most tokens, stop ids) -> the policy's next turn; None when it has no more."""
Report = Callable[[str, str], None]
"""Gets who and what: ``prompt``, ``policy``, ``tool``, ``environment`` or ``new sample``, and a text."""


async def play_one(config: RunConfig, index: int, write: Writer, report: Report) -> Turn | None:
    """Play prompt ``index`` of the data order; returns the end, None when ``write`` had no turn before."""
    tokenizer = TaskTokenizer(config.model.path)
    task = task_of(config, tokenizer)
    task.check()
    with tempfile.TemporaryDirectory(prefix="libra-try-") as folder:
        limits = tool_limits(task, config.task.tool_timeout_s)
        tools = Sandbox(task.tools, config.task, folder=folder, limits=limits)
        try:
            await tools.start()
            limit_s = step_limit(task, config.deadlines.first_s)
            live = LiveEpisode(task.open(index, 0, 0.0), _ReportedTools(tools, report), limit_s)
            why: Why = "failed"
            try:
                end = await _Played(live, tokenizer, write, report).play(config.rollout.max_model_len)
                why = "dropped" if end is None else "done"
            finally:
                await live.end(why)
            return end
        finally:
            await tools.close()


class _Played:
    def __init__(self, live: LiveEpisode, tokenizer: TaskTokenizer, write: Writer, report: Report) -> None:
        self._live, self._decode, self._write, self._report = live, tokenizer.decode, write, report

    async def play(self, max_model_len: int) -> Turn | None:
        episode = self._live.episode
        await self._called(episode.start)
        answers.opened("", episode)
        context, info = list(episode.prompt), dict[str, float]()
        self._report("prompt", self._decode(context))
        while (room := max_model_len - len(context)) > 0:
            tokens = self._write(context, min(episode.max_tokens, room), episode.stop_ids)
            if tokens is None:
                return None
            self._report("policy", self._decode(tokens))
            stopped = tokens[-1:] and tokens[-1] in episode.stop_ids
            reply = PolicyTurn(tokens, "stop" if stopped else "length", room - len(tokens))
            turn: Turn = await self._called(partial(episode.step, reply))
            answers.stepped("", turn)
            info |= turn.info
            if turn.done:
                return replace(turn, info=info)
            kept = tokens[: len(tokens) - turn.dropped]
            self._report("new sample" if turn.new_sample else "environment", self._decode(turn.tokens))
            context = [*turn.tokens] if turn.new_sample else [*context, *kept, *turn.tokens]
        turn = await self._called(episode.truncated)
        answers.stepped("", turn)
        return replace(turn, done=True, info={**info, **turn.info, "truncated": 1.0})

    async def _called(self, work: Work) -> Any:
        outcome = await self._live.result(work)
        if isinstance(outcome, BaseException) and not isinstance(outcome, UserError):
            raise OperationError(f"The episode failed: {type(outcome).__name__}: {outcome}") from outcome
        if isinstance(outcome, UserError):
            raise outcome
        return outcome


class _ReportedTools:
    """`Tools` whose calls are reported."""

    def __init__(self, tools: Sandbox, report: Report) -> None:
        self._tools, self._report = tools, report

    async def call(self, name: str, *args: Any, **named: Any) -> ToolResult:
        given = [*map(answers.shown, args), *(f"{key}={answers.shown(value)}" for key, value in named.items())]
        return self._reported(f"{name}({', '.join(given)})", await self._tools.call(name, *args, **named))

    async def python(self, code: str) -> ToolResult:
        return self._reported(f"python:\n{code}\n", await self._tools.python(code))

    def _reported(self, call: str, result: ToolResult) -> ToolResult:
        self._report("tool", f"{call} -> {result.outcome} after {result.seconds:.3f} s: {result.value}")
        return result
