"""Time-sharing: with a staleness bound of 0, hybrid nodes serve both stages of every step.

`TimeSharing.decide` compares it with the best split, both from one estimate:

- Predicted: rollout with all nodes that can roll out + training with all that can train + one pair of switches.
- Gain beyond measurement error and ``min_gain`` -> ``time_share``.
- Batches take other times than predicted -> the difference corrects the next prediction, until the workload changes.
- No gain any more -> ``split``: each hybrid node stays in a stage of the best split.

`moves_within_step` moves the nodes of a run in time-sharing:

- A step is committed -> the nodes that trained it go back.
- The rest of a batch fits on fewer nodes (`TAIL`) -> those with the fewest turns go to training, one always stays.
- The batch is complete -> all others follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise, product
from math import ceil
from statistics import median
from typing import NamedTuple

from libra_hpc.config.rollout import PlannerSection
from libra_hpc.protocol.plan import NodeFact, PlanDecision, PlanSnapshot

from .hysteresis import Direction, Hysteresis
from .node_scaling import NodeScaling
from .stage_times import MIN_STEPS, ONE_SIDED_95, Estimate, Split, predict

TAIL = 8
"""Unfinished trajectories for each engine that stays: an engine runs eight about as fast as one. Half: nodes switch
later; double: the tail slows."""
BOTH = "both"
"""`NodeFact.role` of a node in time-sharing."""
DIRECTIONS: tuple[Direction, ...] = ("to_train", "to_rollout")
ERRORS = tuple(product((-ONE_SIDED_95, 0.0, ONE_SIDED_95), repeat=2))
"""Standard errors by which either stage may be off."""


class Moves(NamedTuple):
    """Ranks to move now."""

    to_train: tuple[int, ...] = ()
    to_rollout: tuple[int, ...] = ()
    reason: str = ""


class Rest(NamedTuple):
    """What is left of the present batch."""

    complete: bool
    """Whether all of it went to training."""
    admitted: bool
    """Whether all its groups were admitted."""
    trajectories: int
    """Unfinished."""
    running: Mapping[int, int]
    """Turns in flight of each rank."""
    engines: int
    """Of a node."""


def moves_within_step(nodes: Sequence[NodeFact], rest: Rest, back: frozenset[int]) -> Moves:
    """Moves of hybrid nodes now; those in ``back`` trained the last step, or came too late for it."""
    hybrid = [node for node in nodes if node.component == "hybrid"]
    returning = tuple(n.rank for n in hybrid if n.role == "train" and n.rank in back)
    if returning:
        return Moves(to_rollout=returning, reason="the step is committed")
    units: dict[int, list[NodeFact]] = {}
    for node in hybrid:
        units.setdefault(node.rank if node.unit < 0 else node.unit, []).append(node)
    ready = [unit for unit in units.values() if all(node.role == "rollout" for node in unit)]
    ready.sort(key=lambda unit: sum(rest.running.get(node.rank, 0) for node in unit))
    here = sum(node.role == "rollout" for node in nodes)
    fewest, reason = 1, "the batch is complete"
    if not rest.complete:
        if not (rest.admitted and rest.trajectories):
            return Moves()
        fewest = ceil(rest.trajectories / (TAIL * rest.engines))
        reason = f"{fewest} nodes are enough for the last {rest.trajectories} trajectories"
    leaving: list[int] = []
    for unit in ready:
        if here - len(leaving) - len(unit) >= fewest:
            leaving += (node.rank for node in unit)
    return Moves(to_train=tuple(leaving), reason=reason)


class TimeSharing:
    """Whether hybrid nodes share their time; the present state is the nodes' role in the snapshot."""

    def __init__(self, settings: PlannerSection, scaling: NodeScaling, hysteresis: Hysteresis) -> None:
        self._settings, self._scaling, self._hysteresis = settings, scaling, hysteresis
        self._before: Estimate | None = None
        """What time-sharing was decided from, until there is an estimate of steps in it."""
        self._since = 0.0
        self._extra: dict[bool, float] = {}
        """Measured less predicted seconds of a batch, with (True) and without time-sharing."""

    def reset(self) -> None:
        """The workload changed."""
        self._extra = {}

    def decide(self, snapshot: PlanSnapshot, estimate: Estimate | str, now: float) -> PlanDecision | None:
        """``time_share``, ``split``, or hold while nodes share; None where the stages have nodes of their own."""
        sharing = any(node.role == BOTH for node in snapshot.nodes)
        wanted = snapshot.eta == 0 and self._settings.time_sharing == "auto"
        if not sharing and not wanted:
            return None
        known = self._before if isinstance(estimate, str) and sharing else estimate
        units, both = _units(snapshot), _both(snapshot)
        splits = list(_splits(snapshot, units))
        if known is None or isinstance(known, str) or not splits:
            return PlanDecision("hold", -1, f"hold: time-sharing, {estimate}", {}) if sharing else None
        switches = sum(self._hysteresis.switch_cost(direction, snapshot) for direction in DIRECTIONS)
        self._learn(snapshot, known, both if sharing else known.split, switches if sharing else 0.0, sharing)
        split = min(splits, key=lambda one: self._at(known, one))
        alone = self._extra.get(False, 0.0)
        more = self._extra.get(True, alone) + switches
        shared, here = self._at(known, both) + more, self._at(known, split) + alone
        saved = here - shared
        if not sharing:
            saved = min(self._at(known, split, *e) + alone - self._at(known, both, *e) - more for e in ERRORS)
        numbers = {"shared_s": shared, "split_s": here, "switches_s": switches, "saved_s": saved}
        what = (
            f"a batch takes {shared:.1f} s where {sum(map(len, units))} hybrid nodes share their time, with"
            f" {switches:.1f} s of switches, and {here:.1f} s with {split.train} training and {split.rollout} rollout"
            " nodes"
        )
        ranks = tuple(node.rank for unit in units for node in unit)
        if sharing and saved > 0.0 and wanted:
            return PlanDecision("hold", -1, f"hold: time-sharing, {what}", numbers)
        if not sharing and saved <= self._settings.min_gain * here:
            return None
        self._before, self._since = known, now
        if sharing:
            return PlanDecision("split", -1, f"split: {what}", numbers, ranks[: split.train - _core(snapshot, "train")])
        return PlanDecision("time_share", -1, f"time_share: {what}", numbers, ranks)

    def _at(self, known: Estimate, to: Split, train_shift: float = 0.0, rollout_shift: float = 0.0) -> float:
        """Predicted seconds of a batch, without what no prediction has."""
        return predict(known, to, self._scaling.correction(known.split, to), train_shift, rollout_shift).batch

    def _learn(self, snapshot: PlanSnapshot, known: Estimate, at: Split, switches: float, sharing: bool) -> None:
        """Compare the seconds between commits with the prediction, once there are enough."""
        steps = [step for step in snapshot.steps if step.at > self._since][sharing:]
        gaps = [after.at - before.at for before, after in pairwise(steps) if before.nodes == after.nodes == at.train]
        if len(gaps) >= MIN_STEPS - 1:
            self._extra[sharing] = median(gaps[1 - MIN_STEPS :]) - self._at(known, at) - switches


def _units(snapshot: PlanSnapshot) -> list[list[NodeFact]]:
    """Hybrid nodes that can work, with those that they move with."""
    units: dict[int, list[NodeFact]] = {}
    for node in snapshot.nodes:
        if node.component == "hybrid" and node.role in ("train", "rollout", BOTH):
            units.setdefault(node.rank if node.unit < 0 else node.unit, []).append(node)
    return list(units.values())


def _core(snapshot: PlanSnapshot, stage: str) -> int:
    return sum(node.component != "hybrid" and node.role == stage for node in snapshot.nodes)


def _both(snapshot: PlanSnapshot) -> Split:
    hybrid = sum(map(len, _units(snapshot)))
    return Split(_core(snapshot, "train") + hybrid, _core(snapshot, "rollout") + hybrid)


def _splits(snapshot: PlanSnapshot, units: list[list[NodeFact]]) -> Iterator[Split]:
    nodes = sum(map(len, units))
    for trains in accumulate(map(len, units), initial=0):
        split = Split(_core(snapshot, "train") + trains, _core(snapshot, "rollout") + nodes - trains)
        if units and split.train >= 1 and split.rollout >= 1:
            yield split
