"""The planner: after each evaluation it holds, moves hybrid nodes, shares their time, repartitions, or borrows nodes.

- Hybrid nodes -> the `Mover`'s decision: the split whose coming batches are shortest (`Player`).
- Synchronous, and time-sharing saves time -> ``time_share`` (`TimeSharing`), until it does not.
- No other split is better, and a period of steady work -> the `RepartitionAdvisor` searches all layouts.
- Nothing to move, and the run may queue nodes for itself -> `borrowing` says whether it does.
"""

from __future__ import annotations

from math import inf
from typing import Protocol

import msgspec

from libra_hpc.config.rollout import PlannerSection
from libra_hpc.protocol.plan import PlanDecision, PlanSnapshot

from .borrow_choice import borrowing
from .player import LEAST_BATCHES
from .repartition_choice import CANDIDATES, RepartitionAdvisor
from .rollout_by_nodes import RolloutByNodes
from .stage_estimator import StageEstimator
from .stage_times import Estimate, Split
from .switch_cost import Direction
from .within_step import BOTH, TimeSharing


class Mover(Protocol):
    """Decides about hybrid nodes of a snapshot in which none is on its way."""

    def decide(self, snapshot: PlanSnapshot, now: float) -> PlanDecision:
        """Hold or move; a better split that is forbidden now is a candidate with `Candidate.blocked`."""


class MoveOutcome(msgspec.Struct, frozen=True):
    """Predicted and realised gain of a move, in seconds per global batch; negative for a loss."""

    at: float
    direction: Direction
    node: int
    predicted: float
    realised: float
    count: int = 1
    """Nodes that moved."""


class Planner:
    """Decides from snapshots; keeps what it measured before a move, and changes of the workload."""

    def __init__(
        self,
        settings: PlannerSection,
        mover: Mover,
        rollout_model: RolloutByNodes | None = None,
        repartition: RepartitionAdvisor | None = None,
    ) -> None:
        self.outcomes: list[MoveOutcome] = []
        """Every move that was compared with its prediction, in order."""
        self.estimate: Estimate | None = None
        """Seconds of both stages at the split of the last snapshot; None while measurements are missing or nothing can
        move."""
        self._settings, self._mover = settings, mover
        self.rollout_model, self.repartition = rollout_model, repartition
        self.repartition_after = -inf
        """Time before which no other layout is searched. Once set, only a change of the workload starts a search."""
        self._started_at: float = inf
        """Time of the first decision."""
        self._searched_at = -inf
        self._estimator = StageEstimator(rollout_model)
        self._sharing = TimeSharing(settings, rollout_model)
        self._pending: tuple[PlanDecision, Split] | None = None
        """A move from a split, until it is measured."""

    def decide(self, snapshot: PlanSnapshot, now: float) -> PlanDecision:
        """Evaluate ``snapshot`` at time ``now``, on the clock of the snapshot."""
        decision = self._decide(snapshot, now)
        if snapshot.spot is None or self.estimate is None or decision.action != "hold":
            return decision
        return borrowing(decision, self.estimate, snapshot, self._settings, now)

    def _decide(self, snapshot: PlanSnapshot, now: float) -> PlanDecision:
        self._started_at = min(self._started_at, now)
        self.estimate = None
        split = self._observe(snapshot, now)
        if why := self._not_evaluated(snapshot, split):
            return _hold(f"hold: {why}")
        estimate = self._estimator.estimate(snapshot, split)
        if (shared := self._sharing.decide(snapshot, estimate, now)) is not None:
            return shared
        if isinstance(estimate, str) and snapshot.eta == 0 and self._settings.time_sharing == "auto":
            return _hold(f"hold: {estimate}")
        movable = any(node.component == "hybrid" for node in snapshot.nodes)
        decision = self._mover.decide(snapshot, now) if movable else _hold("hold: there is no hybrid node to move")
        if isinstance(estimate, Estimate):
            self.estimate = estimate
            self._judge_move(estimate, now)
        if decision.action != "hold":
            self._pending = decision, split
            return decision
        if isinstance(estimate, str):
            return decision if movable else _hold(f"hold: {estimate}")
        return self._repartition(snapshot, estimate, decision, now)

    def _repartition(self, snapshot: PlanSnapshot, estimate: Estimate, hold: PlanDecision, now: float) -> PlanDecision:
        """``hold``, or another layout of all nodes where a search is due and finds one."""
        blocked = any(candidate.blocked for candidate in hold.candidates)
        if self.repartition is None or blocked or not self._repartition_due(now):
            return hold
        self._searched_at = now
        since, horizon = self._estimator.lengths_changed_at, self._horizon(snapshot, estimate)
        advised = self.repartition.advise(snapshot, estimate, since=since, horizon=horizon, settings=self._settings)
        if advised is None:
            return hold
        return msgspec.structs.replace(advised, candidates=(*advised.candidates, *hold.candidates)[:CANDIDATES])

    def _not_evaluated(self, snapshot: PlanSnapshot, split: Split) -> str:
        """Why no move is evaluated; empty: it can be."""
        if not self._settings.enabled:
            return "the planner is disabled"
        movable = any((n.component == "hybrid" and n.role != "lost") or n.shares for n in snapshot.nodes)
        if not movable and self.repartition is None and snapshot.spot is None:
            return "there is no hybrid node to move"
        for node in snapshot.nodes:
            if node.role in ("to_train", "to_rollout", "starting"):
                return f"node {node.rank} is in state {node.role}"
        return "" if split.train and split.rollout else "one of the stages has no node"

    def _repartition_due(self, now: float) -> bool:
        """Whether the workload has been steady for a period, without a search or a repartition made for it.

        A layout that a repartition chose stays until the workload changes. Otherwise two layouts could take turns.
        """
        due, changed = self.repartition_after, self._estimator.lengths_changed_at
        return (
            now >= due
            and (changed > -inf or due == -inf)
            and now - max(changed, self._started_at, self._searched_at) >= self._settings.period_s
        )

    def _observe(self, snapshot: PlanSnapshot, now: float) -> Split:
        """Take in changes of workload and nodes; return the present split."""
        if self._estimator.observe(snapshot, now):
            self._pending = None
            self._sharing.reset()
        roles = [node.role for node in snapshot.nodes]
        split = Split(*(sum(role in (stage, BOTH) for role in roles) for stage in ("train", "rollout")))
        self._estimator.set_split(split, now)
        return split

    def _judge_move(self, measured: Estimate, now: float) -> None:
        """Compare the first measurement after a move with the prediction."""
        if self._pending is None or measured.split == self._pending[1]:
            return
        (decision, before), self._pending = self._pending, None
        count = abs(measured.split.train - before.train)
        if count == len(decision.nodes) and sum(measured.split) == sum(before):
            numbers = decision.numbers
            self.outcomes.append(
                MoveOutcome(
                    at=now,
                    direction="to_train" if decision.action == "to_train" else "to_rollout",
                    node=decision.node,
                    predicted=numbers["batch_s"] - numbers["after_s"],
                    realised=numbers["batch_s"] - measured.times.batch,
                    count=count,
                )
            )

    def _horizon(self, snapshot: PlanSnapshot, estimate: Estimate) -> float:
        """Seconds over which a gain counts."""
        batch = estimate.times.batch
        return min(max(self._settings.horizon_s, LEAST_BATCHES * batch), snapshot.steps_left * batch)


def _hold(reason: str) -> PlanDecision:
    return PlanDecision("hold", -1, reason, {})
