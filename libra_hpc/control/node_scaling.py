"""How a stage's time changes with its nodes: even division, or the cost model's ratio for rollout where there is one
(`RolloutByNodes`), and what moves taught beyond.

A judged move gives a correction for exactly its two splits (`model.correct`), which is kept and used when either is
considered again.  For other splits the lesson is carried over as an exponent: with e = log(correction) / log(nodes
after / nodes before), time goes as nodes ** (e - 1); e = 0 is as expected, e = 1 means nodes change nothing.  The
exponent of all lessons is a ridge estimate,

    e = sum(x y) / (sum(x x) + `PRIOR`),     x = log node ratio, y = log correction,

so that one move by a small ratio, whose y is mostly noise, says little: a doubling of nodes (x = 0.69) counts 0.9, six
to seven nodes 0.3.  It is kept within 0..1: superlinear and falling speed are believed only of the very splits they
were seen at.  With a cost model the lesson of rollout is what it missed, taken only from moves with waiting trainers on
both sides: the time of a rollout that is held up is an estimate itself; and pairs are kept for training only.
"""

from __future__ import annotations

import math

from libra_hpc.cost_models.rollout_by_nodes import RolloutByNodes

from .stage_times import Correction, Estimate, Split, learned_correction

PRIOR = 0.05
LESSONS = 8
"""Newest moves that count: older ones saw another workload."""


class NodeScaling:
    """Learns from moves, corrects predictions."""

    def __init__(self, rollout_model: RolloutByNodes | None = None) -> None:
        self._model = rollout_model
        self._pairs: dict[tuple[Split, Split], Correction] = {}
        self._train: list[tuple[float, float]] = []
        self._rollout: list[tuple[float, float]] = []

    def learn(self, before: Estimate, after: Estimate) -> None:
        """A move from one measured split to another."""
        there, back = learned_correction(before, after), learned_correction(after, before)
        self._pairs[before.split, after.split], self._pairs[after.split, before.split] = there, back
        self._train = [*self._train, (math.log(after.split.train / before.split.train), math.log(there.train))][
            -LESSONS:
        ]
        if self._model is not None and not (before.starved and after.starved):
            return
        missed = there.rollout / self._expected(before.split, after.split)
        self._rollout = [*self._rollout, (math.log(after.split.rollout / before.split.rollout), math.log(missed))][
            -LESSONS:
        ]

    def forget_pairs(self) -> None:
        """The workload changed: what two splits measured then no longer holds; the exponents, being about the
        machine, stay."""
        self._pairs = {}

    def correction(self, there: Split, to: Split) -> Correction:
        """Measured over ideal when going from one split to another."""
        if there == to:
            return Correction()
        known = self._pairs.get((there, to))
        rollout = self._expected(there, to) * (to.rollout / there.rollout) ** _exponent(self._rollout)
        if known is not None:
            return known if self._model is None else Correction(known.train, rollout)
        return Correction((to.train / there.train) ** _exponent(self._train), rollout)

    def _expected(self, there: Split, to: Split) -> float:
        """Rollout of the cost model over even division."""
        return 1.0 if self._model is None else self._model.ratio(there.rollout, to.rollout) * to.rollout / there.rollout


def _exponent(lessons: list[tuple[float, float]]) -> float:
    return min(1.0, max(0.0, sum(x * y for x, y in lessons) / (sum(x * x for x, _ in lessons) + PRIOR)))
