"""Drift: has the distribution of trajectory lengths changed since the last change?

A two-sample Kolmogorov-Smirnov test of the newest block of finished trajectories against a reference, the first trajectories after the last
change.  The reference is fixed once it is full, so that a slow drift adds up until it is noticed.

Trajectories of one group share a prompt and are alike (on tau-bench the prompt explains 0.59 of the variance), so n of them carry the evidence of fewer.
The test counts a group as one observation, which is safe however alike its members are: block and reference are `BLOCK_GROUPS` = 32 and
`REFERENCE_GROUPS` = 64 groups of trajectories, and the critical distance is that of 32 against 64 values,

    D > sqrt(-ln(alpha / 2) / 2) * sqrt((n + m) / (n * m)),      alpha = `FALSE_ALARM` = 0.001:  D > 0.42.

Every trajectory is in one block only, so without drift at most one block in a thousand raises an alarm (the bound is conservative for small
samples and for ties).  A false alarm costs one round of fresh measurements.  A shift of the median to the old 92nd percentile is noticed within
one to two blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

BLOCK_GROUPS = 32
REFERENCE_GROUPS = 64
FALSE_ALARM = 0.001


class Drift(msgspec.Struct, frozen=True):
    """A detected change: the distance of the two distribution functions, the critical one, and the mean lengths before and after."""

    distance: float
    critical: float
    before: float
    after: float


def ks_distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Largest vertical distance between the empirical distribution functions of two non-empty samples, 0..1."""
    x, y = sorted(a), sorted(b)
    i = j = 0
    worst = 0.0
    while i < len(x) and j < len(y):
        value = min(x[i], y[j])
        while i < len(x) and x[i] == value:
            i += 1
        while j < len(y) and y[j] == value:
            j += 1
        worst = max(worst, abs(i / len(x) - j / len(y)))
    return worst


def critical_distance(n: float, m: float, false_alarm: float = FALSE_ALARM) -> float:
    """Distance that two samples of ``n`` and ``m`` independent values of one distribution exceed with probability at most ``false_alarm``."""
    return math.sqrt(-math.log(false_alarm / 2.0) / 2.0) * math.sqrt((n + m) / (n * m))


class DriftDetector:
    """Fed with every finished trajectory's length once, in order of time; ``group_size`` trajectories count as one observation."""

    def __init__(self, group_size: int) -> None:
        self._block_size = BLOCK_GROUPS * group_size
        self._reference_size = REFERENCE_GROUPS * group_size
        self._critical = critical_distance(BLOCK_GROUPS, REFERENCE_GROUPS)
        self._reference: list[float] = []
        self._block: list[float] = []

    def update(self, lengths: Sequence[float]) -> Drift | None:
        """Take in new lengths; returns the last change found among them.  After a change the block that showed it begins the new reference."""
        found: Drift | None = None
        for value in lengths:
            if len(self._reference) < self._reference_size:
                self._reference.append(value)
                continue
            self._block.append(value)
            if len(self._block) < self._block_size:
                continue
            distance = ks_distance(self._reference, self._block)
            if distance > self._critical:
                found = Drift(distance, self._critical, _mean(self._reference), _mean(self._block))
                self._reference = self._block
            self._block = []
        return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
