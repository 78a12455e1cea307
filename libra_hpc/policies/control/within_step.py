"""Time-sharing: with a staleness bound of 0, hybrid nodes serve both stages of every step, and train nodes that share.

`TimeSharing.decide` compares it with the best split, both from one estimate:

- Predicted: rollout with all nodes that can + training with all that can + one pair of switches. Nothing is trained
  beside rollout: the gradients of a complete group are lost when nodes join.
- Gain beyond measurement error and ``min_gain`` -> ``time_share``.
- Batches take other times than predicted -> the difference corrects the next prediction, until the workload changes.
- No gain any more -> ``split``: each hybrid node stays in a stage of the best split, train nodes in theirs.

`moves_within_step` moves the nodes:

- A step is committed -> the nodes that trained it go back; the core once no other one is on its way to it.
- The rest of a batch fits on fewer nodes (`TAIL`) -> the core goes to training, then nodes with few turns; one stays.
- The batch is complete -> all others follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise, product
from math import ceil
from statistics import median
from typing import NamedTuple

from libra_hpc.config.rollout import PlannerSection
from libra_hpc.protocol.plan import NodeFact, PlanDecision, PlanSnapshot

from .rollout_by_nodes import RolloutByNodes
from .stage_times import MIN_STEPS, ONE_SIDED_95, Correction, Estimate, Split, predict
from .switch_cost import Direction, switch_cost

TAIL = 8
"""Unfinished trajectories for each engine that stays: an engine runs eight about as fast as one. Half: nodes switch
later; double: the tail slows."""
BOTH = "both"
"""`NodeFact.role` of a node in time-sharing."""
ROUNDS = 2
"""Switches of each node before their price alone ends time-sharing."""
_Units = list[list[NodeFact]]
DIRECTIONS: tuple[Direction, ...] = ("to_train", "to_rollout")
ERRORS = tuple(product((-ONE_SIDED_95, 0.0, ONE_SIDED_95), repeat=2))
"""Standard errors by which either stage may be off."""


class StepMoves(NamedTuple):
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
    fits: int
    """Trajectories that a node runs about as fast as one."""

    @property
    def ends(self) -> bool:
        """Whether nothing is added to it."""
        return self.complete or (self.admitted and self.trajectories > 0)


def moves_within_step(nodes: Sequence[NodeFact], rest: Rest, back: frozenset[int]) -> StepMoves:
    """Moves of nodes in time-sharing now; those in ``back`` trained the last step, or came too late for it."""
    if returning := _returning(nodes, back):
        return StepMoves(to_rollout=returning, reason="the step is committed")
    if not rest.ends:
        return StepMoves()
    fewest = 1 if rest.complete else ceil(rest.trajectories / rest.fits)
    few = f"{fewest} rollout nodes are enough for the last {rest.trajectories} trajectories"
    leaving = _leaving(nodes, fewest, rest.running)
    return StepMoves(to_train=leaving, reason="the batch is complete" if rest.complete else few)


def _returning(nodes: Sequence[NodeFact], back: frozenset[int]) -> tuple[int, ...]:
    core = _sharing_core(nodes)
    ranks = tuple(node.rank for unit in _units(nodes, "train") for node in unit if node.rank in back)
    ready = core and all(node.role == "train" and node.rank in back for node in core)
    return ranks + _ranks([core]) if ready and not _units(nodes, "to_train") else ranks


def _leaving(nodes: Sequence[NodeFact], stay: int, running: Mapping[int, int]) -> tuple[int, ...]:
    """Return the nodes that go to training where ``stay`` are enough."""
    core = [node for node in _sharing_core(nodes) if node.role == "rollout"]
    units = sorted(_units(nodes, "rollout"), key=lambda unit: sum(running.get(node.rank, 0) for node in unit))
    most, leaving = sum(node.role == "rollout" for node in nodes) - stay, list[int]()
    if len(core) > most:
        return ()  # nobody trains without it
    for unit in [core, *units]:
        if len(leaving) + len(unit) <= most:
            leaving += (node.rank for node in unit)
    return tuple(leaving)


class _Compared(NamedTuple):
    """Seconds of a batch in time-sharing (``shared``) and at the best split."""

    shared: float
    split: Split
    alone: float
    switches: float
    sure: float
    """Seconds saved at the unfavourable end of the measurement error."""

    def what(self, nodes: int) -> str:
        return (
            f"a batch takes {self.shared:.1f} s where {nodes} nodes share their time, with {self.switches:.1f} s"
            f" of switches, and {self.alone:.1f} s with {self.split.train} training and {self.split.rollout} rollout"
            " nodes"
        )

    def numbers(self) -> dict[str, float]:
        return {"shared_s": self.shared, "split_s": self.alone, "switches_s": self.switches, "saved_s": self.sure}


class TimeSharing:
    """Whether hybrid nodes share their time; the present state is the nodes' role in the snapshot."""

    def __init__(self, settings: PlannerSection, rollout_model: RolloutByNodes | None) -> None:
        self._settings, self._model = settings, rollout_model
        self._before: Estimate | None = None
        """What time-sharing was decided from, until there is an estimate of steps in it."""
        self._since = 0.0
        self._extra: dict[bool, float] = {}
        """Measured less predicted seconds of a batch, with (True) and without time-sharing."""
        self._ahead = 0.0
        """Share of training beside rollout without time-sharing."""

    def reset(self) -> None:
        """The workload changed."""
        self._extra = {}

    def decide(self, snapshot: PlanSnapshot, estimate: Estimate | str, now: float) -> PlanDecision | None:
        """``time_share``, ``split``, or hold while nodes share; None where the stages have nodes of their own."""
        wanted = snapshot.eta == 0 and self._settings.time_sharing == "auto"
        units = _units(snapshot.nodes, BOTH)
        if any(node.role == BOTH for node in snapshot.nodes):
            known = self._before if isinstance(estimate, str) else estimate
            found = None if known is None else self._compare(snapshot, known, units, sharing=True)
            if known is None or found is None:
                return PlanDecision("hold", -1, f"hold: time-sharing, {estimate}", {})
            return self._go_on(snapshot, found, units, now) if wanted else self._end(snapshot, found, units, now)
        units = _units(snapshot.nodes, "train", "rollout")
        if not wanted or isinstance(estimate, str) or not (units or _sharing_core(snapshot.nodes)):
            return None
        found = self._compare(snapshot, estimate, units, sharing=False)
        if found is None or found.sure <= self._settings.min_gain * found.alone:
            return None
        self._before, self._since, ranks = estimate, now, _ranks((*units, _sharing_core(snapshot.nodes)))
        return PlanDecision("time_share", -1, f"time_share: {found.what(len(ranks))}", found.numbers(), ranks)

    def _go_on(self, snapshot: PlanSnapshot, found: _Compared, units: _Units, now: float) -> PlanDecision:
        trained = [s for s in snapshot.switches if s.at > self._since and s.direction == "to_train"]
        # The first round starts training processes, which later ones only wake.
        shared = len(_ranks((*units, _sharing_core(snapshot.nodes))))
        known = True in self._extra or len(trained) >= ROUNDS * shared
        if known and found.shared >= found.alone:
            return self._end(snapshot, found, units, now)
        reason = f"hold: time-sharing, {found.what(shared)}"
        return PlanDecision("hold", -1, reason, found.numbers())

    def _end(self, snapshot: PlanSnapshot, found: _Compared, units: _Units, now: float) -> PlanDecision:
        self._since, ranks = now, _ranks(units)
        trains, core = ranks[: found.split.train - _core(snapshot).train], _sharing_core(snapshot.nodes)
        what = found.what(len(ranks) + len(core))
        return PlanDecision("split", -1, f"split: {what}", found.numbers(), (*trains, *_ranks([core])))

    def _compare(self, snapshot: PlanSnapshot, known: Estimate, units: _Units, *, sharing: bool) -> _Compared | None:
        """Both ways; None without a split to compare with."""
        core, hybrid = _core(snapshot), len(_ranks(units))
        both = Split(core.train + hybrid, core.rollout + hybrid + len(_sharing_core(snapshot.nodes)))
        trains = accumulate(map(len, units), initial=0)
        splits = [Split(core.train + n, core.rollout + hybrid - n) for n in trains]
        splits = [split for split in splits if min(split) >= 1]
        if not splits:
            return None
        switches = sum(switch_cost(self._settings, direction, snapshot) for direction in DIRECTIONS)
        at, paid = (both, switches) if sharing else (known.split, 0.0)
        self._ahead = self._ahead if sharing else known.times.ahead
        steps = [step for step in snapshot.steps if step.at > self._since][sharing:]
        gaps = [after.at - before.at for before, after in pairwise(steps) if before.nodes == after.nodes == at.train]
        if len(gaps) >= MIN_STEPS - 1:
            self._extra[sharing] = median(gaps[1 - MIN_STEPS :]) - self._at(known, at, shared=sharing) - paid
        split = min(splits, key=lambda one: self._at(known, one))
        alone = self._extra.get(False, 0.0)
        more = self._extra.get(True, alone) + switches
        sure = min(self._at(known, split, *e) - self._at(known, both, *e, shared=True) for e in ERRORS) + alone - more
        shared = self._at(known, both, shared=True) + more
        return _Compared(shared, split, self._at(known, split) + alone, switches, sure)

    def _at(
        self, known: Estimate, to: Split, train_shift: float = 0.0, rollout_shift: float = 0.0, *, shared: bool = False
    ) -> float:
        """Predicted seconds of a batch, without what no prediction has."""
        correction = Correction() if self._model is None else self._model.correction(known.split, to)
        times = predict(known, to, correction, train_shift, rollout_shift)
        return times._replace(ahead=0.0 if shared else self._ahead).batch


def _units(nodes: Sequence[NodeFact], *roles: str) -> _Units:
    """Hybrid nodes in these roles, with those that they move with."""
    units: dict[int, list[NodeFact]] = {}
    for node in nodes:
        if node.component == "hybrid":
            units.setdefault(node.rank if node.unit < 0 else node.unit, []).append(node)
    return [unit for unit in units.values() if all(node.role in roles for node in unit)]


def _sharing_core(nodes: Sequence[NodeFact]) -> list[NodeFact]:
    """The train nodes, where they roll out, too."""
    return [node for node in nodes if node.shares]


def _ranks(units: Iterable[list[NodeFact]]) -> tuple[int, ...]:
    return tuple(node.rank for unit in units for node in unit)


def _core(snapshot: PlanSnapshot) -> Split:
    """Nodes that stay in one stage at any split."""
    core = ["train" if node.shares else node.role for node in snapshot.nodes if node.component != "hybrid"]
    return Split(core.count("train"), core.count("rollout"))
