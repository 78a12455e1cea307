"""Robust non-negative least squares for a handful of coefficients, without numpy.

Step times have slow outliers (another process, a garbage collector). So residuals are *relative* and weighted by
Huber's rule. Negative coefficients would make a step faster by more work. With at most six columns, the exact
non-negative optimum is found by trying every subset.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from statistics import median

HUBER = 1.345
"""Robust standard deviations up to which a residual has full weight: 95 % efficient for normal noise."""
ROUNDS = 20
"""Most reweighting rounds; weights settle in fewer than ten."""
MAD_TO_SIGMA = 1.4826
SINGULAR = 1e-10
"""Smallest pivot of columns of unit length; below it two columns are equal."""


def robust_fit(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float]:
    """Non-negative coefficients ``c`` for which ``rows @ c`` approximates ``targets`` (> 0) in relative error.

    ``rows`` has at most six features per target. A column of zeros gets 0; one that combines others gets 0 or shares
    with them.
    """
    scaled = [[value / target for value in row] for row, target in zip(rows, targets, strict=True)]
    weights = [1.0] * len(scaled)
    coefficients: list[float] = []
    for _ in range(ROUNDS):
        before, coefficients = coefficients, non_negative(scaled, weights)
        residuals = [abs(_dot(row, coefficients) - 1) for row in scaled]
        limit = HUBER * max(MAD_TO_SIGMA * median(residuals), 1e-9)
        weights = [min(1.0, limit / residual) if residual else 1.0 for residual in residuals]
        if before and all(abs(a - b) <= 1e-6 * b for a, b in zip(before, coefficients, strict=True)):
            break
    return coefficients


def non_negative(rows: Sequence[Sequence[float]], weights: Sequence[float]) -> list[float]:
    """The ``c >= 0`` that minimises ``sum(w * (rows @ c - 1)**2)``: the best unconstrained optimum over subsets of
    columns.
    """
    gram, moment = _normal_equations(rows, weights)
    width = len(moment)
    scale = [gram[i][i] ** 0.5 for i in range(width)]
    columns = [i for i in range(width) if scale[i] > 0]
    best, best_gain = [0.0] * width, 0.0
    for size in range(1, len(columns) + 1):
        for subset in combinations(columns, size):
            matrix = [[gram[i][j] / (scale[i] * scale[j]) for j in subset] for i in subset]
            solution = solve(matrix, [moment[i] / scale[i] for i in subset])
            if solution is None or min(solution) < 0:
                continue
            gain = sum(x * moment[i] / scale[i] for x, i in zip(solution, subset, strict=True))
            if gain > best_gain * (1 + 1e-12):
                best, best_gain = [0.0] * width, gain
                for x, i in zip(solution, subset, strict=True):
                    best[i] = x / scale[i]
    return best


def _normal_equations(
    rows: Sequence[Sequence[float]], weights: Sequence[float]
) -> tuple[list[list[float]], list[float]]:
    """``rows^T w rows`` and ``rows^T w 1``."""
    width = len(rows[0])
    gram = [[0.0] * width for _ in range(width)]
    moment = [0.0] * width
    for row, weight in zip(rows, weights, strict=True):
        for i in range(width):
            scaled = weight * row[i]
            moment[i] += scaled
            for j in range(i + 1):
                gram[i][j] += scaled * row[j]
    for i in range(width):
        for j in range(i):
            gram[j][i] = gram[i][j]
    return gram, moment


def solve(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float] | None:
    """Solve a small linear system by elimination with pivoting; None when it is singular."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for column in range(size):
        pivot = max(range(column, size), key=lambda i: abs(rows[i][column]))
        if abs(rows[pivot][column]) < SINGULAR:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for other in range(column + 1, size):
            factor = rows[other][column] / rows[column][column]
            rows[other] = [a - factor * b for a, b in zip(rows[other], rows[column], strict=True)]
    out = [0.0] * size
    for row in reversed(range(size)):
        known = sum(rows[row][j] * out[j] for j in range(row + 1, size))
        out[row] = (rows[row][size] - known) / rows[row][row]
    return out


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))
