"""The moves that hybrid nodes can make: gain over the horizon, cost, and what forbids them now.

- Gain: least seconds saved per batch within the measurement error.
- Cost: the measured time of a move, times the share of its stage that is away, times ``margin``.
- Forbidden: a node younger than ``min_dwell_s``, the hour's moves used up, or queues that contradict the estimate.
"""

from __future__ import annotations

from itertools import chain
from math import hypot
from typing import NamedTuple

from libra_hpc.config.rollout import PlannerSection
from libra_hpc.protocol.plan import Candidate, NodeFact, PlanSnapshot

from .hysteresis import Direction, Hysteresis
from .node_scaling import NodeScaling
from .stage_times import ONE_SIDED_95, Correction, Estimate, Split, Times, predict, with_lent


class Move(NamedTuple):
    """A reachable split, with gain and cost."""

    direction: Direction
    nodes: tuple[int, ...]
    to: Split
    after: Times
    saved: float
    """Seconds saved per global batch, at the unfavourable end of the measurement error."""
    share: float
    """`saved` over the present batch time."""
    pays: float
    """Seconds saved over the horizon; must exceed `needed`."""
    cost: float
    needed: float
    blocked: str
    """Why the move is impossible now, else empty."""

    def candidate(self) -> Candidate:
        return Candidate(
            train=self.to.train,
            rollout=self.to.rollout,
            train_s=self.after.train,
            rollout_s=self.after.rollout,
            batch_s=self.after.batch,
            gain_s=self.pays,
            needed_s=self.needed,
            blocked=self.blocked,
        )


class Moves:
    """Every move from a snapshot and its estimate."""

    def __init__(self, settings: PlannerSection, scaling: NodeScaling, hysteresis: Hysteresis) -> None:
        self._settings, self._scaling, self._hysteresis = settings, scaling, hysteresis

    def all(self, snapshot: PlanSnapshot, estimate: Estimate, now: float, horizon: float) -> list[Move]:
        """Every split that hybrid nodes can reach, each in one direction; gains count over ``horizon`` seconds."""
        found = []
        here = estimate.split
        directions: tuple[tuple[Direction, str, int], ...] = (("to_train", "rollout", 1), ("to_rollout", "train", -1))
        for direction, source, sign in directions:
            movable = _movable(snapshot, source)
            for count in range(1, len(movable) + 1):
                nodes = list(chain.from_iterable(movable[:count]))
                to = Split(here.train + sign * len(nodes), here.rollout - sign * len(nodes))
                if to.train >= 1 and to.rollout >= 1:
                    found.append(
                        self._move(
                            direction, nodes, to=to, snapshot=snapshot, estimate=estimate, now=now, horizon=horizon
                        )
                    )
        return found

    def _move(
        self,
        direction: Direction,
        nodes: list[NodeFact],
        *,
        to: Split,
        snapshot: PlanSnapshot,
        estimate: Estimate,
        now: float,
        horizon: float,
    ) -> Move:
        """The move of ``nodes`` to the split ``to``, with gain, cost and obstacle."""
        correction = self._scaling.correction(estimate.split, to)
        saved, share = least_gain(estimate, to, correction)
        stage = estimate.split.rollout if direction == "to_train" else estimate.split.train
        cost = self._hysteresis.switch_cost(direction, snapshot) * len(nodes) / stage
        needed = self._settings.margin * cost
        blocked = self._blocked(nodes, snapshot, estimate, now)
        ranks = tuple(n.rank for n in nodes)
        return Move(
            direction=direction,
            nodes=ranks,
            to=to,
            after=predict(estimate, to, correction),
            saved=saved,
            share=share,
            pays=horizon * share,
            cost=cost,
            needed=needed,
            blocked=blocked,
        )

    def _blocked(self, nodes: list[NodeFact], snapshot: PlanSnapshot, estimate: Estimate, now: float) -> str:
        """Why these nodes must not move now, else empty: dwell time, moves per hour, or queues that contradict the
        estimate."""
        young = max(nodes, key=lambda n: n.since)
        if now - young.since < self._settings.min_dwell_s:
            return (
                f"node {young.rank} has been in {young.role} for {now - young.since:.0f} s of at least"
                f" {self._settings.min_dwell_s:.0f} s"
            )
        if len(nodes) > self._hysteresis.moves_left:
            return f"{self._hysteresis.moves_left} of the {self._settings.moves_per_hour} moves an hour are left"
        times, waits, gated = estimate.times, snapshot.queue.trainer_wait, snapshot.queue.gate_blocked
        contradicted = waits > gated
        if times.train <= times.rollout:
            # Rollout that is slower by a share makes trainers wait for that share.
            contradicted = gated > waits and waits < 0.5 * (1.0 - times.train / times.rollout)
        if snapshot.eta > 0 and contradicted and not estimate.starved and not estimate.from_in_flight:
            return (
                f"the queues contradict it: trainers wait for data {waits:.0%} of the time, rollout is held at the"
                f" staleness gate {gated:.0%}"
            )
        return ""


def _movable(snapshot: PlanSnapshot, role: str) -> list[list[NodeFact]]:
    """Hybrid nodes in this role, with those that they move with; the ones that moved longest ago first."""
    together: dict[int, list[NodeFact]] = {}
    for node in snapshot.nodes:
        if node.component == "hybrid":
            together.setdefault(node.rank if node.unit < 0 else node.unit, []).append(node)
    found = [nodes for nodes in together.values() if all(node.role == role for node in nodes)]
    return sorted(found, key=lambda nodes: max((node.since, node.rank) for node in nodes))


def least_gain(estimate: Estimate, to: Split, correction: Correction, lent: float | None = None) -> tuple[float, float]:
    """Least seconds saved per batch, and their share of the present batch time; ``lent``: with so many guests then.

    Three readings count: as measured, and with the ratio of the two times `ONE_SIDED_95` standard errors off either
    way.
    """
    if to.train < estimate.split.train:
        # The fixed part is uncertain; where trainers leave, 0 is its unfavourable end.
        estimate = estimate._replace(fixed=0.0)
    readings = []
    later = estimate if lent is None else with_lent(estimate, lent)
    spread = max(hypot(estimate.train_error, estimate.rollout_error), 1e-9)
    for sign in (0.0, ONE_SIDED_95, -ONE_SIDED_95):
        train, rollout = sign * estimate.train_error / spread, -sign * estimate.rollout_error / spread
        now = predict(estimate, estimate.split, Correction(), train_shift=train, rollout_shift=rollout)
        then = predict(later, to, correction, train_shift=train, rollout_shift=rollout)
        here = now.expected(estimate.scatter)
        saved = here - then.expected(estimate.scatter)
        readings.append((saved, saved / here))
    return min(readings)
