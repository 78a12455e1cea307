"""A stretch: consecutive engine steps of one batch, taken in one event.

While a batch consists of decodes alone it does not change until a request ends, one arrives, blocks run out or a report
is due.  Steps are linear in the KV tokens, which grow by one per sequence and step, so each is longer than the one
before by the same amount, and j steps take

    j * first + growth * j (j - 1) / 2.
"""

from __future__ import annotations

import math


class Stretch:
    """``steps`` steps from ``start`` on, none when 0; durations in seconds."""

    __slots__ = ("first", "growth", "start", "steps")

    def __init__(self) -> None:
        self.start = self.first = self.growth = 0.0
        self.steps = 0

    def begin(self, start: float, first: float) -> None:
        """One step of ``first`` seconds."""
        self.start, self.first, self.growth, self.steps = start, first, 0.0, 1

    def extend(self, steps: int, last: float) -> None:
        """Make it ``steps`` >= 2 steps, the last of which takes ``last`` seconds."""
        self.steps, self.growth = steps, (last - self.first) / (steps - 1)

    def boundary(self, steps: int) -> float:
        """When the first ``steps`` steps are over."""
        return self.start + (steps * self.first + self.growth * (steps * (steps - 1) * 0.5))

    @property
    def end(self) -> float:
        """When all are over."""
        return self.boundary(self.steps)

    def cut(self, at: float) -> None:
        """End it at its first boundary not before ``at``; at least one step stays."""
        first, growth, seconds = self.first, self.growth, max(0.0, at - self.start)
        if growth > 0.0:
            middle = first - 0.5 * growth
            steps = int((math.sqrt(middle * middle + 2.0 * growth * seconds) - middle) / growth)
        else:
            steps = int(min(seconds / first, float(self.steps)))
        steps = min(max(1, steps), self.steps)
        # The root is good to the last digit only; the boundaries decide.
        while steps > 1 and self.boundary(steps - 1) >= at:
            steps -= 1
        while steps < self.steps and self.boundary(steps) < at:
            steps += 1
        self.steps = steps
