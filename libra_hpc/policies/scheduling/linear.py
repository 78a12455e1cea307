"""Solver for small symmetric positive definite systems: regressions with three to seven unknowns."""

from __future__ import annotations


def solve_symmetric(matrix: list[list[float]], target: list[float]) -> list[float]:
    """x with A x = target, by Gaussian elimination; only the lower triangle of A is read.

    A must be symmetric and positive definite, as a ridge makes it: no pivoting is needed.
    """
    size = len(target)
    # Row i holds the columns from i on.
    upper = [[matrix[j][i] for j in range(i, size)] for i in range(size)]
    right = target[:]
    for i in range(size):
        pivot = upper[i]
        first = pivot[0]
        for k in range(i + 1, size):
            factor = pivot[k - i] / first
            # Often zero: many features never occur in a task.
            if factor != 0.0:
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
