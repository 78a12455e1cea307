"""The planner's decision: hold, or move one hybrid node to the other stage.

At every look the planner measures both stages at the present split, predicts the two neighbouring splits (`model`) and moves the node that
brings the most, if all of this holds:

* *Evidence*: enough steps, windows and trajectories since the last change of split or of lengths.  A drift alarm (`drift`) throws older measurements away.
* *Gain*: the seconds saved over the horizon, horizon * (T_now - T_after) / T_now, exceed ``margin`` times the switch cost, and T_after is at least the share
  ``min_gain`` below T_now.  The horizon is ``horizon_s``, or what is left of the run when that is less.  The switch cost is the median of the last
  `SWITCHES` = 3 measured moves in that direction, the configured prior before the first.
* *Robustness*: the gain is the least of three: as measured, and with the two times `ERRORS` = 1.645 standard errors apart from the measured ones in
  either direction (one-sided 95 %).  What noise could have made is not acted on.
* *No contradiction by the queues*: with overlapping stages, the stage the model holds for the slower one is not the one that waits more (trainers
  for data, rollout at the staleness gate).
* *Dwell*: the node has been in its role for ``min_dwell_s``, and no node is on its way, starting or coming back.
* One node of each stage always remains.  Core nodes never move.

*Hysteresis.*  The first complete measurement after a move is compared with the last one before it.  It teaches the scaling correction between the two splits
(both directions).  If the batch time got worse, that direction needs `PENALTY` = 2 times the margin from then on, doubled at each further failure, until
lengths drift and the old lesson no longer applies.
"""

from __future__ import annotations

from statistics import median
from typing import Literal

import msgspec

from libra_hpc.config.rollout import PlannerSection
from libra_hpc.planner.drift import Drift, DriftDetector
from libra_hpc.planner.model import Correction, Measured, Split, Times, correct, measure, predict
from libra_hpc.planner.snapshot import NodeFact, PlanDecision, PlanSnapshot

SWITCHES = 3
ERRORS = 1.645
PENALTY = 2.0

Direction = Literal["to_train", "to_rollout"]


class MoveOutcome(msgspec.Struct, frozen=True):
    """What a move promised and what it brought, seconds per global batch; a negative realised gain is a loss."""

    at: float
    direction: Direction
    node: int
    predicted: float
    realised: float


class _Pending(msgspec.Struct, frozen=True):
    direction: Direction
    node: int
    before: Measured
    to: Split
    predicted: float


class _Candidate(msgspec.Struct, frozen=True):
    direction: Direction
    node: int
    to: Split
    after: Times
    saved: float
    """Seconds per global batch, at the unfavourable end of the measurement error."""
    share: float
    """The same as a share of the batch time."""
    cost: float
    needed: float
    """Seconds the horizon must bring."""
    pays: float
    """Seconds it brings."""
    blocked: str
    """Why this move is out of the question now, else empty."""


