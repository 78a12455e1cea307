"""A node of the causal tree: what followed a context (the last one or two symbols) beyond what was expected without it.

Each node keeps, decayed by weight version, the sum of log (remaining / expected) and of the remaining tokens and turns that followed, and a ring of the last
`SAMPLES` = 16 (tokens, turns) for quantiles.  Its *effect*, on the logarithm of what is left, is

    effect = sum of log (remaining / expected) / (n + K_CONTEXT).

n / (n + k) is the credibility weight (Buhlmann), k the variance within over the variance between contexts: tool signals correlate with what remains by at
most 0.3 on SWE and tau-bench records (0.09 of the variance), hence `K_CONTEXT` = 8.  A finer context expects what the coarser ones make of it, so that effects
add up.  Evidence halves per `HALF_LIFE` = 16 weight versions: a node forgets within an epoch of a small data set but keeps siblings, which finish within a
few versions.

What tools say is *used* only while it pays on held-out data.  Every value is first predicted, then learned (prequential); a `Gate` keeps decayed losses of the
prediction with and without, and opens while `OPEN_BELOW` = 0.97 of the loss without exceeds the loss with it, after at least `TRIALS` = 24 trials.  The
memory of a gate is 1 / (1 - `GATE_KEEP`) = 200 trials.
"""

from __future__ import annotations

from libra_hpc.sched.survival import HALF_LIFE

K_CONTEXT = 8.0
SAMPLES = 16
OPEN_BELOW = 0.97
TRIALS = 24
GATE_KEEP = 0.995


class Gate:
    """Whether something pays on held-out data."""

    __slots__ = ("open", "trials", "with_split", "without")

    def __init__(self) -> None:
        self.with_split = self.without = 0.0
        """Decayed losses."""
        self.trials = 0
        self.open = False

    def learn(self, with_split: float, without: float) -> None:
        """Losses of one held-out prediction."""
        self.with_split = GATE_KEEP * self.with_split + with_split
        self.without = GATE_KEEP * self.without + without
        self.trials += 1
        self.open = self.trials >= TRIALS and self.with_split < OPEN_BELOW * self.without


class Context:
    """A node; see the module."""

    __slots__ = ("_next", "_ring", "_sum", "_tokens", "_turns", "_version", "count", "effect")

    def __init__(self) -> None:
        self.effect = 0.0
        self.count = 0.0
        """Evidence: decayed number of values."""
        self._sum = self._tokens = self._turns = 0.0
        self._version = 0
        self._ring: list[tuple[float, float]] = []
        self._next = 0

    @property
    def tokens(self) -> float:
        """Decayed mean of remaining tokens."""
        return self._tokens / self.count if self.count else 0.0

    @property
    def turns(self) -> float:
        """Decayed mean of remaining turns."""
        return self._turns / self.count if self.count else 0.0

    def token_quantile(self, q: float) -> float:
        """Quantile of remaining tokens over the last values (nearest rank); there must be one."""
        return _quantile([sample[0] for sample in self._ring], q)

    def turn_quantile(self, q: float) -> float:
        """Quantile of remaining turns over the last values (nearest rank); there must be one."""
        return _quantile([sample[1] for sample in self._ring], q)

    def learn(self, tokens: float, turns: float, beyond: float, version: int) -> None:
        """One value; ``beyond`` is log (tokens / expected without this context)."""
        if version > self._version:
            keep = 0.5 ** ((version - self._version) / HALF_LIFE)
            self._version = version
            self.count *= keep
            self._sum *= keep
            self._tokens *= keep
            self._turns *= keep
        self.count = count = self.count + 1.0
        self._sum += beyond
        self._tokens += tokens
        self._turns += turns
        self.effect = self._sum / (count + K_CONTEXT)
        ring = self._ring
        if len(ring) < SAMPLES:
            ring.append((tokens, turns))
        else:
            ring[self._next] = (tokens, turns)
            self._next = (self._next + 1) % SAMPLES


def _quantile(values: list[float], q: float) -> float:
    values.sort()
    return values[min(len(values) - 1, int(q * len(values)))]
