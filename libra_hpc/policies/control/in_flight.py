"""Work of the next batches, estimated from admitted groups: their prompts and what they generated so far.

Measured steps are eta + 1 batches late, and short trajectories finish first. Admitted groups are neither late nor
biased. An unfinished trajectory counts as finished ones of a similar prompt (at most an octave of tokens off) did:

- r running trajectories of a group -> r evenly spaced quantiles of the lengths beyond their present mean.
- A prompt like no finished one, running -> twice its present length (the expectation when only the age is known).
- The same, waiting -> as long as such running ones.
- Neither known nor begun for more than `MAX_UNKNOWN` of the trajectories -> no estimate.

A change of prompts is tested group by group at admission (`DriftDetector`), before any of them is finished.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from math import log2, sqrt
from statistics import fmean, pstdev
from typing import NamedTuple

from msgspec.structs import replace

from libra_hpc.protocol.plan import GroupFact, PlanSnapshot, TrajectoryFact

from .change_detection import Drift, DriftDetector

FALSE_POSITIVE_RATE = 1e-4
"""Probability that a block without a change of prompts is reported. A tenth of that of lengths, because the planner
acts on it at once."""
SIMILAR = 64
"""Newest finished trajectories retained per octave of prompt tokens, for the whole run."""
MIN_SIMILAR = 8
"""Fewest finished trajectories of a similar prompt from which a length is estimated."""
MAX_UNKNOWN = 0.25
"""Largest share of trajectories that are neither known nor begun."""


class InFlightWork(NamedTuple):
    """The trajectories of the newest groups, finished or as expected."""

    done: tuple[TrajectoryFact, ...]
    tokens_error: float
    """Relative standard error of the mean context."""
    generated_error: float
    """Relative standard error of the mean length."""


class InFlightEstimator:
    """Estimates the work of the newest groups; `observe` takes every snapshot."""

    def __init__(self, group_size: int, prompts: int) -> None:
        self._group_size, self._prompts = group_size, prompts
        self._prompt_test = DriftDetector(1, prompts, FALSE_POSITIVE_RATE)
        self._last_tested = -1
        self._last_finished = -1
        self._by_octave: dict[int, deque[TrajectoryFact]] = {}
        self._similar_by_octave: dict[int, list[TrajectoryFact]] = {}

    def observe(self, snapshot: PlanSnapshot) -> Drift | None:
        """Take in new trajectories and groups; return a change of the prompts, if any."""
        fresh = [t for t in snapshot.trajectories if t.index > self._last_finished and t.prompt > 0]
        for t in fresh:
            self._by_octave.setdefault(_octave(t.prompt), deque(maxlen=SIMILAR)).append(t)
        if fresh:
            self._last_finished, self._similar_by_octave = fresh[-1].index, {}
        prompts = {t.group: t.prompt for t in fresh if t.group > self._last_tested} | {
            g.index: g.prompt for g in snapshot.groups if g.index > self._last_tested
        }
        if not prompts:
            return None
        self._last_tested = max(prompts)
        return self._prompt_test.update([float(prompts[index]) for index in sorted(prompts)])

    def work(self, snapshot: PlanSnapshot) -> InFlightWork | None:
        """Work of the newest eta + 1 batches of groups; None while too little is known."""
        newest = max(
            [g.index for g in snapshot.groups]
            + [t.group for t in snapshot.trajectories[-self._group_size * self._prompts :]],
            default=-1,
        )
        if newest < 0:
            return None
        oldest = newest - (snapshot.eta + 1) * self._prompts
        done = [t for t in snapshot.trajectories if t.group > oldest]
        groups = [g for g in snapshot.groups if g.index > oldest]
        ages = [_doubled(g) for g in groups if g.running and g.generated and len(self._similar(g.prompt)) < MIN_SIMILAR]
        expected: list[TrajectoryFact] = []
        missing, clusters = 0, 0
        for g in groups:
            found = list(self._expected(g, ages))
            missing += g.waiting + g.running - len(found)
            clusters += bool(found)
            expected += found
        everything = (*done, *expected)
        if not everything or missing > MAX_UNKNOWN * (missing + len(everything)):
            return None
        return InFlightWork(
            everything,
            _error(everything, expected, clusters, "context"),
            _error(everything, expected, clusters, "generated"),
        )

    def _expected(self, group: GroupFact, ages: Sequence[TrajectoryFact]) -> Iterator[TrajectoryFact]:
        like = self._similar(group.prompt)
        if len(like) >= MIN_SIMILAR:
            far = group.generated / max(1, group.running)
            yield from _quantiles([t for t in like if t.generated > far] or like[-1:], group.running, group.prompt)
            yield from _quantiles(like, group.waiting, group.prompt)
            return
        if group.running and group.generated:
            yield from [_doubled(group)] * group.running
        begun = [t for t in ages if abs(_octave(t.prompt) - _octave(group.prompt)) <= 1] + like
        if begun:
            yield from _quantiles(sorted(begun, key=lambda t: t.generated), group.waiting, group.prompt)

    def _similar(self, prompt: int) -> list[TrajectoryFact]:
        """Finished trajectories of similar prompts, by length."""
        octave = _octave(prompt)
        if octave not in self._similar_by_octave:
            near = (t for o in (octave - 1, octave, octave + 1) for t in self._by_octave.get(o, ()))
            self._similar_by_octave[octave] = sorted(near, key=lambda t: t.generated)
        return self._similar_by_octave[octave]


def _octave(prompt: int) -> int:
    return int(log2(max(1, prompt)))


def _doubled(group: GroupFact) -> TrajectoryFact:
    """A trajectory of a group without similar ones: twice its present length."""
    generated = 2 * group.generated // max(1, group.running)
    return TrajectoryFact(
        index=-1,
        at=0.0,
        generated=max(1, generated),
        context=group.prompt + max(1, generated),
        turns=1,
        tool_s=0.0,
        group=group.index,
        prompt=group.prompt,
    )


def _quantiles(ordered: Sequence[TrajectoryFact], count: int, prompt: int) -> Iterator[TrajectoryFact]:
    for k in range(count):
        like = ordered[int((k + 0.5) * len(ordered) / count)]
        yield replace(like, context=like.context - like.prompt + prompt, prompt=prompt)


def _error(everything: Sequence[TrajectoryFact], expected: Sequence[TrajectoryFact], clusters: int, name: str) -> float:
    """Relative standard error; the members of a group count as one."""
    if len(expected) < 2:
        return 0.0
    values = [float(getattr(t, name)) for t in expected]
    mean = fmean(float(getattr(t, name)) for t in everything)
    return pstdev(values) * len(expected) / len(everything) / mean / sqrt(clusters)
