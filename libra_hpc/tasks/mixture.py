"""``mixture``: several tasks in one run, the run file's ``[[task.train]]`` tables.

Prompt ``i`` of the data order belongs to a fixed task, so that every ``sum(weights)`` prompts in a row have exactly
``weight`` of each, spread evenly. Each task sees a data order of its own, without gaps. The id of a prompt begins with
the name of its task and a slash; a task alone beside evaluations has no name.

Evaluations (``[[task.eval]]``) are tasks too, whose prompts have numbers of their own
(`libra_hpc.protocol.env.evaluation_index`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import gcd
from typing import Any

from libra_hpc.errors import EnvironmentFailed, OperationError, UserError
from libra_hpc.protocol.env import EVALUATIONS, PROMPTS

from .base import Episode, PolicyTurn, Task, TaskMaker, ToolResult, Tools, Turn, Why, build_task
from .tokenizer import TaskTokenizer

HELD_OUT = 1 << 16
"""Distance of the seed of evaluations from the run's: a task that makes up prompts makes others than it trains on."""
SLASH = "/"
"""Between the name of a task and that of a prompt or tool of it."""


def task_order(weights: Sequence[int]) -> tuple[int, ...]:
    """Places of the tasks in one round of prompts, each as often as its weight; no task waits longer than it must."""
    shares = [weight // gcd(*weights) for weight in weights]
    due, order = [0] * len(shares), []
    for _ in range(sum(shares)):
        due = [have + share for have, share in zip(due, shares, strict=True)]
        chosen = due.index(max(due))
        due[chosen] -= sum(shares)
        order.append(chosen)
    return tuple(order)


class Mixture(TaskMaker):
    """``parts``: of each task its ``name``, ``task``, ``options`` and ``weight``; ``evals``: the same, no weight."""

    def __init__(
        self,
        tokenizer: TaskTokenizer,
        *,
        seed: int = 0,
        parts: Sequence[Mapping[str, Any]] = (),
        evals: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._tokenizer, self._seed, self._parts, self._evals = tokenizer, seed, parts, evals

    def make(self, settings: Mapping[str, Any]) -> Task:
        tasks, evals = (
            {part["name"]: self._built(part, self._seed + far, settings) for part in parts}
            for parts, far in ((self._parts, 0), (self._evals, HELD_OUT))
        )
        return MixedTask(self._tokenizer, self._seed, tasks, [part["weight"] for part in self._parts], evals)

    def _built(self, part: Mapping[str, Any], seed: int, settings: Mapping[str, Any]) -> Task:
        with _naming(part["name"]):
            return build_task(part["task"], part["options"], seed, self._tokenizer, chat=settings)


class MixedTask(Task):
    def __init__(
        self,
        tokenizer: TaskTokenizer,
        seed: int,
        tasks: Mapping[str, Task],
        weights: Sequence[int],
        evals: Mapping[str, Task],
    ) -> None:
        super().__init__(tokenizer, seed=seed)
        self._tasks, self._evals, self._order = _named(tasks), _named(evals), task_order(weights)
        self._in_round = Counter(self._order)
        named = [*self._tasks, *self._evals]
        self.tools = {f"{before}{key}": tool for before, task in named for key, tool in task.tools.items()}
        self.tool_limits = {f"{before}{key}": s for before, task in named for key, s in task.tool_limits.items()}
        self.step_limit_s = max(task.step_limit_s for _, task in named)
        self.chats = tuple(dict.fromkeys(chat for _, task in named for chat in task.chats))

    def open(self, index: int, sample: int, progress: float) -> Episode:
        if index >= EVALUATIONS:
            place, own = divmod(index - EVALUATIONS, PROMPTS)
            before, task = self._evals[place]
        else:
            rounds, place = divmod(index, len(self._order))
            chosen = self._order[place]
            own = rounds * self._in_round[chosen] + self._order[:place].count(chosen)
            before, task = self._tasks[chosen]
        return MixedEpisode(task.open(own, sample, progress), before)

    def check(self) -> None:
        for before, task in (*self._tasks, *self._evals):
            with _naming(before):
                task.check()


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Errors in words have the name of their task, if it has one."""
    try:
        yield
    except (UserError, OperationError) as error:
        kind = next(kind for kind in (UserError, EnvironmentFailed, OperationError) if isinstance(error, kind))
        raise kind(f"task {name.removesuffix(SLASH)!r}: {error}" if name else str(error)) from error


def _named(tasks: Mapping[str, Task]) -> list[tuple[str, Task]]:
    """What stands before the names of each task, and the task."""
    return [(f"{name}{SLASH}" if name else "", task) for name, task in tasks.items()]


class MixedEpisode(Episode):
    """An episode of one of the tasks; ``before`` stands before the names of its prompt and tools."""

    def __init__(self, episode: Episode, before: str) -> None:
        self._episode, self._before = episode, before
        episode.unwanted, episode.outside = lambda: self.unwanted(), lambda: self.outside()
        episode.branch = lambda one: self.branch(MixedEpisode(one, before))
        self._copy()

    def _copy(self) -> None:
        """What the host reads of an episode, as far as it is there."""
        for name in ("prompt", "max_tokens", "stop_ids"):
            if hasattr(self._episode, name):
                setattr(self, name, getattr(self._episode, name))
        if hasattr(self._episode, "prompt_id"):
            self.prompt_id = f"{self._before}{self._episode.prompt_id}"

    async def start(self, tools: Tools) -> None:
        with _naming(self._before):
            await self._episode.start(OwnTools(tools, self._before))
        self._copy()

    async def step(self, turn: PolicyTurn, tools: Tools) -> Turn:
        answer = await self._episode.step(turn, OwnTools(tools, self._before))
        self._copy()
        return answer

    async def truncated(self, tools: Tools) -> Turn:
        return await self._episode.truncated(OwnTools(tools, self._before))

    async def close(self, why: Why) -> None:
        await self._episode.close(why)


class OwnTools:
    """The sandbox, as one of the tasks sees it."""

    def __init__(self, tools: Tools, before: str) -> None:
        self._tools, self._before = tools, before

    async def call(self, name: str, *args: Any, **named: Any) -> ToolResult:
        return await self._tools.call(f"{self._before}{name}", *args, **named)

    async def python(self, code: str) -> ToolResult:
        return await self._tools.python(code)
