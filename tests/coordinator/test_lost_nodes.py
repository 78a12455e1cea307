"""Nodes that fall silent, end or lose a connection: who counts as lost, who is taken back, when all ranks restart."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec
import pytest

from libra_hpc.agent import coordinator_watch
from libra_hpc.agent.coordinator_watch import CoordinatorWatch
from libra_hpc.config.load import validate
from libra_hpc.coordinator.liveness import HEARTBEAT_LOST_S, LEADER_LOST_S, NodeContact, discount, lost_nodes
from libra_hpc.facts.rundir import read_lines
from libra_hpc.facts.status import decode_status
from libra_hpc.protocol.agents import Fatal, Heartbeat, Log, StopAgent
from libra_hpc.protocol.engine_state import EngineKind
from libra_hpc.protocol.layout import Layout, StopTraining
from libra_hpc.protocol.ranks_stop import RanksStop
from tests.policies.pool.layout_orders import RankBack, RankLost, StartEngine

from .test_coordinator import Scene, first_beat, run_until_over, trains


def silence(scene: Scene, rank: int, now: list[float], seconds: float) -> None:
    """Every node but one is heard, ``seconds`` later."""
    now[0] += seconds
    scene.deliver(*((other, Heartbeat(other, "", {}, -1)) for other in range(4) if other != rank))
    scene.coordinator._check(now[0])


@pytest.mark.parametrize(("kind", "returns"), [("env", True), ("rollout", False)])
def test_a_node_whose_hosts_end_too_often_is_lost_alone_and_for_good_if_its_engines_are_closed(
    now: list[float], scene: Scene, kind: EngineKind, returns: bool
) -> None:
    scene.engines(2, kind, "closed", reason="2.0 ended 6 times in 300 s")
    assert (scene.coordinator.state, scene.asked(RankLost)) == ("running", [RankLost(2)])
    assert scene.coordinator.nodes.takes_back(2) is returns


def test_a_silent_node_is_lost_and_taken_back_as_a_new_one_when_it_is_heard_again(
    now: list[float], scene: Scene
) -> None:
    silence(scene, 2, now, HEARTBEAT_LOST_S + 1)
    assert scene.coordinator.state == "running"
    assert scene.asked(RankLost) == [RankLost(2)]
    assert {rank for rank, m in scene.orders(Layout) if m.rows[2].life} == {0, 1, 3}, "it may be gone"
    scene.clear()
    assert scene.coordinator.nodes.takes_back(2)
    scene.coordinator.nodes.request_reset(2)
    assert [m.rows[2].life for rank, m in scene.orders(Layout) if rank == 2] == [1]
    scene.deliver((2, Heartbeat(2, "", {}, -1)))
    assert not scene.asked(StartEngine), "its engines of before have to end first"
    scene.deliver((2, first_beat(2, "hybrid", life=1)))
    assert scene.asked(RankBack) == [RankBack(2)]
    assert scene.asked(StartEngine) == [StartEngine(2, "rollout")]
    assert scene.orders(Layout)[-1][1].rows[2].state == "starting"


def test_a_spare_node_replaces_one_that_slurm_sets_down_even_if_it_fell_silent_before(
    tmp_path: Path, now: list[float]
) -> None:
    for spare, replaceable in ((0, 4), (1, 2), (1, 4)):
        scene = Scene(tmp_path / f"{spare}{replaceable}")
        scene.coordinator._given = msgspec.structs.replace(scene.coordinator._given, spare=spare)
        scene.coordinator._replaceable = replaceable
        silence(scene, 2, now, HEARTBEAT_LOST_S + 1)
        scene.context.ended = {2: ""}
        silence(scene, 2, now, 1.0)
        assert not scene.stop, "the run goes on without a node that may come back"
        scene.context.ended = {2: "Slurm set node a800-2 down"}
        for _ in range(2):
            silence(scene, 2, now, 1.0)
        assert scene.stop == (StopTraining("recovery") if spare and replaceable > 2 else None)
        assert scene.asked(RankLost) == [RankLost(2)]


def test_a_node_that_is_lost_again_and_again_is_quarantined_and_named(now: list[float], scene: Scene) -> None:
    nodes, waited = scene.coordinator.nodes, []
    while not nodes.quarantined:
        silence(scene, 2, now, HEARTBEAT_LOST_S + 1)
        began = now[0]
        while not (taken := nodes.takes_back(2)) and not nodes.quarantined:
            now[0] += 1.0
        waited.append(now[0] - began)
        if taken:
            nodes.request_reset(2)
            scene.deliver((2, first_beat(2, "hybrid", nodes.layout.rows[2].life)))
    assert waited == [0.0, 30.0, 60.0, 60.0, 0.0]
    assert not nodes.takes_back(2)
    run_until_over(scene, scene.context.config.run.steps)
    sentence = "node 2 is quarantined: lost 5 times in an hour"
    assert [e["reason"] for e in read_lines(scene.run.events) if e["kind"] == "node_quarantined"] == [sentence]
    assert decode_status(scene.run.status.read_bytes()).notices.count(sentence) == 1


async def test_the_end_of_the_coordinators_process_ends_the_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_watch, "CHECK_S", 0.01)
    monkeypatch.setattr(coordinator_watch, "QUIET_S", 0.0)
    lost = {1}
    watch = CoordinatorWatch(lost.__contains__)
    watch.seen()
    ending = asyncio.create_task(watch.gone())
    assert not (await asyncio.wait({ending}, timeout=0.2))[0]
    time.sleep(1.2)  # this process is stopped, and reads first what came meanwhile
    watch.seen()
    lost.add(0)
    await asyncio.wait_for(ending, 1.0)


def test_a_node_whose_end_the_owner_saw_is_lost_at_once(now: list[float], scene: Scene) -> None:
    scene.context.ended = {2: ""}
    scene.coordinator._check(now[0])
    assert scene.asked(RankLost) == [RankLost(2)]


def test_the_status_names_a_lost_node_once_nobody_waits_for_it(now: list[float], scene: Scene) -> None:
    silence(scene, 2, now, HEARTBEAT_LOST_S + 1)
    found = [scene.coordinator.nodes.going_on(now[0] + later_s) for later_s in (0.0, 121.0)]
    scene.context.ended = {2: "Slurm set it down"}
    named = "node h is lost: going on with 2 of 3 nodes"
    assert [*found, scene.coordinator.nodes.going_on(now[0])] == ["", named, named]


@pytest.mark.parametrize(("leader", "stage"), [(1, "training"), (3, "rollout")])
def test_all_ranks_end_when_a_leader_is_lost(now: list[float], scene: Scene, leader: int, stage: str) -> None:
    silence(scene, leader, now, HEARTBEAT_LOST_S + 1)
    assert scene.coordinator.state == "running", "a restart of all costs more than some more patience"
    silence(scene, leader, now, LEADER_LOST_S)
    if leader == 3:
        assert scene.stop == StopTraining("recovery"), "no step is lost where training can save"
        scene.deliver((1, trains(done=7)))
    run_until_over(scene)
    assert scene.end.why == "lost"
    assert scene.end.sentence.startswith(f"node {leader}, which leads {stage}, was lost (no heartbeat for")


def test_all_ranks_restart_when_a_further_node_of_the_core_is_lost(tmp_path: Path, now: list[float]) -> None:
    scene = Scene(tmp_path, components=("planner", "train", "train", "rollout"))
    silence(scene, 2, now, LEADER_LOST_S + 1)
    run_until_over(scene)
    assert not scene.stop, "nobody has the whole state to save"
    assert scene.end.why == "lost"
    assert scene.end.sentence.startswith("node 2, which has a part of the trainers, was lost (no heartbeat for")


def test_time_in_which_rank_0_was_stopped_is_no_silence_of_others() -> None:
    nodes = {rank: NodeContact(1000.0) for rank in range(3)}
    for node in nodes.values():
        node.pid = 1
    assert discount(nodes, 1.1, 1.0, 1001.1) == 0.0
    assert discount(nodes, 31.0, 1.0, 1031.0) == 30.0
    assert not lost_nodes(nodes, 0, (1,), {}, 1031.0)
    assert [lost.rank for lost in lost_nodes(nodes, 0, (1,), {}, 1051.0)] == [2]


SAW = "its agent's process ended"


@pytest.mark.parametrize(
    ("reports", "lost"),
    [
        ({1: (2,)}, {2: 1}),
        ({2: (1,)}, {2: 1}),
        ({4: (2,)}, {2: 4}),
        ({2: (0,)}, {2: 0}),
        ({1: (0,)}, {1: 0}),
        ({0: (1,)}, {1: 0}),
        ({0: (2,), 1: (2,), 4: (2,), 2: (4, 1, 0)}, {2: 4}),
        ({2: (4, 0)}, {2: 0}),
        ({2: (4,), 5: (4,)}, {4: 5}),
        ({2: (1, 3)}, {2: 3}),
        ({3: (1,)}, {1: 3}),
        ({3: (1,), 0: (3,)}, {3: 1}),
        ({1: (2,), 3: (4,)}, {2: 1, 4: 3}),
    ],
)
def test_of_the_ends_of_a_broken_connection_the_cheaper_goes_then_the_one_with_more_of_them(
    reports: dict[int, tuple[int, ...]], lost: dict[int, int]
) -> None:
    """Rank 0 never; 1 and 3 lead."""
    found = {silent.rank: silent.reason for silent in lost_nodes(reporting(reports), 0, (1, 3), {}, 1010.0)}
    assert found == {rank: f"its connection to node {other} broke" for rank, other in lost.items()}


def reporting(reports: dict[int, tuple[int, ...]]) -> dict[int, NodeContact]:
    nodes = {rank: NodeContact(1000.0) for rank in range(6)}
    for rank, node in nodes.items():
        node.pid, node.seen = 10 + rank, 1010.0
        node.beat = Heartbeat(rank, "", {}, 0, reports.get(rank, ()))
    return nodes


@pytest.mark.parametrize(
    ("reporter", "gone", "now", "lost"),
    [
        (1, {3: ""}, 1010.0, {2: "its connection to node 1 broke", 3: SAW}),
        (3, {3: ""}, 1010.0, {3: SAW}),
        (1, {}, 1016.0, {}),
        (1, {2: ""}, 1010.0, {2: SAW}),
        (1, {2: "Slurm set node a800-3 down"}, 1010.0, {2: "Slurm set node a800-3 down"}),
        (1, {}, 1004.0, {}),
    ],
    ids=["two", "last words of one that died", "of one that is silent", "known", "known and down", "just taken back"],
)
def test_old_words_and_known_losses_say_nothing_of_a_connection(
    reporter: int, gone: dict[int, str], now: float, lost: dict[int, str]
) -> None:
    found = lost_nodes(reporting({reporter: (2,)}), 0, (1,), gone, now)
    assert {silent.rank: silent.reason for silent in found} == lost


@pytest.mark.parametrize(("waits", "rank", "lost"), [(True, 1, True), (False, 1, False), (True, 2, False)])
def test_a_replica_goes_before_trainers_of_the_core_that_wait_for_peers(
    tmp_path: Path, now: list[float], waits: bool, rank: int, lost: bool
) -> None:
    scene = Scene(tmp_path, config=validate({"planner": {"hybrid_start": "train"}}))
    for one in (1, 2):
        scene.engines(one, "train")
    reason = f"t{rank}.0: join has not ended after 90 s (limit 180 s); it waits for peers"
    for _ in range(2):  # each process reports it
        scene.deliver((rank, Log("slow", 1.0, {"rank": rank, "part": "t1", "reason": reason, "waits": waits})))
    assert scene.asked(RankLost) == [RankLost(2)] * lost
    assert scene.coordinator.state == "running"


def test_a_defect_of_an_agent_or_of_rank_0_itself_asks_for_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path / "agent")
    scene.deliver((3, Fatal(3, "MemoryError: ", restart=True, defect=True)))
    run_until_over(scene)
    assert scene.end == RanksStop("defect", "node 3: MemoryError: ", 0)
    scene = Scene(tmp_path / "rank-0")

    def raises(now: float) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(scene.coordinator, "_check", raises)
    run_until_over(scene)
    assert scene.end == RanksStop("defect", "node 0: RuntimeError: can't start new thread", 0)
    assert [order.restart for _, order in scene.orders(StopAgent)] == [True] * 3
