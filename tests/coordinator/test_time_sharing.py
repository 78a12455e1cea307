"""Time-sharing at rank 0: orders within a step, for whom the train leader waits, and what the planner is shown."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from libra_hpc.config.load import validate
from libra_hpc.coordinator.live_planning import LIMIT, StepSharing
from libra_hpc.coordinator.nodes import NodePool
from libra_hpc.coordinator.observations import Observations
from libra_hpc.policies.pool import states
from libra_hpc.protocol import agents as wire
from libra_hpc.protocol.layout import Layout
from tests.policies.pool.layout_orders import AwaitMembers, DrainTurns, RestCore, StandbyEngine, StartEngine, all_orders
from tests.stage.node_parts import Outbox


class Scene(Outbox):
    """One core node (1), which may roll out, two hybrid nodes (2, 3) and a rollout node (4), all at work."""

    def __init__(
        self,
        tmp_path: Path,
        core_rolls_out: bool = False,
        eta: int = 0,
        components: tuple[str, ...] = ("planner", "train", "hybrid", "hybrid", "rollout"),
    ) -> None:
        super().__init__()
        self.seen_of: dict[type, int] = {}
        self.step = 0
        config = validate({"algorithm": {"eta": eta, "prompts_per_step": 4}, "planner": {"switch_cost_s": 2.0}})
        context = self.context_of(tmp_path, 0, *components, config=config, core_rolls_out=core_rolls_out)
        self.seen = Observations()
        self.nodes = NodePool(context, lambda kind, **fields: None, self.seen.on_switch, lambda: 0)
        self.nodes.start("rollout")
        for rank in range(1, len(components)):
            self.nodes.apply(states.EnginesAre(rank, "train" if rank == 1 else "rollout", "ready"))
        self.member(1, 1)
        self.sharing = StepSharing(context, self.nodes, self.seen)
        self.sharing.active |= "rollout" in components

    def member(self, generation: int, *ranks: int) -> None:
        for rank in ranks:
            self.nodes.apply(states.StateArrived(rank))
        for rank in ranks:
            self.nodes.apply(states.MemberOf(rank, generation))

    def report(self, left: int, composed: int = 0, beside: int = 0, **running: int) -> None:
        """``left`` unfinished trajectories; ``beside``: groups admitted beyond the batch."""
        report = wire.RolloutReport(
            joint_version=self.step,
            outstanding_groups=beside + (0 if composed > self.step else 4),
            open_trajectories=left,
            composed=composed,
            running=tuple((int(rank[1:]), turns) for rank, turns in running.items()),
        )
        self.seen.on_rollout(report, self.nodes.receivers, float(self.step))
        self.sharing.evaluate(self.step, time.time())

    def trains(self, *ranks: int) -> None:
        """They were drained, and their trainers are ready."""
        for rank in ranks:
            self.nodes.apply(states.TurnsDrained(rank))
            self.nodes.apply(states.EnginesAre(rank, "train", "ready"))

    def core_rolls(self) -> None:
        """The trainers of node 1 are in standby, and its engines ready."""
        self.nodes.apply(states.EnginesAre(1, "train", "standby"))
        self.nodes.apply(states.EnginesAre(1, "rollout", "ready"))

    def orders(self, kind: type) -> list[Any]:
        """New orders of a kind in the Layouts that node 1 got."""
        layouts = [message for rank, message in self.sent if rank == 1 and isinstance(message, Layout)]
        found = [order for order in all_orders(layouts) if isinstance(order, kind)]
        seen, self.seen_of[kind] = self.seen_of.get(kind, 0), len(found)
        return found[seen:]

    @property
    def states(self) -> str:
        assert self.nodes.pool is not None
        return " ".join(node.state for node in self.nodes.pool.nodes.values())


def test_hybrid_nodes_go_to_training_as_the_batch_ends_and_back_after_its_step(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.report(99, r2=30, r3=30, r4=30)
    assert scene.orders(AwaitMembers) == [AwaitMembers((2, 3), LIMIT * 2.0)]
    assert not scene.orders(DrainTurns)
    scene.report(16, r2=9, r3=0, r4=7)
    assert scene.orders(DrainTurns) == [DrainTurns(3, abort=True)], "the idler one; turns go on elsewhere"
    assert [fact.role for fact in scene.sharing.facts(as_shared=True)] == ["train", "both", "both", "rollout"]
    scene.trains(3)
    scene.member(2, 1, 3)
    scene.report(9, r2=5, r4=4)
    assert scene.states == "train rollout train rollout", "the one that trains waits for the batch"
    scene.report(0, composed=1)
    assert scene.orders(DrainTurns) == [DrainTurns(2, abort=True)]
    scene.trains(2)
    scene.member(3, 1, 2, 3)
    scene.report(0, composed=1)
    assert scene.states == "train train train rollout"
    assert not scene.orders(AwaitMembers), "it waits for the same two"

    scene.step = 1
    scene.sharing.evaluate(1, time.time())
    assert scene.states == "train to_rollout to_rollout rollout"
    scene.member(5, 1)
    scene.nodes.apply(states.EnginesAre(2, "rollout", "ready"))
    scene.nodes.apply(states.EnginesAre(3, "rollout", "ready"))
    scene.report(99, composed=1, r2=30, r3=30, r4=30)
    assert scene.states == "train rollout rollout rollout"
    assert [s.direction for s in scene.seen.switches] == ["to_train"] * 2 + ["to_rollout"] * 2, "each was measured"


def test_with_a_staleness_bound_nodes_train_a_complete_batch_while_others_roll_on(tmp_path: Path) -> None:
    scene = Scene(tmp_path, eta=1)
    scene.report(16, beside=3, r2=9, r3=0, r4=7)
    assert not scene.orders(DrainTurns), "a group of the batch beside it is still to begin"
    scene.report(99, composed=1, beside=4, r2=30, r3=30, r4=30)
    assert [(order.rank, order.abort) for order in scene.orders(DrainTurns)] == [(2, True), (3, True)]
    scene.trains(2, 3)
    scene.member(3, 1, 2, 3)
    scene.step = 1
    scene.report(60, composed=2, beside=4, r4=60)
    assert scene.states == "train train train rollout", "one pair of switches for both batches"
    scene.step = 2
    scene.report(50, composed=2, beside=2, r4=50)
    assert scene.states == "train to_rollout to_rollout rollout"
    scene.orders(DrainTurns)
    scene.report(30, composed=3, beside=2, r4=30)
    assert scene.orders(AwaitMembers)[-1].ranks == (2, 3), "they turn round for a batch that is complete already"
    scene.member(5, 1)
    for rank in (2, 3):
        scene.nodes.apply(states.EnginesAre(rank, "rollout", "ready"))
        scene.report(30, composed=3, beside=2, r4=30)
    assert [order.rank for order in scene.orders(DrainTurns)] == [2, 3]


def test_a_node_that_is_lost_or_too_late_is_not_waited_for(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.report(99, r2=30, r3=30, r4=30)
    scene.nodes.apply(states.RankLost(2))
    scene.report(0, composed=1)
    assert [sorted(m.ranks) for m in scene.orders(AwaitMembers)] == [[2, 3], [3]]
    scene.nodes.apply(states.RankBack(2))
    scene.nodes.apply(states.EnginesAre(2, "rollout", "ready"))
    scene.report(0, composed=1)
    assert scene.states == "train rollout to_train rollout", "the step has begun, or will without it"
    assert not scene.orders(AwaitMembers)

    scene.step = 1  # without node 3, which comes too late
    scene.trains(3)
    scene.member(2, 1, 3)
    scene.report(99, composed=1, r2=30, r4=30)
    assert scene.states == "train rollout to_rollout rollout"


def test_the_end_of_time_sharing_waits_for_nobody_and_moves_nothing(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.report(99, r2=30, r3=30, r4=30)
    scene.sharing.end()
    scene.report(0, composed=1)
    assert [m.ranks for m in scene.orders(AwaitMembers)] == [(2, 3), ()]
    assert scene.states == "train rollout rollout rollout"
    assert [fact.role for fact in scene.sharing.facts(as_shared=True)] == ["train", "rollout", "rollout", "rollout"]


def test_a_core_that_rolls_out_goes_after_the_commit_and_is_back_before_the_batch_ends(tmp_path: Path) -> None:
    scene = Scene(tmp_path, core_rolls_out=True)
    scene.report(99, r2=30, r3=30, r4=30)
    assert len(scene.orders(RestCore)) == 1
    scene.core_rolls()
    assert scene.states == "rollout rollout rollout rollout"
    assert [fact.role for fact in scene.sharing.facts(as_shared=True)] == ["both", "both", "both", "rollout"]
    scene.report(23, r1=9, r2=9, r3=9, r4=9)
    assert scene.orders(DrainTurns) == [DrainTurns(1, abort=True)], "first, although others are as idle"
    scene.trains(1)
    scene.member(2, 1)
    scene.report(23, r2=9, r3=9, r4=9)
    assert scene.states == "train rollout rollout rollout", "once in a step"
    assert [s.direction for s in scene.seen.switches] == ["to_rollout", "to_train"]

    scene.sharing.core_to_train(time.time(), at_once=False)
    assert not scene.orders(DrainTurns), "it trains"
    scene.step = 1
    scene.report(99, composed=1, r2=30, r3=30, r4=30)
    scene.nodes.apply(states.EnginesAre(1, "train", "standby"))
    scene.sharing.core_to_train(time.time(), at_once=False)
    assert not scene.orders(DrainTurns), "its engines are not there yet"
    scene.nodes.apply(states.EnginesAre(1, "rollout", "ready"))
    scene.sharing.core_to_train(time.time(), at_once=False)
    assert scene.orders(DrainTurns) == [DrainTurns(1, abort=True)]
    # The rollout leader, which would answer, may be lost.
    scene.sharing.core_to_train(time.time(), at_once=True)
    assert scene.orders(StandbyEngine)[-1] == StandbyEngine(1, "rollout")
    assert scene.orders(StartEngine)[-1] == StartEngine(1, "train")


def test_all_nodes_serve_both_stages_from_the_start_where_none_rolls_out_alone(tmp_path: Path) -> None:
    scene = Scene(tmp_path, core_rolls_out=True, eta=1, components=("planner", "train", "hybrid"))
    scene.report(99, r2=30)
    scene.core_rolls()
    scene.report(20, composed=1, beside=4, r1=10, r2=10)
    assert scene.orders(DrainTurns) == [DrainTurns(1, abort=True), DrainTurns(2, abort=True)], "also with open turns"
    scene.trains(1, 2)
    scene.member(3, 1, 2)
    assert (scene.states, scene.nodes.droppable, scene.nodes.replicas) == ("train train", {}, frozenset()), "2 leads"
    scene.step = 1
    scene.report(20, composed=1, beside=4)
    assert scene.states == "to_rollout to_rollout"
