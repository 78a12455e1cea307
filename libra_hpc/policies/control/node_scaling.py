"""How a stage's time changes with its number of nodes: even division or the cost model, corrected by measured moves.

- A move between two splits -> a correction (measured over predicted) for exactly these splits.
- Any other split -> an exponent: time goes as nodes ** (e - 1). e = 0 is even division, e = 1 means no gain.
- e is a ridge estimate over the newest moves: sum(x y) / (sum(x x) + `RIDGE`), x = log(node ratio), y =
  log(correction).
- e stays within 0..1. A speed-up beyond even division is accepted only for the two splits that showed it.
- With a cost model, rollout learns what the model missed, and only from moves with waiting trainers on both sides.
"""

from __future__ import annotations

import math

from .rollout_by_nodes import RolloutByNodes
from .stage_times import Correction, Estimate, Split, learned_correction

RIDGE = 0.05
"""Prior weight: a move that doubles the nodes counts 0.9, one from six to seven nodes 0.3, since its y is mostly noise.
"""
MAX_MOVES = 8
"""Newest moves that count: older ones are of another workload."""


class NodeScaling:
    """Learns from moves and corrects predictions."""

    def __init__(self, rollout_model: RolloutByNodes | None = None) -> None:
        self._model = rollout_model
        self._pairs: dict[tuple[Split, Split], Correction] = {}
        self._train: list[tuple[float, float]] = []
        self._rollout: list[tuple[float, float]] = []

    def learn(self, before: Estimate, after: Estimate) -> None:
        """Learn from a move between two measured splits."""
        there, back = learned_correction(before, after), learned_correction(after, before)
        self._pairs[before.split, after.split], self._pairs[after.split, before.split] = there, back
        self._train = [*self._train, (math.log(after.split.train / before.split.train), math.log(there.train))][
            -MAX_MOVES:
        ]
        if self._model is not None and not (before.starved and after.starved):
            return
        missed = there.rollout / self._expected(before.split, after.split)
        self._rollout = [*self._rollout, (math.log(after.split.rollout / before.split.rollout), math.log(missed))][
            -MAX_MOVES:
        ]

    def clear_pairs(self) -> None:
        """The workload changed: drop the corrections of single splits; the exponents describe the machine and stay."""
        self._pairs = {}

    def correction(self, there: Split, to: Split) -> Correction:
        """Measured over ideal seconds when going from one split to another."""
        if there == to:
            return Correction()
        known = self._pairs.get((there, to))
        nodes = to.rollout / there.rollout
        rollout = self._expected(there, to) * nodes ** _exponent(self._rollout)
        # The exponent is relative to the cost model, so the product could say that fewer nodes are faster.
        rollout = max(rollout, nodes) if nodes < 1.0 else min(rollout, nodes)
        if known is not None:
            return known if self._model is None else Correction(known.train, rollout)
        return Correction((to.train / there.train) ** _exponent(self._train), rollout)

    def _expected(self, there: Split, to: Split) -> float:
        """Rollout seconds of the cost model over those of even division."""
        return 1.0 if self._model is None else self._model.ratio(there.rollout, to.rollout) * to.rollout / there.rollout


def _exponent(lessons: list[tuple[float, float]]) -> float:
    return min(1.0, max(0.0, sum(x * y for x, y in lessons) / (sum(x * x for x, _ in lessons) + RIDGE)))
