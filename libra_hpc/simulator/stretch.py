"""A stretch: consecutive decode steps of an unchanged batch, simulated in one event.

A batch of decodes changes only when a request ends or arrives, blocks run out or a report is due.  Step times are
linear in the KV tokens, so each step is longer than the one before by the same ``growth``, and j steps take

    j * first + growth * j (j - 1) / 2.
"""

from __future__ import annotations

import math


class Stretch:
    """``steps`` steps from ``start`` on (0: none); durations in seconds."""

    __slots__ = ("first", "growth", "start", "steps")

    def __init__(self) -> None:
        self.start = self.first = self.growth = 0.0
        self.steps = 0

    def begin(self, start: float, first: float) -> None:
        self.start, self.first, self.growth, self.steps = start, first, 0.0, 1

    def extend(self, steps: int, last: float) -> None:
        """Make it ``steps`` >= 2 steps, the last of which takes ``last`` seconds."""
        self.steps, self.growth = steps, (last - self.first) / (steps - 1)

    def boundary(self, steps: int) -> float:
        return self.start + (steps * self.first + self.growth * (steps * (steps - 1) * 0.5))

    @property
    def end(self) -> float:
        return self.boundary(self.steps)

    def cut(self, at: float) -> None:
        """Cut it at its first step boundary not before ``at``; at least one step remains."""
        first, growth, seconds = self.first, self.growth, max(0.0, at - self.start)
        if growth > 0.0:
            middle = first - 0.5 * growth
            steps = int((math.sqrt(middle * middle + 2.0 * growth * seconds) - middle) / growth)
        else:
            steps = int(min(seconds / first, float(self.steps)))
        steps = min(max(1, steps), self.steps)
        # The root has a rounding error; the boundaries decide.
        while steps > 1 and self.boundary(steps - 1) >= at:
            steps -= 1
        while steps < self.steps and self.boundary(steps) < at:
            steps += 1
        self.steps = steps
