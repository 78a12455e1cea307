"""Trend of the work per batch: a robust slope over the last steps, extrapolated with damping.

- Kendall's test finds no order beyond `SIGNIFICANT` -> no trend: the work stays as it is.
- Else the rate is Theil and Sen's: the median slope of log work between all pairs of steps.
- A trend extends about as far ahead as it was observed: exp(rate * tau * (1 - exp(-t / tau))), tau = half the span.
- From the middle of the measurements to now it is not damped, because that time was observed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

SIGNIFICANT = 3.29
"""Standard deviations of Kendall's score; two-sided probability 0.001 without a trend."""
MIN_POINTS = 8
"""Fewest steps; with fewer no order is significant enough."""
MOST = 2.0
"""Largest factor, up or down."""


class Trend(NamedTuple):
    """Relative change per second, and the seconds over which it was observed."""

    rate: float = 0.0
    span: float = 0.0

    def past(self, seconds: float) -> float:
        """Factor over ``seconds`` that were observed, not damped."""
        return _bounded(self.rate * seconds)

    def ahead(self, seconds: float) -> float:
        """Factor from now to ``seconds`` later, damped."""
        tau = self.span / 2.0
        return 1.0 if self.rate == 0.0 else _bounded(self.rate * tau * (1.0 - math.exp(-seconds / tau)))


def trend(points: Sequence[tuple[float, float]]) -> Trend:
    """The trend of (seconds, positive value) points in order of time; zero unless significant."""
    n = len(points)
    if n < MIN_POINTS or points[-1][0] <= points[0][0]:
        return Trend()
    logs = [(at, math.log(value)) for at, value in points]
    score = sum((b > a) - (b < a) for i, (_, a) in enumerate(logs) for _, b in logs[i + 1 :])
    z = score / math.sqrt(n * (n - 1) * (2 * n + 5) / 18.0)
    if abs(z) < SIGNIFICANT:
        return Trend()
    return Trend(theil_sen_slope(logs), points[-1][0] - points[0][0])


def theil_sen_slope(points: Sequence[tuple[float, float]]) -> float:
    """Median slope between all pairs of (x, y) points whose x differ; at least two must."""
    return median(
        [(b[1] - a[1]) / (b[0] - a[0]) for i, a in enumerate(points) for b in points[i + 1 :] if b[0] != a[0]]
    )


def _bounded(log: float) -> float:
    return min(MOST, max(1.0 / MOST, math.exp(log)))
