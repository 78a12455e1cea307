"""How good predictions were: median absolute relative errors of predicted against measured step times.

One step is noisy by nature: with eta + 1 batches in flight they become complete in bursts, so a long step is followed by short ones.  What the planner
weighs is their mean, so the error of sums over `WINDOW` = 8 steps in a row is given as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

WINDOW = 8

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
