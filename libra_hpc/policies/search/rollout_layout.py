"""The best division of trajectories between engines of several TP degrees, when the scheduler sorts them by length.

Classes are ordered by the speed of a single trajectory, trajectories by length. A layout cuts the lengths into
consecutive segments, the longest for the fastest class. Its time is that of its slowest class.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from libra_hpc.policies.costs.rollout_time import ReplicaCost


class ReplicaClass(msgspec.Struct, frozen=True):
    """Replicas of one TP degree."""

    pool: int
    replica: ReplicaCost

    @property
    def tp(self) -> int:
        return self.replica.tp

    def segment(self, replicas: int, first: int, last: int) -> Segment:
        """Bins ``first..last`` on so many replicas."""
        seconds = self.replica.time(first, last, replicas)
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


class RolloutLayout(msgspec.Struct, frozen=True):
    """Segments from the longest trajectories to the shortest."""

    segments: tuple[Segment, ...]

    @property
    def seconds(self) -> float:
        """Seconds of the slowest class."""
        return max(s.seconds for s in self.segments)


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
