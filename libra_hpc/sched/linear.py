"""The solution of a small symmetric positive definite system: the regressions of the scheduler have three to seven unknowns."""

from __future__ import annotations

from collections.abc import Sequence


def solve_symmetric(matrix: Sequence[Sequence[float]], target: Sequence[float]) -> list[float]:
    """x with A x = target; only the lower triangle of A is read.

    Gaussian elimination.  A is positive definite (a ridge makes it so), hence needs no pivoting, and symmetric, hence its upper triangle is enough.
    """
    size = len(target)
    # Row i holds columns i .. size - 1.
    upper = [[matrix[j][i] for j in range(i, size)] for i in range(size)]
    right = list(target)
    for i, pivot in enumerate(upper):
        for k in range(i + 1, size):
            factor = pivot[k - i] / pivot[0]
            # Many features never occur in a task.
            if factor:
                row = upper[k]
                for j in range(size - k):
                    row[j] -= factor * pivot[k - i + j]
                right[k] -= factor * right[i]
    for i in reversed(range(size)):
        row = upper[i]
        for j in range(1, size - i):
            right[i] -= row[j] * right[i + j]
        right[i] /= row[0]
    return right
