"""Drift: has the workload changed since the last change?  Two-sample tests of the newest finished trajectories against
a reference.

Four quantities of a trajectory are watched: generated tokens, context tokens, turns and seconds in tools.  The
statistic is Kolmogorov and Smirnov's largest vertical distance D between two empirical distribution functions.  The
reference is the first trajectories after the last change; it is fixed once it is full, so that a slow drift adds up
until it is noticed.

Trajectories of one group share a prompt and are alike (on tau-bench the prompt explains 0.59 of the variance), so n of
them carry the evidence of fewer. The test counts a group as one observation, which is safe however alike its members
are.  Short trajectories of a batch finish first, so a block is whole batches: `BLOCK_GROUPS` = 16 groups or more,
whatever whole number of batches that is.  The reference is `REFERENCE_GROUPS` = 64 groups, and two blocks at least.
The last two blocks are tested together as well, and every `LONG` = 8 blocks all eight, which finds changes too small
for one.  With n and m groups an alarm needs

    D > sqrt(-ln(alpha / 2) / 2) * sqrt((n + m) / (n * m)),      alpha = `FALSE_ALARM` / (tests at that moment),
    `FALSE_ALARM` = 0.001.

Tests at that moment are the measured quantities times one to three lengths of block; dividing by their number
(Bonferroni) keeps the rate whatever their dependence.  Without drift at most one block in a thousand therefore raises
an alarm (the bound is conservative for small samples and ties).  With one quantity and 16 against 64 groups D > 0.54 is
needed, with four quantities and two lengths D > 0.61.  A false alarm costs one round of fresh measurements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

BLOCK_GROUPS = 16
REFERENCE_GROUPS = 64
LONG = 8
FALSE_ALARM = 0.001
UNKNOWN = -1.0
"""Value of a quantity that was not measured; it is left out of the test."""


class Drift(msgspec.Struct, frozen=True):
    """A detected change: the distance of the two distribution functions, the critical one, the mean values before
    and after, and of what."""

    distance: float
    critical: float
    before: float
    after: float
    quantity: int = 0
    """Index of the quantity whose test was clearest."""
    count: int = 0
    """Trajectories, counted from the newest, that show the new state."""


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
    """Distance that two samples of ``n`` and ``m`` independent values of one distribution exceed with probability at
    most ``false_alarm``."""
    return math.sqrt(-math.log(false_alarm / 2.0) / 2.0) * math.sqrt((n + m) / (n * m))


class DriftDetector:
    """Fed with every finished trajectory once, in order of finishing; ``group_size`` trajectories count as one
    observation, ``prompts`` groups are a batch."""

    def __init__(self, group_size: int, prompts: int = 1, false_alarm: float = FALSE_ALARM) -> None:
        groups = -(-BLOCK_GROUPS // prompts) * prompts
        self._group, self._false_alarm = group_size, false_alarm
        self._block_size = groups * group_size
        self._reference_size = max(2 * groups, -(-REFERENCE_GROUPS // groups) * groups) * group_size
        self._reference: list[Sequence[float]] = []
        self._fresh: list[Sequence[float]] = []
        """Up to `LONG` blocks, the last one still growing."""

    def update(self, values: Sequence[float] | Sequence[Sequence[float]]) -> Drift | None:
        """Take in trajectories, each a value or one value per quantity; returns the last change found.  The block
        that showed it begins the new reference."""
        found: Drift | None = None
        for value in values:
            one = value if isinstance(value, Sequence) else (value,)
            if len(self._reference) < self._reference_size:
                self._reference.append(one)
                continue
            self._fresh.append(one)
            if len(self._fresh) % self._block_size:
                continue
            long = len(self._fresh) == LONG * self._block_size
            drift = self._test(long)
            if drift is not None:
                found = drift
                self._reference = self._fresh[-drift.count :][: self._reference_size]
            if drift is not None or long:
                self._fresh = []
        return found

    def _test(self, long: bool) -> Drift | None:
        blocks = len(self._fresh) // self._block_size
        sizes = [count * self._block_size for count in (1, 2, LONG) if count <= blocks and (count < LONG or long)]
        quantities = [q for q in range(len(self._fresh[0])) if any(row[q] != UNKNOWN for row in self._fresh)]
        alarm = self._false_alarm / (len(sizes) * len(quantities))
        clearest: Drift | None = None
        for size in sizes:
            critical = critical_distance(size / self._group, len(self._reference) / self._group, alarm)
            for q in quantities:
                old, new = [row[q] for row in self._reference], [row[q] for row in self._fresh[-size:]]
                distance = ks_distance(old, new)
                if distance > critical and (
                    clearest is None or distance / critical > clearest.distance / clearest.critical
                ):
                    clearest = Drift(distance, critical, sum(old) / len(old), sum(new) / len(new), q, size)
        return clearest
