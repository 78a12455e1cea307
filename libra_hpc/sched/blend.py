"""The blend: how far each source of evidence moves an estimate of the tokens that are left.

With b the tokens left by attained service and prompt (`survival`, `groups`), the estimate is

    log left = log b + w . x + log smear,    x = (1, log b - `CENTRE`, log scale of the prompt, tests green, tests fail,
    log failing tests, context effect),

where w is a ridge regression of log (left / b) on x over finished trajectories, pulled to prior weights (`PRIOR`) that
are worth `PRIOR_WEIGHT` observations per feature.  So the data decide whether to trust attained service once tests are
known to fail, and noise is drawn to the mean, because a regression on held-out predictions is calibrated by
construction.  `smear` (Duan, 1983) is what remained over exp of the predicted logarithm, as a ratio of decayed sums:
the step from a mean logarithm to a mean.  Memory is `MEMORY` observations.

Early in a batch only short trajectories have finished.  An observation therefore counts by the inverse of its chance to
be seen by now (`Survival.weight`), which is 1 when all who started have ended (inverse probability of censoring
weights, Robins and Rotnitzky, 1992).

`loss` is the quantile loss of an observation before it is learned: the pinball losses (Koenker and Bassett, 1978) of
the quantiles 0.5 and 0.9 of the logarithm, which are the prediction plus offsets tracked by stochastic approximation in
steps of `STEP`.  On the logarithm, so that long trajectories do not outvote the rest.

A `Blend` without signals uses the first `PLAIN` = 3 features alone; the tree keeps one of each and a gate between them.
"""

from __future__ import annotations

from math import exp, log
from typing import Final

from .linear import solve_symmetric

CENTRE: Final = 7.0
"""log of some 1,100 tokens: keeps the constant and the slope apart."""
PRIOR: Final[tuple[float, ...]] = (0.0, -0.3, 0.0, 0.0, 0.0, 0.0, 1.0)
"""Attained service is taken at 0.7 of its word: lengths within a task vary less than the tail of the prior says."""
PRIOR_WEIGHT: Final = 20.0
PLAIN_FEATURES: Final = 3
MEMORY: Final = 4000.0
"""Observations: some 1,300 trajectories."""
SOLVE_EVERY: Final = 96
"""Observations between two solutions (16 of the first so many): one takes some 20 us."""
SMEAR_PRIOR: Final = 25.0
SMEAR_MOST: Final = 6.0
STEP: Final = 0.05
_GROWTH: Final = 1.0 / (1.0 - 1.0 / MEMORY)
_LARGE: Final = 1e9


class Blend:
    """Weighted ridge regression on the first ``size`` features."""

    __slots__ = (
        "_actual",
        "_expected",
        "_matrix",
        "_scale",
        "_stale",
        "_vector",
        "count",
        "log_smear",
        "p50",
        "p90",
        "weights",
    )

    def __init__(self, size: int = len(PRIOR)) -> None:
        self.weights = list(PRIOR[:size])
        self.log_smear = 0.0
        self.count = 0
        """Observations, ever."""
        # Offsets of an exponential rest's quantiles from its mean.
        self.p50, self.p90 = -0.37, 0.83
        self._matrix = [[0.0] * size for _ in range(size)]
        self._vector = [0.0] * size
        self._actual = self._expected = 0.0
        self._scale = 1.0
        self._stale = 0

    def predict(self, features: list[float]) -> float:
        """Log of left / b, without the smear."""
        total = 0.0
        weights = self.weights
        for i in range(len(weights)):
            total += weights[i] * features[i]
        return total

    def loss(self, error: float) -> float:
        """Quantile loss of a prediction that is ``error`` below the target."""
        low, high = error - self.p50, error - self.p90
        self.p50 += STEP * (0.5 if low > 0.0 else -0.5)
        self.p90 += STEP * (0.9 if high > 0.0 else -0.1)
        return (0.5 * low if low > 0.0 else -0.5 * low) + (0.9 * high if high > 0.0 else -0.1 * high)

    def learn(self, features: list[float], target: float, error: float, weight: float) -> None:
        """One observation of log (left / b), of which the prediction was ``error`` short."""
        # Relative to the sum of both, so that one very long trajectory does not outvote hundreds.
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
            # Half of the features are 0 at any one time.
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

    def copied(self) -> Blend:
        """Another blend that has learned the same."""
        other = Blend(len(self.weights))
        other._matrix, other._vector = [row[:] for row in self._matrix], self._vector[:]
        other._actual, other._expected, other._scale, other._stale = (
            self._actual,
            self._expected,
            self._scale,
            self._stale,
        )
        # A solution replaces the weights; nothing changes them in place.
        other.weights, other.log_smear, other.count, other.p50, other.p90 = (
            self.weights,
            self.log_smear,
            self.count,
            self.p50,
            self.p90,
        )
        return other

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
