"""Monotone piecewise-linear curves through measured points.

Measured operator times scatter by a few per cent, so that a larger operator now and then looks faster than a smaller
one.  A scheduler would exploit such an artefact; hence the points are made non-decreasing first (isotonic regression:
neighbours in the wrong order are replaced by their mean).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise


def isotonic(values: Sequence[float]) -> list[float]:
    """Return the non-decreasing sequence nearest to ``values`` in least squares (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = float(value), 1
        while pools and pools[-1][0] > mean:
            before, size = pools.pop()
            mean, count = (before * size + mean * count) / (size + count), size + count
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


class Curve:
    """Linear between the points, on with the last slope beyond them and flat below the first; ``xs`` strictly
    increasing, at least two."""

    __slots__ = ("slopes", "xs", "ys")

    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        self.xs, self.ys = list(xs), list(ys)
        self.slopes = [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in pairwise(zip(xs, ys, strict=True))]
        self.slopes.append(self.slopes[-1])

    def __call__(self, x: float) -> float:
        """The curve's value at ``x``."""
        at = bisect_right(self.xs, x) - 1
        return self.ys[at] + (x - self.xs[at]) * self.slopes[at] if at >= 0 else self.ys[0]
