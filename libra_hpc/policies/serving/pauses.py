"""How long turns wait at an engine that is paused for the users of its device.

- A pause ends -> the usual pause follows: the mean length of that in which a random paused second falls.
- A turn waits for `PAUSES` usual pauses, at most `LONGEST_S`, and never less than its prefill elsewhere takes.

Pure; the simulator and the engine of a lender use it.
"""

from __future__ import annotations

from typing import Final

STAND_S: Final = 2.0
"""Most seconds that a turn stands still at an engine whose pauses are not known."""
PAUSES: Final = 2.0
"""Pauses of usual length for which a turn waits: all turns leave at once, and their prefill is work that own engines do
not have time for.  At 0 half of what code traffic leaves is lost."""
LONGEST_S: Final = 30.0
PAUSE_WEIGHT: Final = 0.05
"""Weight of the newest pause in the means."""


class Pauses:
    """Pauses of one borrowed engine; at first it counts as never paused."""

    def __init__(self, longest_s: float = LONGEST_S) -> None:
        self._longest_s = longest_s
        self._pauses = 0
        self._mean = self._square = 0.0
        """Moments of the lengths of pauses."""

    def paused(self, seconds: float) -> None:
        """A pause has ended."""
        self._pauses += 1
        weight = max(PAUSE_WEIGHT, 1.0 / self._pauses)
        self._mean += weight * (seconds - self._mean)
        self._square += weight * (seconds * seconds - self._square)

    @property
    def pause_s(self) -> float:
        """The usual pause."""
        return self._square / self._mean if self._mean > 0.0 else 0.0

    def waits_s(self, prefill_s: float) -> float:
        """Seconds that a turn waits whose prefill elsewhere takes ``prefill_s``."""
        return max(prefill_s, min(self._longest_s, PAUSES * self.pause_s))
