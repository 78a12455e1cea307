"""Change detection: two-sample Kolmogorov-Smirnov tests of the newest trajectories (or prompts) against a reference.

- The reference is the first observations after the last change. It is then fixed, so that a slow drift adds up.
- A block of at least `BLOCK_GROUPS` groups, in whole batches -> tested alone and with the block before it.
- Every `LONG_BLOCKS` blocks -> all of them are tested together, which detects smaller changes.
- Largest distance of the distribution functions above `critical_distance` -> a `Drift`; its block begins the reference.

A group counts as one observation, because its trajectories share a prompt. The false-positive rate is divided by the
number of tests at that moment (Bonferroni). Other checks answer other questions:

- `StageEstimator`: do the first steps at a new split agree with the carried-over estimate (a ratio, no test)?
- `RolloutByNodes.observe_trajectories`: do mean lengths differ enough to rebuild the model (a ratio, no test)?
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

BLOCK_GROUPS = 16
"""Groups of a block, at least. 16 against 64 groups detect D > 0.54; 8 would need D > 0.73, 32 D > 0.42 but twice the
time."""
REFERENCE_GROUPS = 64
"""Groups of the reference, at least, and two blocks at least. With 32, a block needs D > 0.60; with 128, D > 0.52."""
LONG_BLOCKS = 8
"""Blocks of the longest test: 128 against 64 groups detect D > 0.30 in a single test."""
FALSE_POSITIVE_RATE = 0.001
"""Probability that a block without a change is reported. A false positive costs one round of fresh measurements."""
NOT_MEASURED = -1.0
"""Value of a quantity that was not measured; the tests leave it out."""


class Drift(msgspec.Struct, frozen=True):
    """A detected change: distance of the distribution functions, critical distance, means before and after."""

    distance: float
    critical: float
    before: float
    after: float
    quantity: int = 0
    """Index of the quantity with the largest ratio of distance to critical distance."""
    count: int = 0
    """Newest trajectories that belong to the new state."""


def ks_distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Largest vertical distance of the empirical distribution functions of two non-empty samples, 0..1."""
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


def critical_distance(n: float, m: float, false_positive_rate: float = FALSE_POSITIVE_RATE) -> float:
    """Distance that samples of ``n`` and ``m`` independent values exceed with at most this probability without a
    change."""
    return math.sqrt(-math.log(false_positive_rate / 2.0) / 2.0) * math.sqrt((n + m) / (n * m))


class DriftDetector:
    """Tests a stream of trajectories for changes; `update` takes each of them once, in order of finishing.

    ``group_size`` trajectories count as one observation; ``prompts`` groups are a batch.
    """

    def __init__(self, group_size: int, prompts: int = 1, false_positive_rate: float = FALSE_POSITIVE_RATE) -> None:
        groups = -(-BLOCK_GROUPS // prompts) * prompts
        self._group, self._false_positive_rate = group_size, false_positive_rate
        self._block_size = groups * group_size
        self._reference_size = max(2 * groups, -(-REFERENCE_GROUPS // groups) * groups) * group_size
        self._reference: list[Sequence[float]] = []
        self._fresh: list[Sequence[float]] = []
        """Up to `LONG_BLOCKS` blocks; the last one may be incomplete."""

    def update(self, values: Sequence[float] | Sequence[Sequence[float]]) -> Drift | None:
        """Take in trajectories, each one value or one value per quantity; return the last change found."""
        found: Drift | None = None
        for value in values:
            one = value if isinstance(value, Sequence) else (value,)
            if len(self._reference) < self._reference_size:
                self._reference.append(one)
                continue
            self._fresh.append(one)
            if len(self._fresh) % self._block_size:
                continue
            long = len(self._fresh) == LONG_BLOCKS * self._block_size
            drift = self._test(long)
            if drift is not None:
                found = drift
                self._reference = self._fresh[-drift.count :][: self._reference_size]
            if drift is not None or long:
                self._fresh = []
        return found

    def _test(self, long: bool) -> Drift | None:
        blocks = len(self._fresh) // self._block_size
        sizes = [
            count * self._block_size
            for count in (1, 2, LONG_BLOCKS)
            if count <= blocks and (count < LONG_BLOCKS or long)
        ]
        quantities = [q for q in range(len(self._fresh[0])) if any(row[q] != NOT_MEASURED for row in self._fresh)]
        rate = self._false_positive_rate / (len(sizes) * len(quantities))
        clearest: Drift | None = None
        for size in sizes:
            critical = critical_distance(size / self._group, len(self._reference) / self._group, rate)
            for q in quantities:
                old, new = [row[q] for row in self._reference], [row[q] for row in self._fresh[-size:]]
                distance = ks_distance(old, new)
                if distance > critical and (
                    clearest is None or distance / critical > clearest.distance / clearest.critical
                ):
                    clearest = Drift(
                        distance=distance,
                        critical=critical,
                        before=sum(old) / len(old),
                        after=sum(new) / len(new),
                        quantity=q,
                        count=size,
                    )
        return clearest
