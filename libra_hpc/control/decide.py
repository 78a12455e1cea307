"""The planner's decision: hold, move hybrid nodes to the other stage, or advise another layout of the core.

A look at the plan happens for a reason (`triggers`): the workload *drifted* (`drift`), the *period* is over, the
*queues* press (trainers wait, or whole batches wait for them), or the stages are *imbalanced* by more than the least
gain.  Then both stages are measured or foreseen at the present split and every split that hybrid nodes can reach is
predicted.  The best one is taken if all of this holds:

* *Evidence*: enough steps, windows and trajectories since the last change of split or workload, or while the workload
  changes and where there is a cost model, what the groups under way foretell (`evidence`).
* *Gain*: the seconds saved over the horizon, horizon * (T_now - T_after) / T_now, exceed ``margin`` times the switch
  cost, and T_after is at least the share ``min_gain`` below T_now.  The cost is what `brake` measured, node seconds,
  times the share of its stage that is away.  The horizon is ``horizon_s``, at least `LEAST_BATCHES` = 12 batches, never
  more than what is left of the run.  Where the work has a significant trend the saving is the mean over `POINTS`
  moments of it (`forecast`), and the present must gain as well: a forecast can veto or strengthen a move, not create
  one.
* *Robustness*: the gain is the least of three: as measured, and with the ratio of the two times `ERRORS` = 1.645
  standard errors off in either direction (one-sided 95 %), each time taking its part of it.  What noise could have made
  is not acted on.
* *Twice*: looked at often enough, noise exceeds any bound.  After `SETTLED` = 32 steps of one split without drift or
  trend, new steps alone must confirm it.
* *No contradiction by the queues*: with overlapping stages, unless the commits themselves show trainers that wait,
  trainers that wait for data are not the slower stage, and rollout is not when trainers hardly wait.  Of foreseen times
  the queues know nothing yet.
* *Brake*: every moving node has been in its role for ``min_dwell_s``, no node is on its way, starting or coming back,
  the hour's bound on moves is kept.
* One node of each stage always remains.  Core nodes never move.

If hybrid nodes have nothing to offer, the work has been as it is for a period and a `RepartitionAdvisor` is at hand, other
core layouts are held against the same test, with the cost of a new start; at most once a period, and each proposal is
made once.  After a repartition only a drift brings the next one: two layouts of which the cost model prefers the one
that does not run would otherwise take turns.

The first complete measurement after a move is compared with standing still at the work of now (`outcomes`): it teaches
`scaling`, a loss is a brake.
"""

from __future__ import annotations

from math import hypot, inf
from statistics import fmean
from typing import NamedTuple

import msgspec

from libra_hpc.config.rollout import PlannerSection
from libra_hpc.cost_models.rollout_by_nodes import RolloutByNodes
from libra_hpc.protocol.plan import Candidate, NodeFact, PlanDecision, PlanSnapshot

from .stage_estimator import StageEstimator
from .hysteresis import Direction, Hysteresis
from .node_scaling import NodeScaling
from .repartition_choice import RepartitionAdvisor
from .stage_times import Correction, Estimate, Split, Times, extrapolate, predict, times_with_work_of

ERRORS = 1.645
POINTS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of the horizon at which a trend is followed."""
WAITING = 0.2
"""Share of the trainers' time without data from which on the queues press: twice what uneven batches cause."""
LEAST_BATCHES = 12
"""The horizon is never shorter, unless the run is: a few batches say nothing, and batches of large runs take many
minutes."""
SETTLED = 32
"""Steps, four times what is measured at once.  Before, a late move costs more than a needless one."""
KEPT = 5
QUANTITIES = ("generated tokens", "context tokens", "turns", "seconds in tools", "prompts")


class MoveOutcome(msgspec.Struct, frozen=True):
    """What a move promised and what it brought, seconds per global batch; a negative realised gain is a loss."""

    at: float
    direction: Direction
    node: int
    predicted: float
    realised: float
    count: int = 1
    """Nodes that moved."""


class _Pending(NamedTuple):
    direction: Direction
    node: int
    before: Estimate


