"""What a step of a TP class costs at any load: step = base + slope * KV tokens, and seconds per prefilled token.

Every `EngineStats` difference of a class's engines is one observation of

    busy seconds = base * steps + slope * steps * KV tokens in use + prefill * prefilled tokens,

weight updates left out, with the KV tokens in use taken as the mean of the two reports.  The three coefficients are a
least-squares fit over an exponentially decayed window (`HALF_LIFE` = 64 observations: half a minute of one engine's
reports, a second or two of a whole class's), pulled towards a prior by a ridge that is worth `PRIOR_WEIGHT` = 0.2
observations, so that a coefficient the observations cannot tell apart (all batches alike) stays where the prior puts
it.

The prior of a class that has reported nothing, or that has reported nothing yet about one coefficient, comes from the
nearest class that has: decoding and prefilling one token cost less with more devices, but by less than their number,
because of communication and of work that does not shrink.  Over A100 and H200 operator tables of 8B to 32B models,
going from TP 1 to TP 8 speeds up either by 3.3 to 5 times; `TP_EXPONENT` = 0.65 (8 ** 0.65 = 3.9). While nothing at all
is measured, `DECODE_S` = 0.02 s a step and `PREFILL_S` = 1e-4 s a token stand in at TP 1 (a 14B model on an A100), and
a full KV cache is taken to double the step, `FULL_SHARE` = 1; only their ratios matter then.
"""

from __future__ import annotations

from typing import Final

from libra_hpc.protocol.rollout import EngineStats

from .linear import solve_symmetric

HALF_LIFE: Final = 64.0
PRIOR_WEIGHT: Final = 0.2
TP_EXPONENT: Final = 0.65
DECODE_S: Final = 0.02
PREFILL_S: Final = 1e-4
FULL_SHARE: Final = 1.0
_KEEP: Final = 0.5 ** (1.0 / HALF_LIFE)

Coefficients = tuple[float, float, float]
"""Seconds: of an empty step, per KV token in use, per prefilled token."""


def default_costs(tp: int, kv_capacity: int) -> Coefficients:
    """Costs while nothing is measured anywhere; ``kv_capacity`` in tokens of one replica."""
    faster = float(tp**TP_EXPONENT)
    return DECODE_S / faster, FULL_SHARE * DECODE_S / faster / max(1, kv_capacity), PREFILL_S / faster


def scaled_costs(known: Coefficients, from_tp: int, to_tp: int) -> Coefficients:
    """Costs of one TP degree, guessed from those of another."""
    scale = float((from_tp / to_tp) ** TP_EXPONENT)
    return known[0] * scale, known[1] * scale, known[2] * scale


class StepFit:
    """The decayed fit of one class; `observe` its engines' differences, `solve` against a prior."""

    __slots__ = ("_last", "_sums", "_targets", "count", "observations")

    def __init__(self) -> None:
        self._last: dict[str, EngineStats] = {}
        # Normal equations over x = (steps, steps * KV tokens, prefilled tokens) per busy second.
        self._sums = [[0.0] * 3 for _ in range(3)]
        self._targets = [0.0] * 3
        self.observations = 0.0
        """Decayed number behind the fit."""
        self.count = 0
        """Number taken in, ever."""

    def forget(self, engine: str) -> None:
        """An engine is gone; its next counters start anew."""
        self._last.pop(engine, None)

    def observe(self, engine: str, stats: EngineStats, kv_capacity: int) -> bool:
        """Take in counters of one engine; False when they say nothing new (first report, no step since, rebuilt
        engine)."""
        last = self._last.get(engine)
        self._last[engine] = stats
        if last is None or stats.steps <= last.steps:
            return False
        busy = stats.stepping_s - last.stepping_s
        if busy <= 0.0:
            return False
        # Divided by busy seconds: every observation has target 1, so that errors are relative and long windows do not
        # drown short ones.
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
        """Coefficients in seconds; never negative, and a step is never free."""
        if self.observations == 0.0:
            return prior
        # In units of the prior the unknowns are all about 1, which makes one ridge fit all three.
        matrix = [[self._sums[i][j] * prior[i] * prior[j] for j in range(3)] for i in range(3)]
        target = [self._targets[i] * prior[i] for i in range(3)]
        # A prior that is off by a factor must not hold the fit back: it is first rescaled to explain the mean of the
        # observations.
        total = sum(sum(row) for row in matrix)
        level = sum(target) / total if total > 0.0 else 1.0
        ridge = PRIOR_WEIGHT * total / (3.0 * self.observations)
        for i in range(3):
            matrix[i][i] += ridge
            target[i] += ridge * level
        found = solve_symmetric(matrix, target)
        floor = 0.05 * level
        return tuple(max(floor, value) * scale for value, scale in zip(found, prior, strict=True))  # type: ignore[return-value]
