"""The blend: a regression that corrects the expected tokens left by prompt, tests and tool results.

With b the tokens left by attained service and prompt (`survival`, `groups`):

    log left = log b + w . x + log smear
    x = (1, log b - `CENTRE`, log scale of the prompt, tests green, tests fail, log failing tests, signal effect)

- w: ridge regression of log (left / b) on x over finished trajectories, pulled to `PRIOR`.
- An observation counts by the inverse of its chance to be seen by now (`Survival.weight`; Robins and Rotnitzky, 1992).
- smear: from the mean logarithm to the mean (Duan, 1983).
- `Blend.loss`: pinball losses (Koenker and Bassett, 1978) of the quantiles 0.5 and 0.9 of the logarithm.
"""

from __future__ import annotations

from math import exp, log
from typing import Final

from libra_hpc.policies.scheduling.linear import solve_symmetric

CENTRE: Final = 7.0
"""Log of about 1,100 tokens: separates the constant from the slope."""
PRIOR: Final[tuple[float, ...]] = (0.0, -0.3, 0.0, 0.0, 0.0, 0.0, 1.0)
"""-0.3: lengths within a task vary less than the Pareto tail of the survival table."""
PRIOR_WEIGHT: Final = 20.0
"""Observations per feature that `PRIOR` is worth."""
PLAIN_FEATURES: Final = 3
"""Features of a blend without tool results: the first three."""
MEMORY: Final = 4000.0
"""Observations: about 1,300 trajectories."""
SOLVE_EVERY: Final = 96
"""Observations between two solutions, 16 at first; one takes about 20 us."""
SMEAR_PRIOR: Final = 25.0
"""Observations that a smear of 1 is worth."""
SMEAR_MOST: Final = 6.0
"""Bound of the smear and of its inverse."""
STEP: Final = 0.05
"""Step of the quantile offsets, in units of the logarithm."""
_GROWTH: Final = 1.0 / (1.0 - 1.0 / MEMORY)
_LARGE: Final = 1e9


class Blend:
    """Weighted ridge regression on the first ``size`` features."""

    def __init__(self, size: int = len(PRIOR)) -> None:
        self.weights = list(PRIOR[:size])
        self.log_smear = 0.0
        self.count = 0
        """Total number of observations."""
        # Start: offsets of the quantiles of an exponential distribution from its mean.
        self.p50, self.p90 = -0.37, 0.83
        self._matrix = [[0.0] * size for _ in range(size)]
        self._vector = [0.0] * size
        self._actual = self._expected = 0.0
        self._scale = 1.0
        self._stale = 0

    def predict(self, features: list[float]) -> float:
        """Log (left / b), without the smear."""
        total = 0.0
        weights = self.weights
        for i in range(len(weights)):
            total += weights[i] * features[i]
        return total

    def loss(self, error: float) -> float:
        """Quantile loss of a prediction that is ``error`` too low; the offsets then move by `STEP`."""
        low, high = error - self.p50, error - self.p90
        self.p50 += STEP * (0.5 if low > 0.0 else -0.5)
        self.p90 += STEP * (0.9 if high > 0.0 else -0.1)
        return (0.5 * low if low > 0.0 else -0.5 * low) + (0.9 * high if high > 0.0 else -0.1 * high)

    def learn(self, features: list[float], target: float, error: float, weight: float) -> None:
        """Add an observation ``target`` = log (left / b); its prediction was ``error`` too low."""
        # Relative to the sum of both, so that one very long trajectory does not outweigh hundreds.
        ratio = exp(min(20.0, error))
        share = weight / (1.0 + ratio)
        self._scale *= _GROWTH
        growing = weight * self._scale
        self._actual += self._scale * share * ratio
        self._expected += self._scale * share
        vector = self._vector
        matrix = self._matrix
        for i in range(len(matrix)):
            value = features[i]
            # Half of the features are 0 at any time.
            if value != 0.0:
                value *= growing
                row = matrix[i]
                for j in range(i + 1):
                    row[j] += value * features[j]
                vector[i] += value * target
        self.count += 1
        self._stale += 1
        if self._stale >= SOLVE_EVERY or (self.count <= SOLVE_EVERY and self._stale >= 16):
            self._solve()

    def _solve(self) -> None:
        self._stale = 0
        scale = self._scale
        if scale > _LARGE:
            self._matrix = [[value / scale for value in row] for row in self._matrix]
            self._vector = [value / scale for value in self._vector]
            self._actual, self._expected, self._scale = self._actual / scale, self._expected / scale, 1.0
            scale = 1.0
        ridge = PRIOR_WEIGHT * scale
        matrix = [row[:] for row in self._matrix]
        right = self._vector[:]
        for i in range(len(matrix)):
            matrix[i][i] += ridge
            right[i] += ridge * PRIOR[i]
        self.weights = solve_symmetric(matrix, right)
        prior = SMEAR_PRIOR * scale
        self.log_smear = log(min(SMEAR_MOST, max(1.0 / SMEAR_MOST, (self._actual + prior) / (self._expected + prior))))
