"""Monotone piecewise-linear curves through measured points.

Measured times scatter by a few per cent: a larger operator may look faster than a smaller one, which a scheduler
would exploit. So the points are first made non-decreasing (isotonic regression).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise


def isotonic(values: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to ``values`` in least squares (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = float(value), 1
        while pools and pools[-1][0] > mean:
            before, size = pools.pop()
            mean, count = (before * size + mean * count) / (size + count), size + count
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


class StepCurve:
    """Linear between points, constant below the first, with the last slope beyond; ``xs`` strictly increasing, at
    least two.
    """

    __slots__ = ("slopes", "xs", "ys")

    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        self.xs, self.ys = list(xs), list(ys)
        self.slopes = [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in pairwise(zip(xs, ys, strict=True))]
        self.slopes.append(self.slopes[-1])

    def __call__(self, x: float) -> float:
        at = bisect_right(self.xs, x) - 1
        return self.ys[at] + (x - self.xs[at]) * self.slopes[at] if at >= 0 else self.ys[0]
