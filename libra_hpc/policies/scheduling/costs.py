"""Cost of a step of every engine: seconds per step, per KV token in use and per prefilled token.

A window of at least `WINDOW_STEPS` between two reports of an engine is one observation of

    busy seconds = pace * (base * steps + slope * steps * KV tokens in use + prefill * prefilled tokens)

without weight updates.  `ClassFit` has base, slope and prefill of a TP class, a decayed least-squares fit with a ridge.
`EngineFit` has the pace of one engine: measured over expected seconds, shrunk to 1 by `PACE_WEIGHT`.

- The class has no report -> the fit of the nearest class that has one, scaled by ``TP ** -TP_EXPONENT``.
- No class has a report -> `default_costs`; only their ratios matter then.
"""

from __future__ import annotations

from math import exp, log
from typing import Final

from libra_hpc.protocol.engine_state import EngineStats

HALF_LIFE: Final = 64.0
"""Observations of a class: half a minute of one engine's reports, one or two seconds of 24 engines'."""
WINDOW_STEPS: Final = 16
"""Least steps of a window.  Tokens count where their prefill ends: a report in the middle of a long one shows steps of
40 times their cost, and the next report too many tokens."""
PACE_WEIGHT: Final = 8.0
"""Reports, 4 s of a busy engine, that the class is worth.  Each one moves the pace by an eighth of the difference, so
that old reports are dropped."""
PACE_MOVE: Final = 0.05
"""Most that a report moves the logarithm of the pace, because single windows are wrong by any factor.  An engine that
becomes twice as slow is priced so after 10 s."""
PACE_BAND: Final = 1.2
"""A ratio: engines whose pace is closer to the median one cost the same.  Equal engines measure 0.86 to 1.17."""
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
Window = tuple[float, float, float, float]
"""What an engine did between two reports: busy seconds, steps, steps * KV tokens in use, prefilled tokens."""


def default_costs(tp: int, kv_capacity: int) -> Coefficients:
    """Costs before any report; ``kv_capacity`` in tokens of one replica."""
    faster = float(tp**TP_EXPONENT)
    return DECODE_S / faster, FULL_SHARE * DECODE_S / faster / max(1, kv_capacity), PREFILL_S / faster


def scaled_costs(known: Coefficients, from_tp: int, to_tp: int) -> Coefficients:
    """Costs of one TP degree, estimated from those of another."""
    scale = float((from_tp / to_tp) ** TP_EXPONENT)
    return known[0] * scale, known[1] * scale, known[2] * scale


class EngineFit:
    """The reports of one engine, and its pace."""

    def __init__(self) -> None:
        self._last: EngineStats | None = None
        self._level = 0.0
        """Logarithm of the pace."""

    def restart(self) -> None:
        """The counters restart: the next report gives no difference to the last one."""
        self._last = None

    def observe(self, stats: EngineStats, kv_capacity: int, least: int) -> Window | None:
        """What the engine did since the last window.

        None for a first report, fewer than ``least`` steps, or a rebuilt engine.
        """
        last = self._last
        if last is not None and last.steps <= stats.steps < last.steps + least:
            return None
        self._last = stats
        if last is None or stats.steps < last.steps:
            return None
        busy_s = stats.stepping_s - last.stepping_s
        if busy_s <= 0.0:
            return None
        steps = float(stats.steps - last.steps)
        tokens = steps * 0.5 * (stats.kv_use + last.kv_use) * kv_capacity
        return busy_s, steps, tokens, float(max(0, stats.prefill_tokens - last.prefill_tokens))

    def compare(self, window: Window, costs: Coefficients) -> None:
        """Move the pace towards the measured over the expected seconds, by the costs of the class."""
        expected_s = costs[0] * window[1] + costs[1] * window[2] + costs[2] * window[3]
        move = (log(window[0] / expected_s) - self._level) / PACE_WEIGHT
        self._level += min(PACE_MOVE, max(-PACE_MOVE, move))

    @property
    def pace(self) -> float:
        """Its seconds over those of its class for the same steps."""
        return exp(self._level)


class ClassFit:
    """The decayed fit of one TP class: `add` observations of its engines, `solve` against a prior."""

    def __init__(self) -> None:
        # Normal equations over x = (steps, steps * KV tokens, prefilled tokens) per busy second.
        # Divided by busy seconds, every target is 1: errors are relative, and long windows do not dominate.
        self._sums = [[0.0] * 3 for _ in range(3)]
        self._targets = [0.0] * 3
        self.observations = 0.0
        """Decayed number of observations."""
        self.count = 0
        """Total number of observations."""

    def add(self, window: Window, pace: float) -> None:
        """Add a window of an engine that is ``pace`` times as slow as the class."""
        unit = pace / window[0]
        x = (unit * window[1], unit * window[2], unit * window[3])
        for i in range(3):
            row = self._sums[i]
            for j in range(3):
                row[j] = _KEEP * row[j] + x[i] * x[j]
            self._targets[i] = _KEEP * self._targets[i] + x[i]
        self.count += 1
        self.observations = _KEEP * self.observations + 1.0

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
        found = _solve(matrix, target)
        floor = 0.05 * level
        return tuple(max(floor, value) * scale for value, scale in zip(found, prior, strict=True))  # type: ignore[return-value]


def _solve(matrix: list[list[float]], target: list[float]) -> list[float]:
    """x with A x = target, by elimination; A is symmetric and positive definite, as a ridge makes it."""
    rows = [[*row, value] for row, value in zip(matrix, target, strict=True)]
    for i, pivot in enumerate(rows):
        for row in rows:
            if row is not pivot:
                factor = row[i] / pivot[i]
                for j in range(i, len(row)):
                    row[j] -= factor * pivot[j]
    return [row[-1] / row[i] for i, row in enumerate(rows)]
