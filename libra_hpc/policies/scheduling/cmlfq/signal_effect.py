"""Effect of the last tool result on the remaining work, and a gate that admits it only while it lowers the loss.

A `SignalEffect` belongs to the last symbol (`signals`).  Its effect on the logarithm of what is left is

    effect = sum of log (remaining / expected) / (n + CREDIBILITY_K),   n the decayed number of values.

n / (n + k) is the credibility weight (Buhlmann).  A `Gate` compares decayed losses with and without tool results; each
value is predicted before it is learned.
"""

from __future__ import annotations

from typing import Final

from .survival import HALF_LIFE

CREDIBILITY_K: Final = 8.0
"""Variance within over variance between symbols: tool results explain at most 0.09 on SWE and tau-bench records."""
OPEN_BELOW: Final = 0.97
"""Loss with tool results over loss without: below it the gate is open."""
TRIALS: Final = 24
"""Predictions before the gate may open."""
GATE_DECAY: Final = 0.995
"""Memory of 200 trials."""


class Gate:
    """Whether tool results lower the held-out loss."""

    def __init__(self) -> None:
        self.with_signals = self.without_signals = 0.0
        """Decayed losses."""
        self.trials = 0
        self.open = False

    def learn(self, with_signals: float, without_signals: float) -> None:
        """Add the losses of one held-out prediction."""
        self.with_signals = GATE_DECAY * self.with_signals + with_signals
        self.without_signals = GATE_DECAY * self.without_signals + without_signals
        self.trials += 1
        self.open = self.trials >= TRIALS and self.with_signals < OPEN_BELOW * self.without_signals


class SignalEffect:
    """Mean residual after a symbol, shrunk by its evidence."""

    def __init__(self) -> None:
        self.effect = 0.0
        self.count = 0.0
        """Decayed number of values."""
        self._sum = 0.0
        self._version = 0

    def learn(self, residual: float, version: int) -> None:
        """Add ``residual`` = log (remaining / expected without this effect)."""
        if version > self._version:
            decay = 0.5 ** ((version - self._version) / HALF_LIFE)
            self._version = version
            self.count *= decay
            self._sum *= decay
        self.count = count = self.count + 1.0
        self._sum += residual
        self.effect = self._sum / (count + CREDIBILITY_K)
