"""Which TP classes, how many replicas of each, and which trajectories each serves: the least time of a rollout,
exactly.

Classes are ordered by the speed of a single trajectory; trajectories are ordered by length.  A layout cuts the lengths
into consecutive segments, the longest for the fastest class, and a class may be left out.  Its time is that of the
slowest class.

*Is there a layout within T?*  For a class and a segment the fewest replicas that keep T follow by bisection, since more
replicas are never slower. Going through the classes from fast to slow, the fewest devices that serve everything above a
cut are a shortest path over (class, cut): every layout within T is one of its paths, and its devices are at least the
path's, so a T is possible if and only if the shortest path fits.  With several pools of devices the path's length is a
vector and its non-dominated values are kept.

Devices that are left over then join the slowest classes, which are never slower for it.

*The least T.*  T just below the time of the layout in hand is tried: if that is impossible, the layout is proved
optimal.  Else it gives a better one, and the middle between its time and a T that is impossible is tried too, so that
many small steps are never taken.  A cluster has few layouts that differ: proofs take fewer questions than a bisection
to the same precision.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from operator import le
from typing import NamedTuple

import msgspec

from libra_hpc.cost_models.rollout_time import ReplicaCost

EXACT = 1e-9
"""Relative step below a layout's time at which a better one is looked for."""


class ReplicaClass(msgspec.Struct, frozen=True):
    """A class of replicas: devices of one pool, in groups of ``tp``."""

    pool: int
    replica: ReplicaCost
    together: int = 1
    """Replicas that come together only: all those of a node where nodes are not divided between classes."""

    @property
    def tp(self) -> int:
        """Devices of one replica."""
        return self.replica.tp

    def most(self, devices: int) -> int:
        """Replicas on so many devices."""
        return devices // (self.tp * self.together) * self.together


class Segment(msgspec.Struct, frozen=True):
    """What one class does."""

    pool: int
    tp: int
    replicas: int
    first: int
    """Bins it serves, both ends included."""
    last: int
    seconds: float

    @property
    def devices(self) -> int:
        """Devices of all its replicas."""
        return self.tp * self.replicas


class RolloutLayout(msgspec.Struct, frozen=True):
    """Segments from the longest trajectories to the shortest."""

    segments: tuple[Segment, ...]

    @property
    def seconds(self) -> float:
        """Of the slowest class."""
        return max(s.seconds for s in self.segments)

    def devices(self, pool: int) -> int:
        """Devices of a pool in use."""
        return sum(s.devices for s in self.segments if s.pool == pool)


