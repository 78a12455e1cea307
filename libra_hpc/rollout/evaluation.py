"""Evaluations inside a run: prompts of their own, on engines that have room, while training goes on.

- The weights on all engines are of a step that is due -> its evaluation begins; one of a task at a time.  The last step
  is always due, and the run ends once it is evaluated.
- Its trajectories begin only where engines have room and no turn of training waits. They are in no batch.
- A trajectory fails -> counted, never tried again. Its host is lost -> sampled again from its prompt.
- All have ended -> one line of ``evaluations.jsonl``. A start that finds no line for a due step evaluates what it has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import comb, inf, sqrt
from typing import Any

from libra_hpc.config.learn import EvalPart
from libra_hpc.policies.learning.advantages import mean_and_std
from libra_hpc.protocol.env import evaluation_index

from .trajectory import Trajectory

REWARD = "reward"
"""The part that is the reward itself."""
ROOM = 0.75
"""Share of all engines' turns up to which trajectories of evaluations begin. Half: they take longer than they need to;
all of it: training's next turn would wait for one of theirs."""


@dataclass
class OpenEvaluation:
    """One evaluation in progress."""

    place: int
    part: EvalPart
    step: int
    """Step of the weights that it began with."""
    began: float
    begun: int = 0
    """Trajectories that have begun, sample by sample of each prompt."""
    failed: list[Trajectory] = field(default_factory=list)
    done: list[Trajectory] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Trajectories that have not begun."""
        return self.part.prompts * self.part.samples - self.begun

    @property
    def open(self) -> int:
        """Trajectories that have begun and not ended."""
        return self.begun - len(self.failed) - len(self.done)


class Evaluations:
    """``write`` gets the line of an evaluation that has ended, and its trajectories."""

    def __init__(
        self, parts: Sequence[EvalPart], steps: int, write: Callable[[dict[str, Any], list[Trajectory]], None]
    ) -> None:
        self._parts, self._steps, self._write = parts, steps, write
        self._last: dict[str, int] = {}
        """By task, the step of its newest evaluation."""
        self._open: dict[str, OpenEvaluation] = {}
        self._version = -1

    def restore(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Take what earlier starts have evaluated."""
        for line in lines:
            self._last[line["task"]] = max(int(line["step"]), self._last.get(line["task"], -1))

    def on_version(self, step: int, now: float) -> None:
        """All engines have the weights of ``step``, or newer ones."""
        self._version = step
        for place, part in enumerate(self._parts):
            due = step if step >= self._steps else step // part.every * part.every
            if part.name not in self._open and self._last.get(part.name, -1) < due:
                self._open[part.name] = OpenEvaluation(place, part, step, now)
                self._last[part.name] = step

    @property
    def unfinished(self) -> bool:
        """Whether an evaluation goes on, or that of the last step has not begun."""
        return bool(self._open) or any(self._last.get(part.name, -1) < self._steps for part in self._parts)

    @property
    def progress(self) -> tuple[int, int]:
        """Trajectories of the evaluations in progress that have ended, and all of them."""
        open_now = self._open.values()
        wanted = sum(one.part.prompts * one.part.samples for one in open_now)
        return wanted - sum(one.left + one.open for one in open_now), wanted

    def begin(self, inflight: int, capacity: int) -> list[Trajectory]:
        """Trajectories that begin now, with ``inflight`` of ``capacity`` turns at engines."""
        begun: list[Trajectory] = []
        busy = max(inflight, sum(one.open for one in self._open.values()))
        for one in self._open.values():
            while one.left and busy + len(begun) < ROOM * capacity:
                prompt, sample = divmod(one.begun, one.part.samples)
                one.begun += 1
                begun.append(Trajectory(index=evaluation_index(one.place, prompt), sample=sample, task=one.part.name))
        return begun

    def finished(self, trajectory: Trajectory, now: float) -> None:
        self._open[trajectory.evaluation].done.append(trajectory)
        self._ended(trajectory.evaluation, now)

    def failed(self, trajectory: Trajectory, now: float) -> None:
        self._open[trajectory.evaluation].failed.append(trajectory)
        self._ended(trajectory.evaluation, now)

    def _ended(self, name: str, now: float) -> None:
        one = self._open[name]
        if not one.open and not one.left:
            del self._open[name]
            self._write(result_line(one, now - one.began), [*one.done, *one.failed])
            self.on_version(self._version, now)


def result_line(one: OpenEvaluation, seconds: float) -> dict[str, Any]:
    """The result of an evaluation; numbers of rewards are absent where every trajectory failed.

    ``stderr`` is that of the mean over prompts, whose samples are not independent. ``best_of``: the mean of each
    prompt's best sample. ``pass_at``: `pass_at` of those that are ``solved``; empty where rewards are not all from 0 to
    1 and the table names no part of them, or one that no trajectory has.
    """
    by_prompt: dict[int, list[float]] = {}
    part = one.part
    for trajectory in one.done:
        by_prompt.setdefault(trajectory.index, []).append(trajectory.reward)
    means = [mean_and_std(rewards)[0] for rewards in by_prompt.values()]
    found: dict[str, Any] = {}
    if means:
        mean, std = mean_and_std(means)
        names = sorted({name for t in one.done for name in t.info})
        versions = [version for t in one.done for version, _ in t.versions]
        found = {
            "mean": mean,
            "stderr": std / sqrt(max(1, len(means) - 1)),
            "best_of": sum(map(max, by_prompt.values())) / len(by_prompt),
            "solved": f"{part.solved or REWARD} >= {part.solved_at:g}",
            "pass_at": pass_at(solved(part, one.done)),
            "turns": sum(len(t.turns) for t in one.done) / len(one.done),
            "gen_tokens": sum(t.generated for t in one.done),
            "versions": [min(versions), max(versions)],
            "info": {name: mean_and_std([t.info[name] for t in one.done if name in t.info])[0] for name in names},
        }
    return {
        "t": time.time(),
        "task": part.name,
        "step": one.step,
        "prompts": part.prompts,
        "samples": part.samples,
        "failed": len(one.failed),
        "seconds": seconds,
        **found,
    }


def solved(part: EvalPart, done: Sequence[Trajectory]) -> list[list[bool]]:
    """By prompt, which samples are solved; empty where nobody knows."""
    scores = [{REWARD: t.reward, **t.info}.get(part.solved or REWARD, -inf) for t in done]
    if max(scores) == -inf or (not part.solved and not all(0.0 <= score <= 1.0 for score in scores)):
        return []
    found: dict[int, list[bool]] = {}
    for trajectory, score in zip(done, scores, strict=True):
        found.setdefault(trajectory.index, []).append(score >= part.solved_at)
    return list(found.values())


def pass_at(by_prompt: Sequence[Sequence[bool]]) -> dict[str, float]:
    """Pass@k for k = 1, 2, 4, ... of which samples of each prompt are solved: ``{"1": 0.5}``.

    The mean over prompts of 1 - C(n - c, k) / C(n, k), for c of n samples solved, is unbiased (Chen et al. 2021, arXiv
    2107.03374). A failed sample is none: each k is over the prompts with k samples or more.
    """
    counts = [(len(solved), sum(solved)) for solved in by_prompt]
    found, k = {}, 1
    while own := [1.0 - comb(n - solved, k) / comb(n, k) for n, solved in counts if n >= k]:
        found[str(k)] = sum(own) / len(own)
        k *= 2
    return found
