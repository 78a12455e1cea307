"""Robust non-negative least squares for a handful of coefficients.

Step times have slow outliers (another process, a garbage collector). So residuals are *relative* and weighted by
Huber's rule. Negative coefficients would make a step faster by more work. With at most six columns, the exact
non-negative optimum is found by trying every subset.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import numpy.typing as npt

HUBER = 1.345
"""Robust standard deviations up to which a residual has full weight: 95 % efficient for normal noise."""
ROUNDS = 20
"""Most reweighting rounds; weights settle in fewer than ten."""
MAD_TO_SIGMA = 1.4826
SINGULAR = 1e-10
"""Smallest singular value of columns of unit length; below it two columns are equal, and share."""


def robust_fit(rows: npt.ArrayLike, targets: npt.ArrayLike) -> list[float]:
    """Non-negative coefficients ``c`` for which ``rows @ c`` approximates ``targets`` (> 0) in relative error.

    ``rows`` has at most six features per target. A column of zeros gets 0.
    """
    scaled = np.asarray(rows, float) / np.asarray(targets, float)[:, None]
    weights, found = np.ones(len(scaled)), np.zeros(scaled.shape[1])
    for _ in range(ROUNDS):
        before, found = found, np.array(non_negative(scaled, weights))
        residuals = np.abs(scaled @ found - 1)
        limit = HUBER * max(MAD_TO_SIGMA * float(np.median(residuals)), 1e-9)
        weights = limit / np.maximum(residuals, limit)
        if np.allclose(found, before, rtol=1e-6, atol=0):
            break
    return [float(value) for value in found]


def non_negative(rows: npt.ArrayLike, weights: npt.ArrayLike) -> list[float]:
    """The ``c >= 0`` that minimises ``sum(w * (rows @ c - 1)**2)``: the best unconstrained optimum over subsets of
    columns.
    """
    matrix = np.asarray(rows, float)
    weighted = matrix.T * np.asarray(weights, float)
    gram, moment = weighted @ matrix, weighted.sum(axis=1)
    scale = np.sqrt(gram.diagonal()) + (gram.diagonal() == 0)
    gram, moment = gram / np.outer(scale, scale), moment / scale
    best = np.zeros(len(moment))
    for used in product((0, 1), repeat=len(moment)):
        at = np.flatnonzero(used)
        one = np.zeros(len(moment))
        one[at] = np.linalg.lstsq(gram[np.ix_(at, at)], moment[at], rcond=SINGULAR)[0]
        if one.min() >= 0 and one @ moment > best @ moment * (1 + 1e-12):
            best = one
    return [float(value) for value in best / scale]
