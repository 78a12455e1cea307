"""A node of the causal tree: what followed a context (the last one or two symbols) beyond what was expected without it.

Each node keeps, decayed by weight version, the number of values and their sum of log (remaining / expected).  Its
*effect*, on the logarithm of what is left, is

    effect = sum of log (remaining / expected) / (n + K_CONTEXT).

n / (n + k) is the credibility weight (Buhlmann), k the variance within over the variance between contexts: tool signals
correlate with what remains by at most 0.3 on SWE and tau-bench records (0.09 of the variance), hence `K_CONTEXT` = 8.
A finer context expects what the coarser ones make of it, so that effects add up.  Evidence halves per `HALF_LIFE` = 16
weight versions: a node forgets within an epoch of a small data set but keeps siblings, which finish within a few
versions.

What tools say is *used* only while it pays on held-out data.  Every value is first predicted, then learned
(prequential); a `Gate` keeps decayed losses of the prediction with and without, and opens while `OPEN_BELOW` = 0.97 of
the loss without exceeds the loss with it, after at least `TRIALS` = 24 trials.  The memory of a gate is 1 / (1 -
`GATE_KEEP`) = 200 trials.
"""

from __future__ import annotations

from typing import Final

from .survival import HALF_LIFE

CREDIBILITY_K: Final = 8.0
OPEN_BELOW: Final = 0.97
TRIALS: Final = 24
GATE_DECAY: Final = 0.995


class Gate:
    """Whether something pays on held-out data."""

    __slots__ = ("open", "trials", "with_signals", "without_signals")

    def __init__(self) -> None:
        self.with_signals = self.without_signals = 0.0
        """Decayed losses."""
        self.trials = 0
        self.open = False

    def learn(self, with_signals: float, without_signals: float) -> None:
        """Losses of one held-out prediction."""
        self.with_signals = GATE_DECAY * self.with_signals + with_signals
        self.without_signals = GATE_DECAY * self.without_signals + without_signals
        self.trials += 1
        self.open = self.trials >= TRIALS and self.with_signals < OPEN_BELOW * self.without_signals

    def copied(self) -> Gate:
        """Another gate in the same state."""
        other = Gate()
        other.with_signals, other.without_signals, other.trials, other.open = (
            self.with_signals,
            self.without_signals,
            self.trials,
            self.open,
        )
        return other


class SignalEffect:
    """A node; see the module."""

    __slots__ = ("_sum", "_version", "count", "effect")

    def __init__(self) -> None:
        self.effect = 0.0
        self.count = 0.0
        """Evidence: decayed number of values."""
        self._sum = 0.0
        self._version = 0

    def learn(self, residual: float, version: int) -> None:
        """One value: ``beyond`` is log (remaining / expected without this context)."""
        if version > self._version:
            keep = 0.5 ** ((version - self._version) / HALF_LIFE)
            self._version = version
            self.count *= keep
            self._sum *= keep
        self.count = count = self.count + 1.0
        self._sum += residual
        self.effect = self._sum / (count + CREDIBILITY_K)

    def copied(self) -> SignalEffect:
        """Another node of the same evidence."""
        other = SignalEffect()
        other.effect, other.count, other._sum, other._version = self.effect, self.count, self._sum, self._version
        return other
