"""Asks the planner for a decision, logs it, and orders the moves of hybrid nodes.

The coordinator carries out a repartition, because that stops training.
"""

from __future__ import annotations

from collections.abc import Callable

from libra_hpc.config.run import RunConfig
from libra_hpc.facts.estimate import StageEstimate
from libra_hpc.facts.status import DecisionStatus
from libra_hpc.planning.live import live_planner
from libra_hpc.protocol.engine_state import EngineKind
from libra_hpc.protocol.plan import NodeFact, PlanDecision, SpotFact

from .decisions import DecisionLog, predicted_gain
from .nodes import NodePool
from .observations import Observations


class LivePlanning:
    """The planner of one run; ``event(kind, **fields)`` writes to the event log."""

    def __init__(
        self,
        config: RunConfig,
        nodes: NodePool,
        observations: Observations,
        repartition_after: float,
        event: Callable[..., None],
    ) -> None:
        self._config, self._nodes, self._observations, self._event = config, nodes, observations, event
        self._planner = live_planner(config)
        self._planner.repartition_after = repartition_after
        self._decisions = DecisionLog(self._planner, event)
        self._spot_since = float("-inf")
        self.spot_nodes = -1
        """As `Status.spot_nodes`."""

    @property
    def last(self) -> DecisionStatus | None:
        return self._decisions.last

    def decide(self, steps_left: int, now: float) -> PlanDecision:
        """Evaluate the plan and order the moves that it decides; ``now`` in epoch seconds."""
        assert self._nodes.pool is not None
        contacts, algorithm = self._nodes.contacts, self._config.algorithm
        nodes = tuple(
            NodeFact(rank, node.component, str(node.state), contacts[rank].since, unit=node.unit[0])
            for rank, node in self._nodes.pool.nodes.items()
        )
        snapshot = self._observations.snapshot(
            nodes,
            prompts_per_step=algorithm.prompts_per_step,
            group_size=algorithm.group_size,
            eta=algorithm.eta,
            steps_left=steps_left,
            spot=self._spot(),
        )
        decision = self._planner.decide(snapshot, now)
        self._decisions.add(decision, now)
        if decision.action in ("to_train", "to_rollout"):
            self._move(decision, "train" if decision.action == "to_train" else "rollout", now)
        elif decision.action in ("borrow", "give_back"):
            self.spot_nodes, self._spot_since = decision.spot_nodes, now
        return decision

    def _spot(self) -> SpotFact | None:
        """Before its first decision, those of an earlier start may be there."""
        most, report = self._config.borrow.spot.nodes, self._observations.report
        there = report is not None and any(one.kind == "spot" and one.engines for one in report.lenders)
        wanted = self.spot_nodes if self.spot_nodes >= 0 else most * there
        return SpotFact(most, wanted, self._spot_since, self._nodes.guests.start_s) if most else None

    def _move(self, decision: PlanDecision, role: EngineKind, now: float) -> None:
        gain = predicted_gain(decision)
        for rank in decision.nodes or (decision.node,):
            self._event(
                "move_started",
                rank=rank,
                to=role,
                reason=decision.reason,
                numbers=decision.numbers,
                predicted_gain_s=gain,
            )
            self._nodes.move(rank, role, now)

    def estimate(self, trainers: int) -> StageEstimate | None:
        """The planner's estimate; None while it has none, or when it is of another split than the present one."""
        made = self._planner.estimate
        if made is None or made.split != (trainers, len(self._nodes.receivers)):
            return None
        return StageEstimate(made.times.train, made.times.rollout, made.times.batch)

    def close(self) -> None:
        self._decisions.close()
