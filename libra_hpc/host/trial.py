"""Plays episodes outside a run: one for the task's author (`task try`), and the start of one before a job is queued.

``python -m libra_hpc.host.trial``, as `libra_hpc.host.host`, plays that start; nobody uses its socket.

- The task is built, sample 0 of prompt 0 opened and started, and at most `TURNS` turns of one stop token are answered.
- It cannot be built, opened or started, or a method is no coroutine -> a user's mistake, exit code 2.
- It needs what this machine lacks, such as a program -> a sentence on stdout: the nodes may have it.
- It is a chat -> how the policy's chat is written, on stdout.
- A step raises or answers what cannot be used -> a sentence on stdout: other turns may end better.

Sandbox, limits and checks are those of an environment host.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from libra_hpc.config.run import RunConfig
from libra_hpc.errors import OperationError, UserError, invalid
from libra_hpc.tasks.base import Episode, PolicyTurn, Task, ToolResult, Turn, Why
from libra_hpc.tasks.tokenizer import TaskTokenizer

from . import answers
from .answers import step_limit, tool_limits
from .contain import hide_memory
from .host import main
from .live_episode import LiveEpisode, Work
from .sandbox import Sandbox
from .settings import FOUND, MARK, PROMPT, task_of

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
                played = partial(_Played, tokenizer=tokenizer, write=write, report=report)
                end = await _played_with_branches(live, played, config.rollout.max_model_len)
                why = "dropped" if end is None else "done"
            finally:
                await live.end(why)
            return end
        finally:
            await tools.close()


async def _played_with_branches(
    live: LiveEpisode, played: Callable[[LiveEpisode], _Played], max_model_len: int
) -> Turn | None:
    """Play an episode and its branches at the same time; returns its end, None when one of them had no more turns."""
    playing = set[asyncio.Task[Turn | None]]()

    def play(one: LiveEpisode, started: bool = False) -> asyncio.Task[Turn | None]:
        task = asyncio.create_task(played(one).play(max_model_len, started))
        playing.add(task)
        return task

    live.episode.branch = lambda one: play(LiveEpisode(one, live.tools, 0.0), True)
    whole = play(live)
    try:
        while not whole.done():
            await asyncio.wait({*playing}, return_when=asyncio.FIRST_COMPLETED)
            if any(one.done() and one.result() is None for one in playing):
                return None
            playing -= {one for one in playing if one.done() and one is not whole}
        return whole.result()
    finally:
        for one in playing:
            one.cancel()


class _Played:
    def __init__(self, live: LiveEpisode, tokenizer: TaskTokenizer, write: Writer, report: Report) -> None:
        self._live, self._decode, self._write, self._report = live, tokenizer.decode, write, report

    async def play(self, max_model_len: int, started: bool) -> Turn | None:
        episode = self._live.episode
        if not started:
            await self._called(episode.start)
        answers.opened("", episode)
        context, info = list(episode.prompt), dict[str, float]()
        self._report("new sample" if started else "prompt", self._decode(context))
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


TURNS = 2
"""The first may end the episode; the second follows an answer of the environment."""


async def play(link: int, config: RunConfig) -> int:
    """See the module docstring; returns 0, or raises `UserError`."""
    config = config.changed(task={"tool_processes": 1})
    tokenizer = TaskTokenizer(config.model.path)
    try:
        task = task_of(config, tokenizer)
    except UserError:
        raise
    except BaseException as error:
        raise _mistake(config, "the task cannot be built", error) from error
    for chat in task.chats:
        print(f"{FOUND}chat: {chat}")
    try:
        task.check()
    except OperationError as error:
        return _unable(error)
    try:
        limits = tool_limits(task, config.task.tool_timeout_s)
        tools = Sandbox(task.tools, config.task, limits=limits)
    except (TypeError, AttributeError) as error:
        raise _mistake(config, "its tools are no table of functions", error) from error
    try:
        await tools.start()
        live = LiveEpisode(_open(config, task), tools, step_limit(task, config.deadlines.first_s))
        try:
            await _turns(config, live, tokenizer.eos_id or 0)
        finally:
            await live.end("dropped")
    finally:
        await tools.close()
    return 0


def _open(config: RunConfig, task: Task) -> Episode:
    try:
        episode: object = task.open(0, 0, 0.0)
        if not isinstance(episode, Episode):
            raise TypeError(f"open returned a {type(episode).__name__}, not an Episode")
    except UserError:
        raise
    except BaseException as error:
        raise _mistake(config, "its open fails", error) from error
    for call in (episode.start, episode.step, episode.truncated, episode.close):
        if not inspect.iscoroutinefunction(call):
            why = f"the {call.__name__} of {type(episode).__name__} is no coroutine function"
            raise invalid("task.name", config.task.host_task, why, f"`async def {call.__name__}(self, ...)`")
    return episode


async def _turns(config: RunConfig, live: LiveEpisode, eos: int) -> None:
    branch = asyncio.Event()
    live.episode.branch = lambda one: branch.set()
    outcome = await live.result(live.episode.start)
    try:
        if isinstance(outcome, BaseException):
            raise outcome
        answers.opened("trial", live.episode)
        _within(config, live.episode.prompt)
        print(f"{PROMPT}{len(live.episode.prompt)}")
    except OperationError as error:
        _unable(error)
        return
    except UserError:
        raise
    except BaseException as error:
        raise _mistake(config, "its start fails", error) from error
    stop, branched = live.episode.stop_ids[:1] or (eos,), asyncio.create_task(branch.wait())
    for _ in range(TURNS):
        step = asyncio.create_task(live.result(partial(live.episode.step, PolicyTurn(list(stop)))))
        await asyncio.wait({step, branched}, return_when=asyncio.FIRST_COMPLETED)
        if not step.done():
            return
        outcome = step.result()
        try:
            if isinstance(outcome, BaseException):
                raise outcome
            answers.stepped("trial", outcome)
            _within(config, outcome.tokens)
        except UserError:
            raise  # of a reward function: no text may break it
        except BaseException as error:
            # A reward with a cause is no number at all.
            if isinstance(error, answers.BadAnswer) or (isinstance(error, answers.BadReward) and error.__cause__):
                raise _mistake(config, "its step fails", error) from error
            print(f"{MARK}a turn of one stop token fails: {type(error).__name__}: {error}")
            return
        if outcome.done:
            return


def _unable(error: OperationError) -> int:
    print(f"{MARK}{error}\n{PROMPT}1")
    return 0


def _within(config: RunConfig, tokens: Sequence[int]) -> None:
    """Raise `BadAnswer` for a token that the policy lacks."""
    model = json.loads((Path(config.model.path) / "config.json").read_bytes())
    rows = model.get("text_config", model).get("vocab_size", answers.LARGEST_ID)
    if (largest := max(tokens, default=0)) >= rows:
        raise answers.BadAnswer(f"token {largest} is outside of the policy's vocabulary of {rows}")


def _mistake(config: RunConfig, what: str, error: BaseException) -> UserError:
    return invalid("task.name", config.task.host_task, f"{what} ({type(error).__name__}: {error})".replace("\n", " "))


if __name__ == "__main__":
    hide_memory()
    sys.exit(main("libra_hpc.host.trial", play))
