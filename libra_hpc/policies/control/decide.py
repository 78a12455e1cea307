"""The planner's decision: hold, move hybrid nodes to the other stage, or propose another layout of all nodes.

A trigger (`Planner._triggers`) starts an evaluation. It predicts every split that hybrid nodes can reach, and takes the
best one if no condition fails. Each stage keeps one node.

- Too few measurements since the last change -> hold (`StageEstimator`).
- Gain within the measurement error (`ONE_SIDED_95`), below ``min_gain``, or at most ``margin`` switch costs -> hold.
- The queues contradict the estimate (`Moves`) -> hold.
- A moving node younger than ``min_dwell_s``, or the hour's moves used up -> hold.
- No change for `SETTLED` steps -> the move becomes a proposal, which newer steps must confirm (`Hysteresis`).
- Synchronous, and time-sharing saves time -> ``time_share`` (`TimeSharing`), until it does not.
- Nothing to gain from hybrid nodes and a period of steady work -> the `RepartitionAdvisor` searches all layouts.
- Nothing to move, and the run may queue nodes for itself -> `borrowing` says whether it does.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import msgspec

from libra_hpc.config.rollout import PlannerSection
from libra_hpc.protocol.plan import PlanDecision, PlanSnapshot

from .borrow_choice import borrowing
from .hysteresis import Direction, Hysteresis
from .moves import Move, Moves
from .node_scaling import NodeScaling
from .repartition_choice import CANDIDATES, RepartitionAdvisor
from .rollout_by_nodes import RolloutByNodes
from .stage_estimator import StageEstimator
from .stage_times import Estimate, Split, predict, times_with_work_of
from .within_step import BOTH, TimeSharing

WAITING = 0.2
"""Share of the trainers' time without data that triggers an evaluation: twice what uneven batches cause."""
LEAST_BATCHES = 12
"""Batches of the shortest horizon, unless the run ends before. Batches of large runs take many minutes."""
SETTLED = 32
"""Steps without a change after which a move needs confirmation: four times `MAX_STEPS`. Repeated evaluation of noise
exceeds any bound once; before, a late move costs more than a needless one."""
QUANTITIES = ("generated tokens", "context tokens", "turns", "seconds in tools", "prompts")
"""Names by `Drift.quantity`."""


class MoveOutcome(msgspec.Struct, frozen=True):
    """Predicted and realised gain of a move, in seconds per global batch; negative for a loss."""

    at: float
    direction: Direction
    node: int
    predicted: float
    realised: float
    count: int = 1
    """Nodes that moved."""


class _Pending(NamedTuple):
    """A move that waits for its first measurement."""

    direction: Direction
    node: int
    before: Estimate


