"""Asks the planner for a decision, logs it, and orders the moves of hybrid nodes.

- ``to_train``, ``to_rollout`` -> the nodes move. The coordinator carries out a repartition: that stops training.
- ``time_share`` -> from then on `StepSharing` moves hybrid nodes within each step, until ``split``.
- In time-sharing, a report of the rollout or a committed step -> the moves of `moves_within_step`.
- The train leader needs the core while that rolls out (`TrainReport.core_wanted`) -> it goes back to training.
- The train leader waits at each step for the hybrid nodes that work (`Layout.awaited`), at most `LIMIT` switches.
- The run stops -> it waits for none.
- No node rolls out alone -> all serve both stages in turn from the start.

Moves within a step are none of the plan's: they have no `move_started`, and the planner sees their nodes in both
stages.
"""

from __future__ import annotations

from collections.abc import Callable

from libra_hpc.config.run import RunConfig
from libra_hpc.facts.status import DecisionStatus, StageEstimate
from libra_hpc.mesh.agent_context import AgentContext
from libra_hpc.planning.live_child import PlayerProcess
from libra_hpc.policies.control.borrow_choice import fitting
from libra_hpc.policies.control.move_choice import SWITCHES
from libra_hpc.policies.control.plays import BOTH
from libra_hpc.policies.control.within_step import TAIL, Rest, moves_within_step
from libra_hpc.policies.pool.states import Node, NodeState, TurnsDrained
from libra_hpc.protocol.agents import RolloutReport
from libra_hpc.protocol.engine_state import EngineKind
from libra_hpc.protocol.plan import BorrowFact, NodeFact, OfferFact, PlanDecision

from .decisions import DecisionLog, predicted_gain
from .nodes import NodePool
from .observations import Observations

LIMIT = 3.0
"""Times the slowest of the last switches. Half: one slow switch costs a step its nodes; double: a hung node costs all
others six switches."""
AWAY = (NodeState.LOST, NodeState.STARTING)


class StepSharing:
    """Moves the nodes that serve both stages within each step."""

    def __init__(self, context: AgentContext, nodes: NodePool, observations: Observations) -> None:
        self._context, self._nodes, self._observations = context, nodes, observations
        self.active = "rollout" not in context.layout.components
        self._trains: dict[int, int] = {}
        """Step for which a node was ordered to train; of the core also that in which it was ordered to roll out."""
        self._ordered = 0
        """Newest step for whose complete batch all nodes were ordered."""

    def end(self) -> None:
        """Every node stays where it is."""
        self.active = False
        self._await(())

    def evaluate(self, step: int, now: float) -> None:
        """Order the moves that are due; ``step`` is the last one committed."""
        report = self._observations.report
        if not self.active or report is None:
            return
        if self._ordered <= step:
            self._order(report, step, now)
        # Of a complete batch, only those that were there in time.
        self._await(tuple(node.rank for node in self.hybrid() if self._ordered <= step or node.role == "train"))

    def hybrid(self) -> list[Node]:
        """Hybrid nodes that work, or change their stage."""
        nodes = self._nodes.pool.nodes.values() if self._nodes.pool else ()
        return [node for node in nodes if node.component == "hybrid" and node.state not in AWAY]

    def core_to_train(self, now: float, at_once: bool) -> None:
        """The trainers of the core have something to do; ``at_once``: without the rollout leader."""
        if (core := self._core()) and all(node.state is NodeState.ROLLOUT for node in core):
            self._nodes.move(core[0].rank, "train", now, abort=True)
        for node in self._core() if at_once else ():
            if node.drain:
                self._nodes.apply(TurnsDrained(node.rank))

    def _core(self) -> list[Node]:
        """Nodes of the core, if they roll out, too."""
        return [node for node in self._nodes.pool.nodes.values() if node.shares] if self._nodes.pool else []

    @property
    def ranks(self) -> frozenset[int]:
        """Nodes in time-sharing."""
        return frozenset(node.rank for node in (*self.hybrid(), *self._core())) if self.active else frozenset()

    def facts(self, *, as_shared: bool) -> tuple[NodeFact, ...]:
        """All nodes that train or roll out; ``as_shared``: those in time-sharing as nodes of both stages."""
        assert self._nodes.pool is not None
        both = self.ranks if as_shared else ()
        return tuple(
            NodeFact(
                rank,
                node.component,
                BOTH if rank in both else str(node.state),
                self._nodes.contacts[rank].since,
                unit=node.unit[0],
                shares=node.shares,
            )
            for rank, node in self._nodes.pool.nodes.items()
            if node.component != "env"
        )

    def _order(self, report: RolloutReport, step: int, now: float) -> None:
        config, algorithm = self._context.config, self._context.config.algorithm
        batches = min(algorithm.eta + 1, config.run.steps - step)
        engines = sum(count for _, count, *_ in report.buckets) // max(1, len(report.running))
        rest = Rest(
            complete=report.composed > step,
            admitted=report.joint_version == step and report.outstanding_groups >= batches * algorithm.prompts_per_step,
            trajectories=report.open_trajectories,
            running=dict(report.running),
            fits=min(TAIL, config.rollout.most_inflight) * max(1, engines),
        )
        # Those on their way back from the last step turn round once they are there.
        if rest.complete and not any(node.state is NodeState.TO_ROLLOUT for node in (*self.hybrid(), *self._core())):
            self._ordered = step + 1
        # They go back for what is left where nothing rolls out, as after the loss of an engine.
        last = step + all(row.active != "rollout" for row in self._nodes.layout.rows.values())
        back = frozenset(rank for rank in self.ranks if not rest.complete and self._trains.get(rank, 0) <= last)
        moves = moves_within_step(self.facts(as_shared=False), rest, back)
        self._trains |= dict.fromkeys(moves.to_train, step + 1)
        # Once in a step: a rollout engine of the core that ends starts again with the next batch.
        self._trains |= {node.rank: step + 1 for node in self._core() if node.rank in moves.to_rollout}
        for rank in moves.to_train:
            self._nodes.move(rank, "train", now, abort=True)
        for rank in moves.to_rollout:
            self._nodes.move(rank, "rollout", now)

    def _await(self, ranks: tuple[int, ...]) -> None:
        seen = [s.seconds for s in self._observations.switches if s.direction == "to_train"][-SWITCHES:]
        self._nodes.await_members(ranks, LIMIT * max(*seen, self._context.config.planner.switch_cost_s, 0.0))


