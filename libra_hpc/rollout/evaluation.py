"""Evaluations inside a run: prompts of their own, on engines that have room, while training goes on.

- The weights on all engines are of a step that is due -> its evaluation begins; one of a task at a time.
- Its trajectories begin only where engines have room and no turn of training waits. They are in no batch.
- A trajectory fails -> counted, never tried again. Its host is lost -> sampled again from its prompt.
- All have ended -> one line of ``evaluations.jsonl``. A start that finds no line for a due step evaluates what it has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

from libra_hpc.config.learn import EvalPart
from libra_hpc.policies.learning.advantages import mean_and_std
from libra_hpc.protocol.env import evaluation_index

from .trajectory import Trajectory

ROOM = 0.75
"""Share of all engines' turns up to which trajectories of evaluations begin. Half: they take longer than they need to;
all of it: training's next turn would wait for one of theirs."""


@dataclass
class Exam:
    """One evaluation in progress."""

    place: int
    part: EvalPart
    step: int
    """Of the weights that it began with."""
    began: float
    to_begin: list[tuple[int, int]]
    """(prompt, sample), the next one last."""
    open: int = 0
    failed: int = 0
    done: list[Trajectory] = field(default_factory=list)


class Evaluations:
    """``last``: by task, the step of its newest line; ``write`` gets a line."""

    def __init__(self, parts: Sequence[EvalPart], write: Callable[[dict[str, Any]], None]) -> None:
        self._parts, self._write = parts, write
        self._last: dict[str, int] = {}
        self._exams: dict[int, Exam] = {}

    def restore(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Take what earlier starts have evaluated."""
        for line in lines:
            self._last[line["task"]] = max(int(line["step"]), self._last.get(line["task"], -1))

    def on_version(self, step: int, now: float) -> None:
        """All engines have the weights of ``step``, or newer ones."""
        for place, part in enumerate(self._parts):
            due = step // part.every * part.every
            if place not in self._exams and self._last.get(part.name, -1) < due:
                wanted = [(prompt, sample) for prompt in range(part.prompts) for sample in range(part.samples)]
                self._exams[place] = Exam(place, part, step, now, wanted[::-1])
                self._last[part.name] = step

    def begin(self, inflight: int, capacity: int) -> list[Trajectory]:
        """Trajectories that begin now, with ``inflight`` of ``capacity`` turns at engines."""
        begun: list[Trajectory] = []
        busy = max(inflight, sum(exam.open for exam in self._exams.values()))
        for exam in self._exams.values():
            while exam.to_begin and busy + len(begun) < ROOM * capacity:
                prompt, sample = exam.to_begin.pop()
                exam.open += 1
                begun.append(Trajectory(evaluation_index(exam.place, prompt), sample, 0))
                begun[-1].evaluation = exam.part.name
        return begun

    def finished(self, trajectory: Trajectory, now: float) -> None:
        exam = self._of(trajectory)
        exam.done.append(trajectory)
        self._ended(exam, now)

    def failed(self, trajectory: Trajectory, now: float) -> None:
        exam = self._of(trajectory)
        exam.failed += 1
        self._ended(exam, now)

    def _of(self, trajectory: Trajectory) -> Exam:
        return next(exam for exam in self._exams.values() if exam.part.name == trajectory.evaluation)

    def _ended(self, exam: Exam, now: float) -> None:
        exam.open -= 1
        if not exam.open and not exam.to_begin:
            del self._exams[exam.place]
            self._write(result_line(exam, now - exam.began))


def result_line(exam: Exam, seconds: float) -> dict[str, Any]:
    """The result of an evaluation; numbers of rewards are absent where every trajectory failed.

    ``stderr`` is that of the mean over prompts, whose samples are not independent. ``best_of``: the mean of each
    prompt's best sample, which for rewards of 0 and 1 is pass@k.
    """
    by_prompt: dict[int, list[float]] = {}
    for trajectory in exam.done:
        by_prompt.setdefault(trajectory.index, []).append(trajectory.reward)
    means = [sum(rewards) / len(rewards) for rewards in by_prompt.values()]
    found: dict[str, Any] = {}
    if means:
        mean, std = mean_and_std(means)
        names = sorted({name for t in exam.done for name in t.info})
        found = {
            "mean": mean,
            "stderr": std / sqrt(max(1, len(means) - 1)),
            "best_of": sum(map(max, by_prompt.values())) / len(by_prompt),
            "turns": sum(len(t.turns) for t in exam.done) / len(exam.done),
            "gen_tokens": sum(t.attained for t in exam.done),
            "versions": [
                min(version for t in exam.done for version, _ in t.versions),
                max(version for t in exam.done for version, _ in t.versions),
            ],
            "info": {name: _mean([t.info[name] for t in exam.done if name in t.info]) for name in names},
        }
    return {
        "t": time.time(),
        "task": exam.part.name,
        "step": exam.step,
        "prompts": exam.part.prompts,
        "samples": exam.part.samples,
        "failed": exam.failed,
        "seconds": seconds,
        **found,
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