class Planner:
    """Decides from snapshots; keeps only what it learned from moves and changes of the workload."""

    def __init__(
        self,
        settings: PlannerSection,
        rollout_model: RolloutByNodes | None = None,
        repartition: RepartitionAdvisor | None = None,
    ) -> None:
        self.outcomes: list[MoveOutcome] = []
        """Every move that was compared with its prediction, in order."""
        self.estimate: Estimate | None = None
        """Seconds of both stages at the split of the last snapshot; None while measurements are missing or nothing can
        move."""
        self._settings = settings
        self.rollout_model, self.repartition = rollout_model, repartition
        self.repartition_after = -inf
        """Time before which no other layout is searched. Once set, only a change of the workload starts a search."""
        self._started_at: float = inf
        """Time of the first decision."""
        self._evaluated_at = self._searched_at = -inf
        self._drift_pending = False
        self._scaling = NodeScaling(rollout_model)
        self._estimator = StageEstimator(rollout_model, self._scaling)
        self._hysteresis = Hysteresis(settings)
        self._moves = Moves(settings, self._scaling, self._hysteresis)
        self._sharing = TimeSharing(settings, self._scaling, self._hysteresis)
        self._pending: _Pending | None = None

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
        proposal = self._hysteresis.proposal
        estimate = self._estimator.estimate(snapshot, split, proposal.at if proposal else None)
        self._judge_move(self._estimator.measured, now)
        if (shared := self._sharing.decide(snapshot, estimate, now)) is not None:
            return shared
        if isinstance(estimate, str):
            return _hold(f"hold: {estimate}")
        self.estimate = estimate
        numbers = self._numbers(snapshot, estimate)
        triggers = self._triggers(snapshot, estimate, now)
        if not triggers:
            self._hysteresis.proposal = None
            return _hold(
                f"hold: the stages balance (train {estimate.times.train:.2f} s, rollout {estimate.times.rollout:.2f} s)"
                " and nothing drifts",
                numbers,
            )
        self._evaluated_at, self._drift_pending = now, False
        horizon = self._horizon(snapshot, estimate)
        moves = self._moves.all(snapshot, estimate, now, horizon)
        moves.sort(key=lambda m: (not m.blocked, m.pays - m.needed), reverse=True)
        if moves:
            decision = self._choose(moves[0], estimate, numbers)
        else:
            decision = _hold("hold: every stage is down to its last movable node", numbers)
        decision = self._confirm(decision, estimate, snapshot, now)
        blocked = bool(self._hysteresis.proposal or (moves and moves[0].blocked))
        if decision.action == "hold" and not blocked and self.repartition and self._repartition_due(now):
            self._searched_at = now
            since = self._estimator.workload_changed_at
            advised = self.repartition.advise(snapshot, estimate, since=since, horizon=horizon, settings=self._settings)
            decision = advised or decision
        considered = (*decision.candidates, *(m.candidate() for m in moves))
        return msgspec.structs.replace(decision, candidates=considered[:CANDIDATES], triggers=triggers)

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
        due, changed = self.repartition_after, self._estimator.workload_changed_at
        return (
            now >= due
            and (changed > -inf or due == -inf)
            and now - max(changed, self._started_at, self._searched_at) >= self._settings.period_s
        )

    def _observe(self, snapshot: PlanSnapshot, now: float) -> Split:
        """Take in changes of workload and nodes; return the present split."""
        if self._estimator.observe(snapshot, now):
            self._pending, self._drift_pending = None, True
            self._hysteresis.reset()
            self._scaling.clear_pairs()
            self._sharing.reset()
        self._hysteresis.observe(snapshot.nodes, now)
        roles = [node.role for node in snapshot.nodes]
        split = Split(*(sum(role in (stage, BOTH) for role in roles) for stage in ("train", "rollout")))
        if self._estimator.set_split(split, now):
            self._hysteresis.proposal = None
        return split

    def _judge_move(self, measured: Estimate | None, now: float) -> None:
        """Compare the first measurement after a move with the prediction; learn the scaling."""
        pending = self._pending
        if pending is None or measured is None or measured.split == pending.before.split:
            return
        self._pending, before = None, pending.before
        count = (
            measured.split.train - before.split.train
            if pending.direction == "to_train"
            else measured.split.rollout - before.split.rollout
        )
        if count < 1 or sum(measured.split) != sum(before.split):
            return
        predicted = (
            before.times.batch
            - predict(before, measured.split, self._scaling.correction(before.split, measured.split)).batch
        )
        self._scaling.learn(before, measured)
        realised = times_with_work_of(before, measured).batch - measured.times.batch
        self.outcomes.append(
            MoveOutcome(
                at=now,
                direction=pending.direction,
                node=pending.node,
                predicted=predicted,
                realised=realised,
                count=count,
            )
        )

    def _triggers(self, snapshot: PlanSnapshot, estimate: Estimate, now: float) -> tuple[str, ...]:
        """Names of the triggers that hold."""
        times, queue = estimate.times, snapshot.queue
        low, high = sorted((times.train, times.rollout))
        found = {
            "drift": self._drift_pending,
            "period": now - self._evaluated_at >= self._settings.period_s,
            "queues": (
                snapshot.eta > 0 and (queue.trainer_wait > WAITING or queue.ready_groups >= snapshot.prompts_per_step)
            ),
            # Stages that take turns have no balanced ratio.
            "imbalance": snapshot.eta == 0 or high > low * (1.0 + self._settings.min_gain),
        }
        return tuple(name for name, holds in found.items() if holds)

    def _horizon(self, snapshot: PlanSnapshot, estimate: Estimate) -> float:
        """Seconds over which a gain counts."""
        batch = estimate.times.batch
        return min(max(self._settings.horizon_s, LEAST_BATCHES * batch), snapshot.steps_left * batch)

    def _choose(self, best: Move, estimate: Estimate, inputs: dict[str, float]) -> PlanDecision:
        """The decision for the best move, with its numbers."""
        numbers = inputs | {
            "after_train_s": best.after.train,
            "after_rollout_s": best.after.rollout,
            "after_s": best.after.batch,
        }
        numbers |= {"saved_s": best.saved, "pays_s": best.pays, "cost_s": best.cost, "needed_s": best.needed}
        times, stage = estimate.times, "train" if best.direction == "to_train" else "rollout"
        who = f"node {best.nodes[0]}" if len(best.nodes) == 1 else f"nodes {', '.join(map(str, best.nodes))}"
        what = (
            f"moving {who} to {stage} takes a batch from {times.batch:.2f} s (train {times.train:.2f}, rollout"
            f" {times.rollout:.2f}) to {best.after.batch:.2f} s (train {best.after.train:.2f}, rollout"
            f" {best.after.rollout:.2f})"
        )
        if best.saved <= 0.0:
            return _hold(f"hold: {what}, no gain beyond measurement error", numbers)
        what += f"; that is {best.saved:.2f} s ({best.share:.0%}) at least, and {best.pays:.0f} s over the horizon"
        if best.blocked:
            return _hold(f"hold: {what}, but {best.blocked}", numbers)
        if best.share < self._settings.min_gain:
            return _hold(f"hold: {what}, below the least gain of {self._settings.min_gain:.0%}", numbers)
        price = f"{best.needed / best.cost:.1f} x {best.cost:.1f} s switch cost"
        if best.pays <= best.needed:
            return _hold(f"hold: {what}, which does not pay {price}", numbers)
        return PlanDecision(
            action=best.direction,
            node=best.nodes[0],
            reason=f"{best.direction}: {what}, more than {price}{self._drift_clause()}",
            numbers=numbers,
            nodes=best.nodes,
        )

    def _confirm(self, decision: PlanDecision, estimate: Estimate, snapshot: PlanSnapshot, now: float) -> PlanDecision:
        """The decision, or a hold where a settled loop must confirm the move first."""
        if decision.action != "to_train" and decision.action != "to_rollout":
            self._hysteresis.proposal = None
            return decision
        estimator = self._estimator
        begun = max(estimator.split_since, estimator.lengths_changed_at)
        settled = not estimator.is_changing(snapshot) and sum(s.at > begun for s in snapshot.steps) >= SETTLED
        if not self._hysteresis.allows(decision.action, settled, now):
            return _hold(
                f"hold: nothing changed for {SETTLED} steps, so new ones must confirm this first: {decision.reason}",
                decision.numbers,
            )
        self._pending = _Pending(decision.action, decision.node, estimate)
        return decision

    def _drift_clause(self) -> str:
        """The last detected change, as the end of a reason."""
        drift = self._estimator.drift
        if drift is None:
            return ""
        what = "lengths" if drift.quantity == 0 else QUANTITIES[drift.quantity]
        unit = " s" if drift.quantity == 3 else "" if drift.quantity == 2 else " tokens"
        return f"; {what} drifted from {drift.before:.0f} to {drift.after:.0f}{unit}"

    def _numbers(self, snapshot: PlanSnapshot, estimate: Estimate) -> dict[str, float]:
        """The inputs of a decision, as logged."""
        numbers = {
            "train_s": estimate.times.train,
            "rollout_s": estimate.times.rollout,
            "batch_s": estimate.times.batch,
            "train_error_share": estimate.train_error,
            "rollout_error_share": estimate.rollout_error,
            "train_nodes": float(estimate.split.train),
            "rollout_nodes": float(estimate.split.rollout),
            "horizon_s": self._horizon(snapshot, estimate),
            "trainer_wait_share": snapshot.queue.trainer_wait,
            "moves_left": float(self._hysteresis.moves_left),
        }
        if self.outcomes:
            numbers |= {
                "last_move_predicted_s": self.outcomes[-1].predicted,
                "last_move_realised_s": self.outcomes[-1].realised,
            }
        if estimate.lent:
            numbers["lent_nodes"] = estimate.lent
        if self._estimator.drift is not None:
            numbers["drift_distance"] = self._estimator.drift.distance
        return numbers


def _hold(reason: str, numbers: dict[str, float] | None = None) -> PlanDecision:
    return PlanDecision("hold", -1, reason, numbers or {})
