"""Where the work per batch is going: a robust trend over the last steps, continued with damping.

The trend is Theil and Sen's: the median of all slopes of log work between two steps.  It counts only when Kendall's
test says that steps grow (or shrink) with time beyond `SIGNIFICANT` = 3.29 standard deviations, two-sided probability
0.001 without a trend; else the forecast is "as now", so that noise forecasts nothing.

A trend is trusted about as far ahead as it was seen back: after t seconds the log work has changed by

    rate * tau * (1 - exp(-t / tau)),        tau = half of the time the steps span,

and never by more than `MOST` = 2 in either direction.  What lies between the middle of the measurements and now is not
forecast but known, and is not damped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

SIGNIFICANT = 3.29
MIN_POINTS = 8
"""With fewer no order of them is significant enough."""
MOST = 2.0


class Trend(NamedTuple):
    """Relative change per second, and for how long it was seen."""

    rate: float = 0.0
    span: float = 0.0

    def past(self, seconds: float) -> float:
        """Factor from a moment that was seen to ``seconds`` later, not damped."""
        return _bounded(self.rate * seconds)

    def ahead(self, seconds: float) -> float:
        """Factor from now to ``seconds`` later, damped."""
        tau = self.span / 2.0
        return 1.0 if self.rate == 0.0 else _bounded(self.rate * tau * (1.0 - math.exp(-seconds / tau)))


def trend(points: Sequence[tuple[float, float]]) -> Trend:
    """The trend of (time in seconds, positive value) points in order of time; no trend unless it is significant."""
    n = len(points)
    if n < MIN_POINTS or points[-1][0] <= points[0][0]:
        return Trend()
    logs = [(at, math.log(value)) for at, value in points]
    score = 0
    slopes: list[float] = []
    for i, (at, value) in enumerate(logs):
        for later, other in logs[i + 1 :]:
            score += (other > value) - (other < value)
            if later > at:
                slopes.append((other - value) / (later - at))
    z = score / math.sqrt(n * (n - 1) * (2 * n + 5) / 18.0)
    if abs(z) < SIGNIFICANT:
        return Trend()
    return Trend(median(slopes), points[-1][0] - points[0][0])


def _bounded(log: float) -> float:
    return min(MOST, max(1.0 / MOST, math.exp(log)))
