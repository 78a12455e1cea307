"""The work that is under way: what the groups admitted last will have been when they are finished, told from their
prompts and from what they generated so far.

Measured steps are of batches admitted eta + 1 batches ago, and the trajectories that finish first after a change are
its short ones.  The groups that are admitted are those that will be trained on next, all of them, so an estimate over
them is neither late nor biased.  Of a trajectory that is not finished the prompt is known, and how far it is.  It
counts as the finished ones of a like prompt do that became longer than it is now:

* The newest `LIKE` = 64 finished trajectories of every octave of prompt tokens are kept for as long as the run lasts;
  like prompts are at most an octave off.
* r trajectories of a group stand for r evenly spaced quantiles of the lengths beyond what they have on average: of
  censored observations nothing is left out.
* Prompts unlike any finished one stand for themselves: what runs will at least double (the expectation for what is
  known by its age alone), and what waits is like that.  While most of the newest work is neither known nor begun,
  nothing is said.

That prompts changed is tested group by group as they are admitted (`drift`): long before anything of theirs is
finished.  What is foreseen is acted on at once, so the test is stricter than that of lengths: at most one block in ten
thousand raises a false alarm (`FALSE_ALARM`).
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

FALSE_ALARM = 1e-4
LIKE = 64
FEWEST = 8
"""Finished trajectories of a like prompt that say how long such ones become."""
UNKNOWN = 0.25
"""Most of the trajectories may be neither known nor begun."""


class InFlightWork(NamedTuple):
    """What the newest groups stand for."""

    done: tuple[TrajectoryFact, ...]
    """Finished, or as expected."""
    tokens_error: float
    """Relative standard error of their mean context."""
    generated_error: float


class InFlightEstimator:
    """Call `observe` with every snapshot, then ask for `work`."""

    def __init__(self, group_size: int, prompts: int) -> None:
        self._group_size, self._prompts = group_size, prompts
        self._prompt_test = DriftDetector(1, prompts, FALSE_ALARM)
        self._tested = -1
        self._finished = -1
        self._like: dict[int, deque[TrajectoryFact]] = {}
        self._sorted: dict[int, list[TrajectoryFact]] = {}

    def observe(self, snapshot: PlanSnapshot) -> Drift | None:
        """Take in what is new; returns a change of the prompts when there is one."""
        fresh = [t for t in snapshot.trajectories if t.index > self._finished and t.prompt > 0]
        for t in fresh:
            self._like.setdefault(_octave(t.prompt), deque(maxlen=LIKE)).append(t)
        if fresh:
            self._finished, self._sorted = fresh[-1].index, {}
        prompts = {t.group: t.prompt for t in fresh if t.group > self._tested} | {
            g.index: g.prompt for g in snapshot.groups if g.index > self._tested
        }
        if not prompts:
            return None
        self._tested = max(prompts)
        return self._prompt_test.update([float(prompts[index]) for index in sorted(prompts)])

    def work(self, snapshot: PlanSnapshot) -> InFlightWork | None:
        """The newest (eta + 1) batches of groups; None while too little is known of them."""
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
        ages = [_aged(g) for g in groups if g.running and g.generated and len(self._near(g.prompt)) < FEWEST]
        expected: list[TrajectoryFact] = []
        missing, clusters = 0, 0
        for g in groups:
            found = list(self._expected(g, ages))
            missing += g.waiting + g.running - len(found)
            clusters += bool(found)
            expected += found
        everything = (*done, *expected)
        if not everything or missing > UNKNOWN * (missing + len(everything)):
            return None
        return InFlightWork(
            everything,
            _error(everything, expected, clusters, "context"),
            _error(everything, expected, clusters, "generated"),
        )

    def _expected(self, group: GroupFact, ages: Sequence[TrajectoryFact]) -> Iterator[TrajectoryFact]:
        like = self._near(group.prompt)
        if len(like) >= FEWEST:
            far = group.generated / max(1, group.running)
            yield from _quantiles([t for t in like if t.generated > far] or like[-1:], group.running, group.prompt)
            yield from _quantiles(like, group.waiting, group.prompt)
            return
        if group.running and group.generated:
            yield from [_aged(group)] * group.running
        begun = [t for t in ages if abs(_octave(t.prompt) - _octave(group.prompt)) <= 1] + like
        if begun:
            yield from _quantiles(sorted(begun, key=lambda t: t.generated), group.waiting, group.prompt)

    def _near(self, prompt: int) -> list[TrajectoryFact]:
        """Finished trajectories of like prompts, by length."""
        octave = _octave(prompt)
        if octave not in self._sorted:
            near = (t for o in (octave - 1, octave, octave + 1) for t in self._like.get(o, ()))
            self._sorted[octave] = sorted(near, key=lambda t: t.generated)
        return self._sorted[octave]


def _octave(prompt: int) -> int:
    return int(log2(max(1, prompt)))


def _aged(group: GroupFact) -> TrajectoryFact:
    """One of a group whose like was never seen: twice what it is now."""
    generated = 2 * group.generated // max(1, group.running)
    return TrajectoryFact(
        -1, 0.0, max(1, generated), group.prompt + max(1, generated), 1, 0.0, group.index, group.prompt
    )


def _quantiles(ordered: Sequence[TrajectoryFact], count: int, prompt: int) -> Iterator[TrajectoryFact]:
    for k in range(count):
        like = ordered[int((k + 0.5) * len(ordered) / count)]
        yield replace(like, context=like.context - like.prompt + prompt, prompt=prompt)


def _error(everything: Sequence[TrajectoryFact], expected: Sequence[TrajectoryFact], clusters: int, name: str) -> float:
    """Members of a group are alike and count as one."""
    if len(expected) < 2:
        return 0.0
    values = [float(getattr(t, name)) for t in expected]
    mean = fmean(float(getattr(t, name)) for t in everything)
    return pstdev(values) * len(expected) / len(everything) / mean / sqrt(clusters)
