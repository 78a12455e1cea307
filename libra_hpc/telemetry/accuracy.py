"""How good predictions were: median absolute relative errors of predicted against measured step times.

One step is noisy by nature: with eta + 1 batches in flight they become complete in bursts, so a long step is followed by short ones.  What the planner
weighs is their mean, so the error of sums over `WINDOW` = 8 steps in a row is given as well.

What no prediction can do much better than is the scatter of steps of the same work.  `smoother_error` is that of a smoother which knows what comes after: the
time per token of a step is taken for the median of the `SIDE` = 2 steps before and after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

WINDOW = 8
SIDE = 2

Pair = tuple[float | None, float]
"""(predicted or None, measured) seconds of one step, in order of steps."""


def median_error(pairs: Sequence[Pair]) -> float | None:
    """Median of |predicted / measured - 1| over the steps that were predicted; None when there is none."""
    errors = [abs(predicted / measured - 1.0) for predicted, measured in pairs if predicted is not None and measured > 0.0]
    return median(errors) if errors else None


def window_error(pairs: Sequence[Pair]) -> float | None:
    """The same of sums over `WINDOW` predicted steps in a row, windows not overlapping; None with fewer."""
    known = [(predicted, measured) for predicted, measured in pairs if predicted is not None]
    windows = [known[at : at + WINDOW] for at in range(0, len(known) - WINDOW + 1, WINDOW)]
    return median_error([(sum(p for p, _ in window), sum(m for _, m in window)) for window in windows])


def smoother_error(wait_s: Sequence[float], work: Sequence[float], seconds: Sequence[float]) -> float | None:
    """Median error of steps that wait, then do ``work`` (> 0, any unit) in ``seconds`` (> 0), if the latter were smoothed; None with too few steps."""
    rates = [taken / units for taken, units in zip(seconds, work, strict=True)]
    pairs: list[Pair] = []
    for at in range(SIDE, len(rates) - SIDE):
        neighbours = rates[at - SIDE : at] + rates[at + 1 : at + 1 + SIDE]
        pairs.append((wait_s[at] + work[at] * median(neighbours), wait_s[at] + seconds[at]))
    return median_error(pairs)