class LivePlanning:
    """The planner of one run; ``event(kind, **fields)`` writes to the event log."""

    def __init__(
        self,
        config: RunConfig,
        nodes: NodePool,
        observations: Observations,
        sharing: StepSharing,
        player: PlayerProcess,
        event: Callable[..., None],
    ) -> None:
        self._config, self._nodes, self._observations, self._event = config, nodes, observations, event
        self._sharing = sharing
        self._player = player
        self._decisions = DecisionLog(event)
        self._since = float("-inf")
        self._paying = set[str]()
        """Lenders that were worth their price when they were evaluated last."""
        self.spot_nodes = -1
        """See `Status.spot_nodes`."""

    @property
    def last(self) -> DecisionStatus | None:
        return self._decisions.last

    def decide(self, steps_left: int, now: float) -> PlanDecision:
        """Evaluate the plan and order the moves that it decides; ``now`` in epoch seconds."""
        algorithm, nodes = self._config.algorithm, self._sharing.facts(as_shared=True)
        snapshot = self._observations.snapshot(
            nodes,
            prompts_per_step=algorithm.prompts_per_step,
            group_size=algorithm.group_size,
            eta=algorithm.eta,
            steps_left=steps_left,
            borrow=self._borrow(),
        )
        decision = self._player.decide(snapshot, now)
        self._decisions.add(decision, now)
        if decision.action in ("to_train", "to_rollout"):
            self._move(decision, "train" if decision.action == "to_train" else "rollout", now)
        elif decision.action in ("borrow", "give_back"):
            self.spot_nodes, self._since = decision.spot_nodes, now
            self._paying -= decision.lenders.keys()
            self._paying |= {name for name, (saved_s, needed_s) in decision.lenders.items() if saved_s > needed_s}
        elif decision.action == "time_share":
            self._sharing.active = True
        elif decision.action == "split":
            self._sharing.end()
            for node in nodes:
                if node.role == BOTH:
                    self._nodes.move(node.rank, "train" if node.rank in decision.nodes else "rollout", now)
        return decision

    def _borrow(self) -> BorrowFact | None:
        """Before its first decision, queued nodes of an earlier start may be there."""
        borrow, report = self._config.borrow, self._observations.report
        there = report is not None and any(one.kind == "spot" and one.engines for one in report.lenders)
        if not (borrow.spot.nodes or borrow.lenders):
            return None
        return BorrowFact(
            most=borrow.spot.nodes,
            wanted=self.spot_nodes if self.spot_nodes >= 0 else borrow.spot.nodes * there,
            since=self._since,
            start_s=self._nodes.guests.start_s,
            node_gpus=self._config.components.rollout.gpus,
            offers=tuple(self._offers()),
            taken=frozenset(self._paying),
            most_gpus=borrow.most_gpus,
            gpu_price_s=borrow.least_gain_s,
        )

    def _offers(self) -> list[OfferFact]:
        report = self._observations.report
        given = {one.name: one for one in report.lenders if one.kind == "lender"} if report else {}
        return self._nodes.guests.offers.present(given)

    def takes(self) -> list[str]:
        """See `Status.takes`; without the planner every lender pays."""
        paying = (one for one in self._offers() if one.name in self._paying or not self._config.planner.enabled)
        return [one.name for one in fitting(paying, self._config.borrow.most_gpus)]

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
        numbers = self.last.numbers if self.last else {}
        if (numbers.get("train_nodes"), numbers.get("rollout_nodes")) != (trainers, len(self._nodes.receivers)):
            return None
        return StageEstimate(numbers["train_s"], numbers["rollout_s"], numbers["batch_s"])

    def close(self) -> None:
        self._decisions.close()
        self._player.close()