class _Move(NamedTuple):
    direction: Direction
    nodes: tuple[int, ...]
    to: Split
    after: Times
    saved: float
    """Seconds per global batch now, at the unfavourable end of the measurement error."""
    share: float
    """The same as a share of the batch time."""
    pays: float
    """Seconds it brings over the horizon."""
    cost: float
    needed: float
    """Seconds the horizon must bring."""
    blocked: str
    """Why this move is out of the question now, else empty."""

    def candidate(self) -> Candidate:
        return Candidate(
            self.to.train,
            self.to.rollout,
            self.after.train,
            self.after.rollout,
            self.after.batch,
            self.pays,
            self.needed,
            blocked=self.blocked,
        )


class Planner:
    """Keeps what was learned from moves and drifts; everything else comes with the snapshot."""

    def __init__(
        self,
        settings: PlannerSection,
        rollout_model: RolloutByNodes | None = None,
        repartition: RepartitionAdvisor | None = None,
    ) -> None:
        self.outcomes: list[MoveOutcome] = []
        """Every judged move, in order."""
        self.estimate: Estimate | None = None
        """What both stages take at the split of the last snapshot; None while too little is measured, or nothing can
        move."""
        self._settings = settings
        self.rollout_model, self.repartition = rollout_model, repartition
        self.repartition_after = -inf
        """Another layout of the core is not looked for before this time; after one, never without a change of the
        workload."""
        self._began: float = inf
        """The first look."""
        self._looked = self._sought = -inf
        self._alarmed = False
        self._scaling = NodeScaling(rollout_model)
        self._evidence = StageEstimator(rollout_model, self._scaling)
        self._hysteresis = Hysteresis(settings)
        self._pending: _Pending | None = None

    def decide(self, snapshot: PlanSnapshot, now: float) -> PlanDecision:
        """One look at the plan at time ``now`` (the clock of the snapshot)."""
        self._began = min(self._began, now)
        self.estimate = None
        split = self._observe(snapshot, now)
        if not self._settings.enabled:
            return _hold("hold: the planner is disabled")
        if self.repartition is None and not any(n.component == "hybrid" and n.role != "lost" for n in snapshot.nodes):
            return _hold("hold: there is no hybrid node to move")
        moving = [n for n in snapshot.nodes if n.role in ("to_train", "to_rollout", "starting")]
        if moving:
            return _hold(f"hold: node {moving[0].rank} is in state {moving[0].role}")
        if split.train == 0 or split.rollout == 0:
            return _hold("hold: one of the stages has no node")
        measured = self._evidence.measure(
            snapshot, split, self._hysteresis.proposal.at if self._hysteresis.proposal else None
        )
        if self._evidence.direct is not None:
            self._judge(self._evidence.direct, now)
        if isinstance(measured, str):
            return _hold(f"hold: {measured}")
        self.estimate = measured
        numbers = self._numbers(snapshot, measured)
        triggers = self._triggers(snapshot, measured, now)
        if not triggers:
            self._hysteresis.proposal = None
            return _hold(
                f"hold: the stages balance (train {measured.times.train:.2f} s, rollout {measured.times.rollout:.2f} s)"
                " and nothing drifts",
                numbers,
            )
        self._looked, self._alarmed = now, False
        moves = sorted(
            self._moves(snapshot, measured, now), key=lambda m: (not m.blocked, m.pays - m.needed), reverse=True
        )
        decision = (
            self._verdict(moves, measured, numbers)
            if moves
            else _hold("hold: every stage is down to its last movable node", numbers)
        )
        decision = self._confirmed(decision, measured, snapshot, now)
        sought = self.repartition if self._lasting(now) else None
        if decision.action == "hold" and sought and not self._hysteresis.proposal and not (moves and moves[0].blocked):
            self._sought = now
            decision = (
                sought.advise(
                    snapshot, measured, self._evidence.changed, self._horizon(snapshot, measured), self._settings
                )
                or decision
            )
        considered = (*decision.candidates, *(m.candidate() for m in moves))
        return msgspec.structs.replace(decision, candidates=considered[:KEPT], triggers=triggers)

    def _lasting(self, now: float) -> bool:
        """Whether the work has been as it is for a period, another core was not looked for in it, and the core was
        laid out for other work or never yet by what was measured."""
        due, changed = self.repartition_after, self._evidence.changed
        return (
            now >= due
            and (changed > -inf or due == -inf)
            and now - max(changed, self._began, self._sought) >= self._settings.period_s
        )

    def _observe(self, snapshot: PlanSnapshot, now: float) -> Split:
        """Take in what is new of the workload and of the nodes; returns the present split."""
        if self._evidence.observe(snapshot, now):
            self._pending, self._alarmed = None, True
            self._hysteresis.forgive()
            self._scaling.forget_pairs()
        self._hysteresis.observe(snapshot.nodes, now)
        split = Split(sum(n.role == "train" for n in snapshot.nodes), sum(n.role == "rollout" for n in snapshot.nodes))
        if self._evidence.split(split, now):
            self._hysteresis.proposal = None
        return split

    def _judge(self, measured: Estimate, now: float) -> None:
        """Compare the first measurement after a move with the last one before it."""
        pending = self._pending
        if pending is None or measured.split == pending.before.split:
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
        self.outcomes.append(MoveOutcome(now, pending.direction, pending.node, predicted, realised, count))
        if realised < 0.0:
            self._hysteresis.failed(pending.direction)

    def _triggers(self, snapshot: PlanSnapshot, measured: Estimate, now: float) -> tuple[str, ...]:
        times, queue = measured.times, snapshot.queue
        low, high = sorted((times.train, times.rollout))
        found = {
            "drift": self._alarmed,
            "period": now - self._looked >= self._settings.period_s,
            "queues": (
                snapshot.eta > 0 and (queue.trainer_wait > WAITING or queue.ready_groups >= snapshot.prompts_per_step)
            ),
            # Taking turns, no ratio of the stages is a balance.
            "imbalance": snapshot.eta == 0 or high > low * (1.0 + self._settings.min_gain),
        }
        return tuple(name for name, holds in found.items() if holds)

    def _horizon(self, snapshot: PlanSnapshot, measured: Estimate) -> float:
        batch = measured.times.batch
        return min(max(self._settings.horizon_s, LEAST_BATCHES * batch), snapshot.steps_left * batch)

    def _moves(self, snapshot: PlanSnapshot, measured: Estimate, now: float) -> list[_Move]:
        """Every split that hybrid nodes can reach, all in one direction."""
        found = []
        here = measured.split
        directions: tuple[tuple[Direction, str, int], ...] = (("to_train", "rollout", 1), ("to_rollout", "train", -1))
        for direction, source, sign in directions:
            movable = sorted(
                (n for n in snapshot.nodes if n.component == "hybrid" and n.role == source),
                key=lambda n: (n.since, n.rank),
            )
            for count in range(1, len(movable) + 1):
                to = Split(here.train + sign * count, here.rollout - sign * count)
                if to.train >= 1 and to.rollout >= 1:
                    found.append(self._move(direction, movable[:count], to, snapshot, measured, now))
        return found

    def _move(
        self,
        direction: Direction,
        nodes: list[NodeFact],
        to: Split,
        snapshot: PlanSnapshot,
        measured: Estimate,
        now: float,
    ) -> _Move:
        correction = self._scaling.correction(measured.split, to)
        saved, share = _gain(measured, to, correction)
        horizon = self._horizon(snapshot, measured)
        mean = share
        if share > 0.0 and (measured.train_trend.rate or measured.rollout_trend.rate):
            mean = fmean(_gain(extrapolate(measured, point * horizon), to, correction)[1] for point in POINTS)
        stage = measured.split.rollout if direction == "to_train" else measured.split.train
        cost = self._hysteresis.cost(direction, snapshot) * len(nodes) / stage
        needed = self._hysteresis.times(direction) * cost
        blocked = self._blocked(nodes, snapshot, measured, now)
        ranks = tuple(n.rank for n in nodes)
        return _Move(
            direction, ranks, to, predict(measured, to, correction), saved, share, horizon * mean, cost, needed, blocked
        )

    def _blocked(self, nodes: list[NodeFact], snapshot: PlanSnapshot, measured: Estimate, now: float) -> str:
        young = max(nodes, key=lambda n: n.since)
        if now - young.since < self._settings.min_dwell_s:
            return (
                f"node {young.rank} has been in {young.role} for {now - young.since:.0f} s of at least"
                f" {self._settings.min_dwell_s:.0f} s"
            )
        if len(nodes) > self._hysteresis.left:
            return f"{self._hysteresis.left} of the {self._settings.moves_per_hour} moves an hour are left"
        times, waits, gated = measured.times, snapshot.queue.trainer_wait, snapshot.queue.gate_blocked
        contradicted = waits > gated
        if times.train <= times.rollout:
            # Rollout slower by a share makes trainers wait for that share.
            contradicted = gated > waits and waits < 0.5 * (1.0 - times.train / times.rollout)
        if snapshot.eta > 0 and contradicted and not measured.starved and not measured.foreseen:
            return (
                f"the queues contradict it: trainers wait for data {waits:.0%} of the time, rollout is held at the"
                f" staleness gate {gated:.0%}"
            )
        return ""

    def _verdict(self, moves: list[_Move], measured: Estimate, inputs: dict[str, float]) -> PlanDecision:
        best = moves[0]
        numbers = inputs | {
            "after_train_s": best.after.train,
            "after_rollout_s": best.after.rollout,
            "after_s": best.after.batch,
        }
        numbers |= {"saved_s": best.saved, "pays_s": best.pays, "cost_s": best.cost, "needed_s": best.needed}
        times, stage = measured.times, "train" if best.direction == "to_train" else "rollout"
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
            best.direction,
            best.nodes[0],
            f"{best.direction}: {what}, more than {price}{self._because()}",
            numbers,
            best.nodes,
        )

    def _confirmed(
        self, decision: PlanDecision, measured: Estimate, snapshot: PlanSnapshot, now: float
    ) -> PlanDecision:
        """The decision; but a move of a settled loop only when it was proposed before."""
        if decision.action == "hold" or decision.action == "repartition":
            self._hysteresis.proposal = None
            return decision
        evidence = self._evidence
        begun = max(evidence.since, evidence.drifted)
        settled = not evidence.changing(snapshot) and sum(s.at > begun for s in snapshot.steps) >= SETTLED
        if not self._hysteresis.passes(decision.action, settled, now):
            return _hold(
                f"hold: nothing changed for {SETTLED} steps, so new ones must confirm this first: {decision.reason}",
                decision.numbers,
            )
        self._pending = _Pending(decision.action, decision.node, measured)
        return decision

    def _because(self) -> str:
        drift = self._evidence.drift
        if drift is None:
            return ""
        what = "lengths" if drift.quantity == 0 else QUANTITIES[drift.quantity]
        unit = " s" if drift.quantity == 3 else "" if drift.quantity == 2 else " tokens"
        return f"; {what} drifted from {drift.before:.0f} to {drift.after:.0f}{unit}"

    def _numbers(self, snapshot: PlanSnapshot, measured: Estimate) -> dict[str, float]:
        numbers = {
            "train_s": measured.times.train,
            "rollout_s": measured.times.rollout,
            "batch_s": measured.times.batch,
            "train_error_share": measured.train_error,
            "rollout_error_share": measured.rollout_error,
            "train_nodes": float(measured.split.train),
            "rollout_nodes": float(measured.split.rollout),
            "horizon_s": self._horizon(snapshot, measured),
            "trainer_wait_share": snapshot.queue.trainer_wait,
            "moves_left": float(self._hysteresis.left),
        }
        if measured.train_trend.rate or measured.rollout_trend.rate:
            numbers |= {
                "train_trend_per_h": 3600.0 * measured.train_trend.rate,
                "rollout_trend_per_h": 3600.0 * measured.rollout_trend.rate,
            }
        if self.outcomes:
            numbers |= {
                "last_move_predicted_s": self.outcomes[-1].predicted,
                "last_move_realised_s": self.outcomes[-1].realised,
            }
        if self._evidence.drift is not None:
            numbers["drift_distance"] = self._evidence.drift.distance
        return numbers


def _gain(measured: Estimate, to: Split, correction: Correction) -> tuple[float, float]:
    """Least seconds saved per batch, and their share of the present batch time, over the three readings of the
    measured times."""
    if to.train < measured.split.train:
        measured = measured._replace(
            fixed=0.0
        )  # how much of a step is fixed is an estimate; when trainers leave, none is the unfavourable one
    readings = []
    spread = max(hypot(measured.train_error, measured.rollout_error), 1e-9)
    for sign in (0.0, ERRORS, -ERRORS):
        train, rollout = sign * measured.train_error / spread, -sign * measured.rollout_error / spread
        here = predict(measured, measured.split, Correction(), train, rollout).batch
        saved = here - predict(measured, to, correction, train, rollout).batch
        readings.append((saved, saved / here))
    return min(readings)


def _hold(reason: str, numbers: dict[str, float] | None = None) -> PlanDecision:
    return PlanDecision("hold", -1, reason, numbers or {})
