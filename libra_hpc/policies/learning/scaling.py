"""Reward against compute as a sigmoid (ScaleRL, arXiv 2510.13786): R(C) = R0 + (A - R0) / (1 + (Cmid / C)^B).

- Given B and Cmid it is linear in R0 and A, so least squares has a closed form; B and Cmid are searched on a grid that
  narrows. No start values, no local minima between grid points.
- Fewer than `LEAST` points, or a curve that has not bent by the end of the data -> no fit, with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from typing import NamedTuple

LEAST = 20
"""Points: with four parameters and the noise of steps, half of them fit anything."""
MOST = 200
"""Points of a fit; neighbours of a longer curve are averaged."""
STEEPEST = 10.0
"""Largest B: a jump within a quarter of Cmid. The smallest is its inverse, a line in log C."""
GRID, ROUNDS = 20, 6
"""Values of B and Cmid of a round, and rounds, each over two cells of the one before: to a thousandth."""


class Sigmoid(NamedTuple):
    initial: float
    """R0."""
    asymptote: float
    """A."""
    exponent: float
    """B."""
    midpoint: float
    """Cmid, in the unit of the compute."""

    def at(self, compute: float) -> float:
        return self.initial + (self.asymptote - self.initial) * _share(compute, self.exponent, self.midpoint)


def fit_sigmoid(compute: Sequence[float], rewards: Sequence[float]) -> Sigmoid | str:
    """The least-squares sigmoid of points in order of ``compute`` (> 0), or why there is none."""
    points = [(c, r) for c, r in zip(compute, rewards, strict=True) if c > 0.0]
    if len(points) < LEAST:
        return f"{len(points)} points, of {LEAST} that are needed"
    each = -(-len(points) // MOST)
    parts = [points[at : at + each] for at in range(0, len(points), each)]
    means = [(sum(c for c, _ in part) / len(part), sum(r for _, r in part) / len(part)) for part in parts]
    first, last = means[0][0], means[-1][0]
    # The end of the search for Cmid is beyond the data, so that a curve without a bend differs from one with.
    slow, shift = [-log(STEEPEST), log(STEEPEST)], [log(first), log(last) + log(STEEPEST)]
    best = (float("inf"), 0.0, 0.0)
    for _ in range(ROUNDS):
        cells = [(high - low) / GRID for low, high in (slow, shift)]
        grid = [
            (slow[0] + row * cells[0], shift[0] + column * cells[1])
            for row in range(GRID + 1)
            for column in range(GRID + 1)
        ]
        best = min(best, *((_linear(means, exp(b), exp(mid))[0], b, mid) for b, mid in grid))
        slow, shift = [best[1] - cells[0], best[1] + cells[0]], [best[2] - cells[1], best[2] + cells[1]]
    exponent, midpoint = exp(best[1]), exp(best[2])
    if midpoint > last:
        return "the curve has not bent by its end, so that no plateau is known"
    _, initial, height = _linear(means, exponent, midpoint)
    return Sigmoid(initial, initial + height, exponent, midpoint)


def _share(compute: float, exponent: float, midpoint: float) -> float:
    return 1.0 / (1.0 + (midpoint / compute) ** exponent)


def _linear(points: Sequence[tuple[float, float]], exponent: float, midpoint: float) -> tuple[float, float, float]:
    """Squared error, R0 and A - R0 of the best line over the sigmoid's share."""
    shares = [_share(compute, exponent, midpoint) for compute, _ in points]
    count = len(points)
    mean_share, mean = sum(shares) / count, sum(reward for _, reward in points) / count
    spread = sum((share - mean_share) ** 2 for share in shares)
    both = sum((share - mean_share) * (reward - mean) for share, (_, reward) in zip(shares, points, strict=True))
    height = both / spread if spread > 1e-12 else 0.0
    initial = mean - height * mean_share
    error = sum((initial + height * share - reward) ** 2 for share, (_, reward) in zip(shares, points, strict=True))
    return error, initial, height
