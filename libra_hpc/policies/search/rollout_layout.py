"""The best rollout layout: which TP classes, how many replicas, and which trajectories each serves; exact.

Classes are ordered by the speed of a single trajectory, trajectories by length. A layout cuts the lengths into
consecutive segments, the longest for the fastest class. Its time is that of its slowest class.

- Is a layout within T possible? For each class and segment, bisection gives the fewest replicas. The fewest devices are
  a shortest path over (class, cut). With several pools, non-dominated device vectors are retained.
- The least T: ask for a layout just below the best one's time. None -> the best one is optimal. Else take it, and also
  try the middle between it and a T that is impossible.
- Remaining devices join the slowest classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from operator import le
from typing import NamedTuple

import msgspec

from libra_hpc.policies.costs.rollout_time import ReplicaCost

EXACT = 1e-9
"""Relative step below the best time at which a better layout is searched."""


class ReplicaClass(msgspec.Struct, frozen=True):
    """A class of replicas: devices of one pool, in groups of ``tp``."""

    pool: int
    replica: ReplicaCost
    together: int = 1
    """Replicas that exist only together: those of a node that is not divided between classes."""

    @property
    def tp(self) -> int:
        return self.replica.tp

    def most(self, devices: int) -> int:
        """Replicas that so many devices hold."""
        return devices // (self.tp * self.together) * self.together

    def segment(self, replicas: int, first: int, last: int, lag: float = 0.0) -> Segment:
        """Bins ``first..last`` on so many replicas; ``lag``: see `ReplicaCost.time`."""
        seconds = self.replica.time(first, last, replicas, lag)
        return Segment(pool=self.pool, tp=self.tp, replicas=replicas, first=first, last=last, seconds=seconds)


class Segment(msgspec.Struct, frozen=True):
    """Share of one class."""

    pool: int
    tp: int
    replicas: int
    first: int
    """First and last bin that it serves."""
    last: int
    seconds: float

    @property
    def devices(self) -> int:
        return self.tp * self.replicas


class RolloutLayout(msgspec.Struct, frozen=True):
    """Segments from the longest trajectories to the shortest."""

    segments: tuple[Segment, ...]

    @property
    def seconds(self) -> float:
        """Seconds of the slowest class."""
        return max(s.seconds for s in self.segments)

    @property
    def least_tp(self) -> int:
        """The degree of the engines that have new weights last."""
        return min(s.tp for s in self.segments)

    def devices(self, pool: int) -> int:
        """Devices of a pool in use."""
        return sum(s.devices for s in self.segments if s.pool == pool)


class RolloutSearch:
    """Searches one set of classes; ``bins`` is the number of bins of the sketch."""

    def __init__(self, costs: Sequence[ReplicaClass], bins: int) -> None:
        able = [c for c in costs if c.replica.limit() is None]
        self.costs = sorted(able, key=lambda c: (c.replica.latency, c.tp, c.pool))
        self._bins = bins
        self._straggler: float | None = None

    def within(self, seconds: float, devices: Sequence[int], lag: float = 0.0) -> RolloutLayout | None:
        """A layout on at most ``devices[pool]`` devices of each pool that takes at most ``seconds``, or None."""
        paths: dict[int, list[_Path]] = {self._bins: [_Path((0,) * len(devices), ())]}
        for index, cost in enumerate(self.costs):
            # The last class must serve everything that is left.
            cuts = range(1) if index == len(self.costs) - 1 else range(self._bins)
            grown = {cut: list(found) for cut, found in paths.items()}
            for cut, found in paths.items():
                most = cost.most(devices[cost.pool] - min(path.used[cost.pool] for path in found))
                for first in cuts[:cut]:
                    need = cost.replica.fewest(first, cut - 1, seconds, most, lag)
                    if need is None:
                        continue
                    step = _Step(cost, -(-need // cost.together) * cost.together, first, cut - 1)
                    segment_paths = grown.setdefault(first, [])
                    for path in found:
                        _add(segment_paths, path, step, devices)
            paths = grown
        done = paths.get(0)
        if not done:
            return None
        return self._fill(RolloutLayout(tuple(step.segment(lag) for step in done[0].steps)), devices, lag)

    def best(self, devices: Sequence[int], lag: float = 0.0) -> RolloutLayout | None:
        """The layout of least time; None when no class holds the longest trajectories."""
        start = min(self._single(devices, lag), key=lambda layout: layout.seconds, default=None)
        if start is None:
            start = self.within(math.inf, devices, lag)
            if start is None:
                return None
        best, low = start, self.straggler()
        while True:
            better = self.within(best.seconds * (1.0 - EXACT), devices, lag)
            if better is None:
                return best
            best = better
            middle = (low + best.seconds) / 2
            better = self.within(middle, devices, lag) if low < middle else None
            if better is None:
                low = max(low, middle)
            else:
                best = better

    def straggler(self) -> float:
        """Seconds of the longest trajectories with unlimited replicas: no layout is faster."""
        if self._straggler is None:
            last = self._bins - 1
            # Shorter trajectories in the same segment lower the mean context, hence the time.
            self._straggler = min(
                c.replica.time(first, last, math.inf) for c in self.costs for first in range(last + 1)
            )
        return self._straggler

    def _single(self, devices: Sequence[int], lag: float) -> Iterator[RolloutLayout]:
        for cost in self.costs:
            count = cost.most(devices[cost.pool])
            if count and cost.replica.fits(self._bins - 1):
                yield self.only(cost, count, lag)

    def only(self, cost: ReplicaClass, replicas: int, lag: float = 0.0) -> RolloutLayout:
        """All trajectories on one class."""
        return RolloutLayout((cost.segment(replicas, 0, self._bins - 1, lag),))

    def _fill(self, layout: RolloutLayout, devices: Sequence[int], lag: float) -> RolloutLayout:
        """Give remaining devices to the slowest class that can take another replica, as long as there is one."""
        segments = list(layout.segments)
        left = [have - layout.devices(pool) for pool, have in enumerate(devices)]
        costs = {(c.pool, c.tp): c for c in self.costs}
        while True:
            able = [i for i, s in enumerate(segments) if costs[s.pool, s.tp].most(left[s.pool])]
            if not able:
                return RolloutLayout(tuple(segments))
            i = max(able, key=lambda i: segments[i].seconds)
            s = segments[i]
            # Half of the remaining devices at a time: thousands take a dozen rounds.
            cost = costs[s.pool, s.tp]
            more = max(cost.together, cost.most(left[s.pool] // 2))
            left[s.pool] -= more * s.tp
            replicas = s.replicas + more
            segments[i] = cost.segment(replicas, s.first, s.last, lag)


def assign(costs: Sequence[ReplicaClass], counts: Sequence[int], bins: int) -> RolloutLayout | None:
    """The best segments for given numbers of replicas per class; None when they cannot serve every length."""
    able = sorted(
        (i for i, c in enumerate(costs) if counts[i] and c.replica.limit() is None),
        key=lambda i: (costs[i].replica.latency, costs[i].tp),
    )
    paths: dict[int, tuple[float, tuple[Segment, ...]]] = {bins: (0.0, ())}
    for i in able:
        grown = dict(paths)
        for cut, (seconds, segments) in paths.items():
            # The last class must serve everything that is left.
            for first in range(min(cut, 1) if i == able[-1] else cut):
                segment = costs[i].segment(counts[i], first, cut - 1)
                slowest = max(seconds, segment.seconds)
                if slowest < grown.get(first, (math.inf, ()))[0]:
                    grown[first] = (slowest, (*segments, segment))
        paths = grown
    return RolloutLayout(paths[0][1]) if 0 in paths else None


class _Step(NamedTuple):
    cost: ReplicaClass
    replicas: int
    first: int
    last: int

    def segment(self, lag: float) -> Segment:
        return self.cost.segment(self.replicas, self.first, self.last, lag)


class _Path(NamedTuple):
    used: tuple[int, ...]
    steps: tuple[_Step, ...]


def _add(found: list[_Path], path: _Path, step: _Step, devices: Sequence[int]) -> None:
    """Add ``path`` with one more ``step`` unless it does not fit or is dominated; drop the paths that it dominates."""
    used = list(path.used)
    used[step.cost.pool] += step.replicas * step.cost.tp
    if used[step.cost.pool] > devices[step.cost.pool] or any(all(map(le, other.used, used)) for other in found):
        return
    found[:] = [other for other in found if not all(map(le, used, other.used))]
    found.append(_Path(tuple(used), (*path.steps, step)))