class RolloutSearch:
    """The search over one set of classes; ``bins`` is the number of bins of the sketch."""

    def __init__(self, costs: Sequence[ReplicaClass], bins: int) -> None:
        able = [c for c in costs if c.replica.limit() is None]
        self.costs = sorted(able, key=lambda c: (c.replica.latency, c.tp, c.pool))
        self._bins = bins
        self._straggler: float | None = None

    def within(self, seconds: float, devices: Sequence[int]) -> RolloutLayout | None:
        """A layout of at most ``devices[pool]`` devices of each pool that takes at most ``seconds``, or None when
        there is none."""
        paths: dict[int, list[_Path]] = {self._bins: [_Path((0,) * len(devices), ())]}
        for index, cost in enumerate(self.costs):
            # Whatever the last class does not serve, nobody does.
            cuts = range(1) if index == len(self.costs) - 1 else range(self._bins)
            grown = {cut: list(found) for cut, found in paths.items()}
            for cut, found in paths.items():
                most = cost.most(devices[cost.pool] - min(path.used[cost.pool] for path in found))
                for first, need in cost.replica.fewest(cuts[:cut], cut - 1, seconds, most):
                    step = _Step(cost, -(-need // cost.together) * cost.together, first, cut - 1)
                    kept = grown.setdefault(first, [])
                    for path in found:
                        _add(kept, path, step, devices)
            paths = grown
        done = paths.get(0)
        return self._fill(RolloutLayout(tuple(step.segment() for step in done[0].steps)), devices) if done else None

    def best(self, devices: Sequence[int], low: float = 0.0) -> RolloutLayout | None:
        """The layout of least time, known to be ``low`` at least; None when no class can serve the longest
        trajectories."""
        start = min(self._single(devices), key=lambda layout: layout.seconds, default=None)
        if start is None:
            start = self.within(math.inf, devices)
            if start is None:
                return None
        best, low = start, max(low, self.straggler())
        while True:
            better = self.within(best.seconds * (1.0 - EXACT), devices)
            if better is None:
                return best
            best = better
            middle = (low + best.seconds) / 2
            better = self.within(middle, devices) if low < middle else None
            if better is None:
                low = max(low, middle)
            else:
                best = better

    def straggler(self) -> float:
        """Seconds of the longest trajectories on as many replicas as one likes, beside as many others as one likes:
        no layout is faster."""
        if self._straggler is None:
            last = self._bins - 1
            # Others beside them make the mean context of their steps shorter.
            self._straggler = min(
                c.replica.time(first, last, math.inf) for c in self.costs for first in range(last + 1)
            )
        return self._straggler

    def _single(self, devices: Sequence[int]) -> Iterator[RolloutLayout]:
        """Layouts of one class of replicas."""
        for cost in self.costs:
            count = cost.most(devices[cost.pool])
            if count and cost.replica.fits(self._bins - 1):
                yield self.only(cost, count)

    def only(self, cost: ReplicaClass, replicas: int) -> RolloutLayout:
        """All trajectories on one class."""
        last = self._bins - 1
        return RolloutLayout((Segment(cost.pool, cost.tp, replicas, 0, last, cost.replica.time(0, last, replicas)),))

    def _fill(self, layout: RolloutLayout, devices: Sequence[int]) -> RolloutLayout:
        """Give devices that are left over to the slowest class that can take one more replica, as long as there is
        one."""
        segments = list(layout.segments)
        left = [have - layout.devices(pool) for pool, have in enumerate(devices)]
        costs = {(c.pool, c.tp): c for c in self.costs}
        while True:
            able = [i for i, s in enumerate(segments) if costs[s.pool, s.tp].most(left[s.pool])]
            if not able:
                return RolloutLayout(tuple(segments))
            i = max(able, key=lambda i: segments[i].seconds)
            s = segments[i]
            # Half of what is left at a time: thousands of devices take a dozen rounds.
            cost = costs[s.pool, s.tp]
            more = max(cost.together, cost.most(left[s.pool] // 2))
            left[s.pool] -= more * s.tp
            replicas = s.replicas + more
            segments[i] = Segment(s.pool, s.tp, replicas, s.first, s.last, cost.replica.time(s.first, s.last, replicas))


def assign(costs: Sequence[ReplicaClass], counts: Sequence[int], bins: int) -> RolloutLayout | None:
    """The best segments for given numbers of replicas per class (in the order of ``costs``); None when they cannot
    serve every length."""
    able = sorted(
        (i for i, c in enumerate(costs) if counts[i] and c.replica.limit() is None),
        key=lambda i: (costs[i].replica.latency, costs[i].tp),
    )
    paths: dict[int, tuple[float, tuple[Segment, ...]]] = {bins: (0.0, ())}
    for i in able:
        grown = dict(paths)
        for cut, (seconds, segments) in paths.items():
            for first in range(cut):
                own = costs[i].replica.time(first, cut - 1, counts[i])
                slowest = max(seconds, own)
                if slowest < grown.get(first, (math.inf, ()))[0]:
                    grown[first] = (
                        slowest,
                        (*segments, Segment(costs[i].pool, costs[i].tp, counts[i], first, cut - 1, own)),
                    )
        paths = grown
    return RolloutLayout(paths[0][1]) if 0 in paths else None


class _Step(NamedTuple):
    cost: ReplicaClass
    replicas: int
    first: int
    last: int

    def segment(self) -> Segment:
        seconds = self.cost.replica.time(self.first, self.last, self.replicas)
        return Segment(self.cost.pool, self.cost.tp, self.replicas, self.first, self.last, seconds)


class _Path(NamedTuple):
    used: tuple[int, ...]
    """Devices per pool."""
    steps: tuple[_Step, ...]


def _add(found: list[_Path], path: _Path, step: _Step, devices: Sequence[int]) -> None:
    """Keep ``path`` with one more ``step`` if it fits and no kept one uses at most as much of every pool; drop those
    it makes useless."""
    used = list(path.used)
    used[step.cost.pool] += step.replicas * step.cost.tp
    if used[step.cost.pool] > devices[step.cost.pool] or any(all(map(le, other.used, used)) for other in found):
        return
    found[:] = [other for other in found if not all(map(le, used, other.used))]
    found.append(_Path(tuple(used), (*path.steps, step)))
