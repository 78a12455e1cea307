"""Cost of an engine step by TP class: seconds per step, per KV token in use and per prefilled token.

A decayed least-squares fit with a ridge; the difference of two reports of an engine is one observation of

    busy seconds = base * steps + slope * steps * KV tokens in use + prefill * prefilled tokens

without weight updates.  The ridge pulls coefficients that the observations cannot separate to a prior:

- The class has no report -> the fit of the nearest class that has one, scaled by ``TP ** -TP_EXPONENT``.
- No class has a report -> `default_costs`; only their ratios matter then.
"""

from __future__ import annotations

from typing import Final

from libra_hpc.protocol.rollout import EngineStats

from .linear import solve_symmetric

HALF_LIFE: Final = 64.0
"""Observations: half a minute of one engine's reports, one or two seconds of a whole class."""
PRIOR_WEIGHT: Final = 0.2
"""Observations that the prior is worth."""
TP_EXPONENT: Final = 0.65
"""TP 8 is 8 ** 0.65 = 3.9 times faster than TP 1.  Operator tables of A100 and H200, 8B to 32B: 3.3 to 5 times."""
DECODE_S: Final = 0.02
"""Seconds per step at TP 1: a 14B model on an A100."""
PREFILL_S: Final = 1e-4
"""Seconds per prefilled token at TP 1: the same model."""
FULL_SHARE: Final = 1.0
"""What a full KV cache adds to a step, as a share of the empty step."""
_KEEP: Final = 0.5 ** (1.0 / HALF_LIFE)

Coefficients = tuple[float, float, float]
"""Seconds per empty step, per KV token in use, per prefilled token."""


def default_costs(tp: int, kv_capacity: int) -> Coefficients:
    """Costs before any report; ``kv_capacity`` in tokens of one replica."""
    faster = float(tp**TP_EXPONENT)
    return DECODE_S / faster, FULL_SHARE * DECODE_S / faster / max(1, kv_capacity), PREFILL_S / faster


def scaled_costs(known: Coefficients, from_tp: int, to_tp: int) -> Coefficients:
    """Costs of one TP degree, estimated from those of another."""
    scale = float((from_tp / to_tp) ** TP_EXPONENT)
    return known[0] * scale, known[1] * scale, known[2] * scale


class StepFit:
    """The decayed fit of one TP class: `observe` reports, `solve` against a prior."""

    __slots__ = ("_last", "_sums", "_targets", "count", "observations")

    def __init__(self) -> None:
        self._last: dict[str, EngineStats] = {}
        # Normal equations over x = (steps, steps * KV tokens, prefilled tokens) per busy second.
        self._sums = [[0.0] * 3 for _ in range(3)]
        self._targets = [0.0] * 3
        self.observations = 0.0
        """Decayed number of observations."""
        self.count = 0
        """Total number of observations."""

    def forget(self, engine: str) -> None:
        """An engine is gone: its next report starts a new difference."""
        self._last.pop(engine, None)

    def observe(self, engine: str, stats: EngineStats, kv_capacity: int) -> bool:
        """Add a report; False if it is no observation: a first report, no step since, or a rebuilt engine."""
        last = self._last.get(engine)
        self._last[engine] = stats
        if last is None or stats.steps <= last.steps:
            return False
        busy = stats.stepping_s - last.stepping_s
        if busy <= 0.0:
            return False
        # Divided by busy seconds, every target is 1: errors are relative, and long windows do not dominate.
        steps = (stats.steps - last.steps) / busy
        x = (
            steps,
            steps * 0.5 * (stats.kv_use + last.kv_use) * kv_capacity,
            max(0, stats.prefill_tokens - last.prefill_tokens) / busy,
        )
        for i in range(3):
            row = self._sums[i]
            for j in range(3):
                row[j] = _KEEP * row[j] + x[i] * x[j]
            self._targets[i] = _KEEP * self._targets[i] + x[i]
        self.count += 1
        self.observations = _KEEP * self.observations + 1.0
        return True

    def solve(self, prior: Coefficients) -> Coefficients:
        """Coefficients in seconds, each at least 5 % of its rescaled prior."""
        if self.observations == 0.0:
            return prior
        # In units of the prior all unknowns are about 1, so one ridge fits all three.
        matrix = [[self._sums[i][j] * prior[i] * prior[j] for j in range(3)] for i in range(3)]
        target = [self._targets[i] * prior[i] for i in range(3)]
        # First the prior is rescaled to explain the mean observation: a prior wrong by a factor must not bias the fit.
        total = sum(sum(row) for row in matrix)
        level = sum(target) / total if total > 0.0 else 1.0
        ridge = PRIOR_WEIGHT * total / (3.0 * self.observations)
        for i in range(3):
            matrix[i][i] += ridge
            target[i] += ridge * level
        found = solve_symmetric(matrix, target)
        floor = 0.05 * level
        return tuple(max(floor, value) * scale for value, scale in zip(found, prior, strict=True))  # type: ignore[return-value]