class Planner:
    """Keeps what was learned from moves and drifts; everything else comes with the snapshot."""

    def __init__(self, settings: PlannerSection) -> None:
        self.outcomes: list[MoveOutcome] = []
        """Every judged move, in order."""
        self._settings = settings
        self._detector: DriftDetector | None = None
        self._next_index = 0
        self._split: Split | None = None
        self._since = float("-inf")
        self._drift: Drift | None = None
        self._corrections: dict[tuple[Split, Split], Correction] = {}
        self._failures: dict[Direction, int] = {"to_train": 0, "to_rollout": 0}
        self._pending: _Pending | None = None

    def decide(self, snapshot: PlanSnapshot, now: float) -> PlanDecision:
        """One look at the plan at time ``now`` (the clock of the snapshot)."""
        self._observe(snapshot, now)
        split = self._split
        if not self._settings.enabled:
            return _hold("hold: the planner is disabled")
        if not any(n.component == "hybrid" and n.role != "lost" for n in snapshot.nodes):
            return _hold("hold: there is no hybrid node to move")
        moving = [n for n in snapshot.nodes if n.role in ("to_train", "to_rollout", "starting")]
        if moving:
            return _hold(f"hold: node {moving[0].rank} is in state {moving[0].role}")
        if split is None or split.train == 0 or split.rollout == 0:
            return _hold("hold: one of the stages has no node")
        measured = measure(snapshot, split, self._since)
        if isinstance(measured, str):
            return _hold(f"hold: {measured}")
        self._judge(measured, now)
        candidates = [c for c in (self._candidate(d, snapshot, measured, now) for d in ("to_train", "to_rollout")) if c is not None]
        if not candidates:
            return _hold("hold: every stage is down to its last movable node", self._numbers(measured, None))
        best = max(candidates, key=lambda c: (not c.blocked, c.pays - c.needed))
        return self._verdict(best, measured)

    def _observe(self, snapshot: PlanSnapshot, now: float) -> None:
        """Take in new trajectories and the present split; start measuring afresh when either changed."""
        if self._detector is None:
            self._detector = DriftDetector(snapshot.group_size)
        fresh = [t for t in snapshot.trajectories if t.index >= self._next_index]
        if fresh:
            self._next_index = fresh[-1].index + 1
            drift = self._detector.update([float(t.generated) for t in fresh])
            if drift is not None:
                self._drift, self._since, self._pending = drift, now, None
                self._failures = {"to_train": 0, "to_rollout": 0}
        split = Split(sum(n.role == "train" for n in snapshot.nodes), sum(n.role == "rollout" for n in snapshot.nodes))
        if split != self._split:
            self._split, self._since = split, now

    def _judge(self, measured: Measured, now: float) -> None:
        """Compare the first measurement after a move with the last one before it."""
        pending = self._pending
        if pending is None or measured.split == pending.before.split:
            return
        self._pending = None
        if measured.split != pending.to:
            return
        before, there, back = pending.before, (pending.before.split, pending.to), (pending.to, pending.before.split)
        self._corrections[there] = correct(before, measured)
        self._corrections[back] = correct(measured, before)
        realised = before.times.batch - measured.times.batch
        self.outcomes.append(MoveOutcome(now, pending.direction, pending.node, pending.predicted, realised))
        if realised < 0.0:
            self._failures[pending.direction] += 1

    def _candidate(self, direction: Direction, snapshot: PlanSnapshot, measured: Measured, now: float) -> _Candidate | None:
        source, change = ("rollout", 1) if direction == "to_train" else ("train", -1)
        nodes = [n for n in snapshot.nodes if n.component == "hybrid" and n.role == source]
        to = Split(measured.split.train + change, measured.split.rollout - change)
        if not nodes or to.train < 1 or to.rollout < 1:
            return None
        node = min(nodes, key=lambda n: (n.since, n.rank))
        after = predict(measured, to, self._correction(measured.split, to))
        saved, share = self._gain(measured, to)
        cost = self._switch_cost(direction, snapshot)
        horizon = min(self._settings.horizon_s, snapshot.steps_left * measured.times.batch)
        needed = self._settings.margin * PENALTY ** self._failures[direction] * cost
        return _Candidate(direction, node.rank, to, after, saved, share, cost, needed, horizon * share, self._blocked(node, snapshot, measured, now))

    def _gain(self, measured: Measured, to: Split) -> tuple[float, float]:
        """Least seconds saved per batch, and their share of the present batch time, over the three readings of the measured times."""
        correction = self._correction(measured.split, to)
        readings = []
        for shift in (0.0, ERRORS, -ERRORS):
            here = predict(measured, measured.split, Correction(), shift, -shift).batch
            saved = here - predict(measured, to, correction, shift, -shift).batch
            readings.append((saved, saved / here))
        return min(readings)

    def _correction(self, there: Split, to: Split) -> Correction:
        return self._corrections.get((there, to), Correction())

    def _switch_cost(self, direction: Direction, snapshot: PlanSnapshot) -> float:
        seen = [s.seconds for s in snapshot.switches if s.direction == direction][-SWITCHES:]
        return median(seen) if seen else self._settings.switch_cost_s

    def _blocked(self, node: NodeFact, snapshot: PlanSnapshot, measured: Measured, now: float) -> str:
        if now - node.since < self._settings.min_dwell_s:
            return f"node {node.rank} has been in {node.role} for {now - node.since:.0f} s of at least {self._settings.min_dwell_s:.0f} s"
        waits, gated = snapshot.queue.trainer_wait, snapshot.queue.gate_blocked
        contradicted = waits > gated if measured.times.train > measured.times.rollout else gated > waits
        if snapshot.eta > 0 and contradicted:
            return f"the queues contradict it: trainers wait for data {waits:.0%} of the time, rollout is held at the staleness gate {gated:.0%}"
        return ""

    def _verdict(self, best: _Candidate, measured: Measured) -> PlanDecision:
        numbers = self._numbers(measured, best)
        times, stage = measured.times, "train" if best.direction == "to_train" else "rollout"
        what = (
            f"moving node {best.node} to {stage} takes a batch from {times.batch:.2f} s (train {times.train:.2f}, rollout {times.rollout:.2f}) to "
            f"{best.after.batch:.2f} s (train {best.after.train:.2f}, rollout {best.after.rollout:.2f})"
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
        self._pending = _Pending(best.direction, best.node, measured, best.to, times.batch - best.after.batch)
        because = "" if self._drift is None else f"; lengths drifted from {self._drift.before:.0f} to {self._drift.after:.0f} tokens"
        return PlanDecision(best.direction, best.node, f"{best.direction}: {what}, more than {price}{because}", numbers)

    def _numbers(self, measured: Measured, best: _Candidate | None) -> dict[str, float]:
        numbers = {
            "train_s": measured.times.train,
            "rollout_s": measured.times.rollout,
            "batch_s": measured.times.batch,
            "train_error_share": measured.train_error,
            "rollout_error_share": measured.rollout_error,
        }
        if best is not None:
            numbers |= {"after_train_s": best.after.train, "after_rollout_s": best.after.rollout, "after_s": best.after.batch}
            numbers |= {"saved_s": best.saved, "pays_s": best.pays, "cost_s": best.cost, "needed_s": best.needed}
        if self.outcomes:
            numbers |= {"last_move_predicted_s": self.outcomes[-1].predicted, "last_move_realised_s": self.outcomes[-1].realised}
        if self._drift is not None:
            numbers["drift_distance"] = self._drift.distance
        return numbers


def _hold(reason: str, numbers: dict[str, float] | None = None) -> PlanDecision:
    return PlanDecision("hold", -1, reason, numbers or {})
