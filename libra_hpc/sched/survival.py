"""Attained service: what a trajectory that already generated so much has left, from a survival table.

Totals are spread over many orders of magnitude, so the table has `PER_OCTAVE` = 4 cells per doubling, from `FIRST` = 16
tokens over `CELLS` = 64 cells (16 octaves, up to a million tokens).  Per cell it counts how many trajectories got
through it or ended in it (*at risk*) and how many ended (the estimator of Kaplan and Meier on a grid).  Trajectories
that still run count in every cell they have left behind.  That matters: the first to finish of a batch are its short
ones, and means over finished trajectories alone would start far too low.

Each cell also has `PRIOR_RISK` = 2 imaginary trajectories, which end with the hazard of a Pareto tail of index 2 from
`PRIOR_TOKENS` = 512 tokens (a few agentic turns) on: after a tokens, a more are to be expected (the longer it ran, the
longer it will).  They decide alone where nobody has been yet.

From the hazards follow, for every cell c with lower edge e_c and by one pass from the top: G[c] = E[T - e_c | T > e_c],
the expected rest; L[c] = E[log T | T > e_c]; W[c] = P(T < e_c); V[c], the inverse of the chance that one who ends in c
has ended by now (expected over counted share of ends in c); and K[c], the share of those who got to c that have ended
by now, which says how much of what comes after c has been seen at all.  The pass takes some 20 us; it is done after
every `REBUILD` = 16 ends; when there are thousands, a 64th part of them, at most `REBUILD_MOST` = 64.  Counts halve per
`HALF_LIFE` weight versions.
"""

from __future__ import annotations

from itertools import pairwise
from math import log
from typing import Final

HALF_LIFE: Final = 16.0
"""Weight versions after which evidence counts half: a table forgets within an epoch of a small data set."""
PER_OCTAVE: Final = 4
FIRST: Final = 16
CELLS: Final = 64
PRIOR_RISK: Final = 2.0
PRIOR_TOKENS: Final = 512.0
REBUILD: Final = 16
REBUILD_MOST: Final = 64
MOST_WEIGHT: Final = 8.0
_PER_LOG: Final = PER_OCTAVE / log(2.0)
_FIRST_LOG: Final = log(FIRST) * _PER_LOG - 1e-9
"""An edge belongs to the cell above it, whatever the rounding."""
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
    """See the module."""

    __slots__ = (
        "_deaths",
        "_risk",
        "_stale",
        "_version",
        "below",
        "ends",
        "known",
        "log_rest",
        "log_total",
        "rest",
        "started",
        "weight",
    )

    def __init__(self) -> None:
        self._risk = [0.0] * CELLS
        self._deaths = [0.0] * CELLS
        self._stale = 0
        self._version = 0
        self.ends = 0
        """Trajectories that ended, ever."""
        self.started = 0.0
        """Decayed number of trajectories that began."""
        self.rest: list[float] = []
        """G, tokens."""
        self.log_rest: list[float] = []
        self.weight: list[float] = []
        """V, at most `MOST_WEIGHT`."""
        self.known: list[float] = []
        """K, 0..1."""
        self.log_total: list[float] = []
        """L, natural logarithm."""
        self.below: list[float] = []
        """W, 0..1."""
        self._rebuild()

    def passed(self, first: int, last: int) -> None:
        """A running trajectory has left cells ``first`` .. ``last - 1`` behind."""
        risk = self._risk
        for cell in range(first, last):
            risk[cell] += 1.0

    def ended(self, cell: int, version: int) -> None:
        """A trajectory ended in ``cell``, which it had not left behind; cells before it are told by `passed`."""
        if version > self._version:
            keep = 0.5 ** ((version - self._version) / HALF_LIFE)
            self._version = version
            self.started *= keep
            self._risk = [keep * r for r in self._risk]
            self._deaths = [keep * d for d in self._deaths]
        self._risk[cell] += 1.0
        self._deaths[cell] += 1.0
        self.ends += 1
        self._stale += 1
        if self._stale >= min(REBUILD_MOST, max(REBUILD, self.ends // REBUILD_MOST)) or self.ends < REBUILD:
            self._rebuild()

    def copied(self) -> Survival:
        """Another table of the same counts."""
        other = Survival()
        other._risk, other._deaths = self._risk[:], self._deaths[:]
        other._stale, other._version, other.ends, other.started = self._stale, self._version, self.ends, self.started
        # A rebuild replaces these; nothing changes them in place.
        other.rest, other.log_rest, other.log_total = self.rest, self.log_rest, self.log_total
        other.below, other.weight, other.known = self.below, self.weight, self.known
        return other

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
