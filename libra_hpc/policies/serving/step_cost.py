"""Seconds of a rollout step, learned from measured ones, and the most tokens that a step of given seconds has.

    base + sequence * decodes + kv * their contexts + token * prefill + pair * prefill * (context + prefill / 2)

- A step is measured -> a decayed least-squares fit of relative errors; coefficients stay above a share of the prior's.
- Measured over fitted seconds -> `HighQuantile`, by which every estimate is multiplied.
- Fewer than `MIN_STEPS` steps, or none for `STALE_S` -> nothing is known.
- A step larger than any so far -> at most `GROWTH` times the tokens.

Pure: times are seconds of any clock.
"""

from __future__ import annotations

from math import exp, inf, sqrt
from typing import Final, NamedTuple

HALF_LIFE: Final = 512.0
"""Steps.  Half: contexts of one phase are dropped in the next; double: a device that slows down is noticed late."""
MIN_STEPS: Final = 8
STALE_S: Final = 10.0
"""Seconds: the device may have become another meanwhile."""
GROWTH: Final = 2.0
SWEEPS: Final = 4
"""Sweeps of coordinate descent after a step; it begins where the last one ended."""
RIDGE: Final = 0.05
"""Steps that the prior's proportions are worth."""
FLOOR: Final = 0.05
"""Least coefficient as a share of the prior, once that is scaled to the measured level."""
PRIOR: Final = (1.0, 0.02, 1e-5, 0.01, 3e-7)
"""Coefficients in base steps, a model of 8B parameters on an A100: a ridge and a floor need proportions only."""
SIZE: Final = len(PRIOR)
QUANTILE: Final = 0.9
QUANTILE_MOVE: Final = 0.1
"""Move of the logarithm.  Half: twice as slow to follow; double: one slow step moves the estimate by a fifth."""
LATE_MOST: Final = 3.0
"""Largest factor: a process that was suspended must not close the gate for long."""
_KEEP: Final = 0.5 ** (1.0 / HALF_LIFE)


class StepWork(NamedTuple):
    """What a step computes, or has to compute."""

    decodes: int = 0
    """Sequences that get a token."""
    kv_tokens: int = 0
    """Their contexts."""
    prefill: int = 0
    """Prompt tokens."""
    context: int = 0
    """Before those; merged to one chunk with the same number of attended pairs."""


class HighQuantile:
    """Follows the 90 % quantile of positive numbers."""

    def __init__(self, value: float) -> None:
        self.value = value

    def add(self, number: float) -> None:
        if number > 0.0:
            self.value *= exp(QUANTILE_MOVE * (QUANTILE if number > self.value else QUANTILE - 1.0))


class StepCost:
    def __init__(self) -> None:
        # In units of the prior, divided by the measured seconds: errors are relative, and a slow step weighs little.
        self._matrix = [[0.0] * SIZE for _ in range(SIZE)]
        self._target = [0.0] * SIZE
        self._units = [0.0] * SIZE
        """The coefficients in units of the prior, seconds."""
        self._late = HighQuantile(GROWTH)
        self._steps, self._largest, self._at = 0, 0, -inf

    def known(self, now: float) -> bool:
        return self._steps >= MIN_STEPS and now - self._at <= STALE_S

    def observe(self, batch: StepWork, seconds: float, now: float) -> None:
        """Learn from a step that has ended."""
        if seconds <= 0.0 or not batch.decodes + batch.prefill:
            return
        if self._steps >= MIN_STEPS:
            self._late.add(seconds / self._mean(batch))
            self._late.value = min(LATE_MOST, max(1.0, self._late.value))
        row = [value * unit / seconds for value, unit in zip(_features(batch), PRIOR, strict=True)]
        for i in range(SIZE):
            self._target[i] = _KEEP * self._target[i] + row[i]
            for j in range(SIZE):
                self._matrix[i][j] = _KEEP * self._matrix[i][j] + row[i] * row[j]
        self._steps, self._at = self._steps + 1, now
        self._largest = max(self._largest, batch.decodes + batch.prefill)
        self._solve()

    def seconds(self, batch: StepWork) -> float:
        """A high estimate for a step that computes exactly this."""
        return self._late.value * self._mean(batch)

    def tokens(self, batch: StepWork, limit_s: float) -> int:
        """Most tokens of a step that may begin now, with at most these sequences and prompt tokens; 0: none fits.

        The scheduler may spend them on sequences or prompts, so each costs as much as the dearer of both.
        """
        base, sequence, kv, token, pair = (self._late.value * unit * prior for unit, prior in self._each())
        left = limit_s - base
        if left <= 0.0:
            return 0
        count = batch.decodes
        prompt = token + pair * batch.context if batch.prefill or not count else 0.0
        each = max(prompt + (0.5 * pair * count if prompt else 0.0), sequence + kv * batch.kv_tokens / max(1, count))
        if each * count >= left:
            most = left / each
        else:
            # Beside all sequences, p prompt tokens: left = prompt * p + pair * p ** 2 / 2.
            left -= each * count
            prompt += pair * count if prompt else 0.0
            most = count + (2.0 * left / (prompt + sqrt(prompt**2 + 2.0 * pair * left)) if prompt else 0.0)
        return int(min(most, GROWTH * self._largest))

    def _mean(self, batch: StepWork) -> float:
        return sum(unit * prior * x for (unit, prior), x in zip(self._each(), _features(batch), strict=True))

    def _each(self) -> zip[tuple[float, float]]:
        return zip(self._units, PRIOR, strict=True)

    def _solve(self) -> None:
        total = sum(map(sum, self._matrix))
        # The prior, scaled so that it explains the mean step.
        level = sum(self._target) / total
        ridge = RIDGE * total / self._steps
        for _ in range(SWEEPS):
            for i in range(SIZE):
                row = self._matrix[i]
                error = self._target[i] - sum(a * unit for a, unit in zip(row, self._units, strict=True))
                self._units[i] += (error + ridge * (level - self._units[i])) / (row[i] + ridge)
                self._units[i] = max(FLOOR * level, self._units[i])


def _features(batch: StepWork) -> tuple[float, ...]:
    pairs = batch.prefill * (batch.context + 0.5 * batch.prefill)
    return 1.0, float(batch.decodes), float(batch.kv_tokens), float(batch.prefill), pairs
