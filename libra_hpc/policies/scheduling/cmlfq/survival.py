"""Remaining tokens by attained service: a survival table of total lengths on a logarithmic grid.

Each cell counts the trajectories that reached it and those that ended in it (Kaplan and Meier).  Running trajectories
count too, because the first to finish are short.  The prior is a Pareto tail of index 2: after a tokens, a more.

With T the total and e_c the lower edge of cell c, one pass gives by cell:

- ``rest``: E[T - e_c | T > e_c]; ``log_rest``: its logarithm.
- ``log_total``: E[log T | T > e_c]; ``below``: P(T < e_c).
- ``weight``: inverse of the chance that a trajectory which ends in c has ended by now.
- ``known``: of the trajectories that reached c, the share that has ended by now.
"""

from __future__ import annotations

from itertools import pairwise
from math import log
from typing import Final

HALF_LIFE: Final = 16.0
"""Weight versions until evidence counts half: within one epoch of a small data set."""
PER_OCTAVE: Final = 4
"""Cells per doubling."""
FIRST: Final = 16
"""Tokens: lower edge of the first cell, which counts shorter lengths too."""
CELLS: Final = 64
"""16 octaves from `FIRST`: up to a million tokens."""
PRIOR_RISK: Final = 2.0
"""Imaginary trajectories per cell."""
PRIOR_TOKENS: Final = 512.0
"""Tokens from which they end: a few agentic turns."""
REBUILD: Final = 16
"""Ends between two rebuilds (20 us); later a 64th of all ends, at most `REBUILD_MOST`."""
REBUILD_MOST: Final = 64
MOST_WEIGHT: Final = 8.0
"""Bound of ``weight``, so that one early end does not dominate."""
_PER_LOG: Final = PER_OCTAVE / log(2.0)
_FIRST_LOG: Final = log(FIRST) * _PER_LOG - 1e-9
"""Reduced, so that rounding never moves an edge into the cell below."""
_EDGES: Final = [FIRST * 2.0 ** (c / PER_OCTAVE) for c in range(CELLS + 1)]
_WIDTHS: Final = [high - low for low, high in pairwise(_EDGES)]
_LOG_MIDDLES: Final = [log(low + 0.5 * width) for low, width in zip(_EDGES, _WIDTHS, strict=False)]
_PRIOR: Final = [
    PRIOR_RISK * (1.0 - 4.0 ** (-1.0 / PER_OCTAVE)) if _EDGES[c] >= PRIOR_TOKENS else 0.0 for c in range(CELLS)
]


def cell_of(tokens: float) -> int:
    """Index of the cell of a number of tokens."""
    if tokens < FIRST:
        return 0
    cell = int(log(tokens) * _PER_LOG - _FIRST_LOG)
    return cell if cell < CELLS else CELLS - 1


class Survival:
    """Counts of one set of trajectories, and what follows from them by cell."""

    def __init__(self) -> None:
        self._risk = [0.0] * CELLS
        self._deaths = [0.0] * CELLS
        self._stale = 0
        self._version = 0
        self.ends = 0
        """Total number of ended trajectories."""
        self.started = 0.0
        """Decayed number of started trajectories."""
        self.rest: list[float] = []
        """Expected tokens left; see the module for all six lists."""
        self.log_rest: list[float] = []
        self.weight: list[float] = []
        self.known: list[float] = []
        self.log_total: list[float] = []
        self.below: list[float] = []
        self._rebuild()

    def passed(self, first: int, last: int) -> None:
        """A running trajectory has passed cells ``first`` to ``last - 1``."""
        risk = self._risk
        for cell in range(first, last):
            risk[cell] += 1.0

    def ended(self, cell: int, version: int) -> None:
        """A trajectory ended in ``cell``; `passed` has counted the cells before it."""
        if version > self._version:
            decay = 0.5 ** ((version - self._version) / HALF_LIFE)
            self._version = version
            self.started *= decay
            self._risk = [decay * r for r in self._risk]
            self._deaths = [decay * d for d in self._deaths]
        self._risk[cell] += 1.0
        self._deaths[cell] += 1.0
        self.ends += 1
        self._stale += 1
        if self._stale >= min(REBUILD_MOST, max(REBUILD, self.ends // REBUILD_MOST)) or self.ends < REBUILD:
            self._rebuild()

    def _rebuild(self) -> None:
        self._stale = 0
        deaths, risks = self._deaths, self._risk
        hazards = [(deaths[c] + _PRIOR[c]) / (risks[c] + PRIOR_RISK) for c in range(CELLS)]
        rest, logs, known, below, weight = [0.0] * CELLS, [0.0] * CELLS, [0.0] * CELLS, [0.0] * CELLS, [0.0] * CELLS
        # Beyond the table: a Pareto tail of index 2.
        g, log_t, seen = _EDGES[CELLS], log(_EDGES[CELLS]) + 0.5, 0.0
        for c in range(CELLS - 1, -1, -1):
            hazard, width = hazards[c], _WIDTHS[c]
            rest[c] = g = (1.0 - hazard) * (width + g) + hazard * 0.5 * width
            logs[c] = log_t = (1.0 - hazard) * log_t + hazard * _LOG_MIDDLES[c]
            seen += deaths[c]
            reached = risks[c - 1] - deaths[c - 1] if c else self.started
            share = seen / (reached + PRIOR_RISK)
            known[c] = share if share < 1.0 else 1.0
        alive, ends = 1.0, seen
        for c in range(CELLS):
            below[c] = 1.0 - alive
            inverse = ends * alive / (risks[c] + PRIOR_RISK)
            weight[c] = inverse if inverse < MOST_WEIGHT else MOST_WEIGHT
            alive *= 1.0 - hazards[c]
        self.rest, self.log_total, self.below, self.weight, self.known = rest, logs, below, weight, known
        self.log_rest = [log(value) for value in rest]
