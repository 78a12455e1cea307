"""Guests at rank 0: who is told of them, and that nothing of the run's own nodes changes."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from libra_hpc.config.load import validate
from libra_hpc.coordinator.liveness import HEARTBEAT_LOST_S
from libra_hpc.protocol.agents import Fatal, Heartbeat, LenderReport, RolloutReport, StopAgent
from libra_hpc.protocol.engine_state import ObservedEngine
from libra_hpc.protocol.joining import FIRST_GUEST, GONE_S, RANKS_OF_A_START, JoinWanted
from libra_hpc.protocol.layout import Layout
from tests.policies.pool.layout_orders import DrainTurns, RankLost, StartEngine

from .test_coordinator import Scene

GUEST = FIRST_GUEST
HERE = JoinWanted("g", ("10.0.0.9",), 7)


def opened(tmp_path: Path) -> Scene:
    """A run in which own engines serve, and whose door is open."""
    scene = Scene(tmp_path)
    scene.engines(3, "rollout")
    scene.coordinator.nodes.guests.open(FIRST_GUEST + RANKS_OF_A_START)
    return scene


def with_guest(tmp_path: Path) -> Scene:
    """... and a guest that serves."""
    scene = opened(tmp_path)
    assert scene.coordinator.nodes.guests.admit(HERE, 0.0) == GUEST
    scene.coordinator.nodes.publish()
    scene.deliver((GUEST, Heartbeat(GUEST, "guest", {}, -1, host="g", pid=9)))
    scene.engines(GUEST, "rollout")
    return scene


def leaving(reason: str) -> Heartbeat:
    return Heartbeat(GUEST, "guest", {}, -1, leaving=reason)


def test_a_guest_is_announced_to_those_that_send_to_it_and_gets_new_weights_once_it_serves(tmp_path: Path) -> None:
    scene = with_guest(tmp_path)
    assert scene.orders(Layout)[-1][1].rows[GUEST].guest == ("g", ("10.0.0.9",), 7)
    assert scene.orders(Layout)[-1][1].start == scene.context.resume_point
    assert scene.orders(Layout)[-1][1].receivers == (3, GUEST)
    assert GUEST in [rank for rank, _ in scene.orders(Layout)]
    assert scene.coordinator.nodes.receivers == (3,), "nothing that the planner sees has it"
    assert scene.coordinator.nodes.layout.rows[GUEST].starts == 0, "the first start is its own"


def test_a_guest_that_leaves_hands_its_turns_on_first_and_its_rank_is_not_used_again(tmp_path: Path) -> None:
    scene = with_guest(tmp_path)
    scene.clear()
    scene.deliver((GUEST, leaving("it got SIGTERM")), (GUEST, leaving("again")))
    assert scene.asked(DrainTurns) == [DrainTurns(GUEST, abort=True)]
    assert not scene.orders(StopAgent)
    scene.drained(GUEST)
    assert [rank for rank, _ in scene.orders(StopAgent)] == [GUEST]
    assert scene.asked(RankLost) == [RankLost(GUEST)]
    scene.deliver((3, Heartbeat(3, "rollout", {}, -1, drained={GUEST: 0})), (GUEST, Heartbeat(GUEST, "guest", {}, 0)))
    assert scene.coordinator.nodes.guests.admit(HERE, 0.0) == GUEST + 1


def test_a_guest_that_returns_sleeps_without_weights_and_starts_again_or_is_stopped(tmp_path: Path) -> None:
    scene = with_guest(tmp_path)
    guests = scene.coordinator.nodes.guests
    taken_back = msgspec.structs.replace(leaving("its owner takes it back"), returns=True)
    scene.deliver((GUEST, taken_back))
    scene.drained(GUEST)
    assert (guests.states[GUEST], guests.rows[GUEST].active, guests.serving) == ("standby", None, ())
    ended = {f"rollout{GUEST}": ObservedEngine("rollout", "lost", ends=1)}
    scene.deliver((GUEST, msgspec.structs.replace(taken_back, engines=ended)))
    assert guests.rows[GUEST].active is None, "nothing starts on a device that was taken back"
    scene.deliver((GUEST, Heartbeat(GUEST, "guest", {}, 0)))
    row = guests.rows[GUEST]
    assert (guests.states[GUEST], row.active, row.starts, row.drain) == ("starting", "rollout", 1, "")
    scene.engines(GUEST, "rollout")
    assert guests.serving == (GUEST,)
    scene.deliver((GUEST, taken_back))
    scene.drained(GUEST)
    assert not scene.orders(StopAgent)
    scene.deliver((GUEST, leaving("it got SIGTERM")))
    assert [rank for rank, _ in scene.orders(StopAgent)] == [GUEST]


def test_the_loss_of_a_guest_is_an_event_and_no_failure_of_the_run(tmp_path: Path) -> None:
    for fault in ("silent", "broken", "fatal"):
        scene = with_guest(tmp_path)
        guests = scene.coordinator.nodes.guests
        now = guests.contacts[GUEST].seen + 1.0
        scene.clear()
        if fault == "silent":
            guests.check(set(), now + HEARTBEAT_LOST_S)
        elif fault == "broken":
            scene.deliver((3, Heartbeat(3, "rollout", {}, 0, unreachable=(GUEST,))))
            scene.coordinator.nodes.find_lost({}, now)
            scene.coordinator.nodes.check_guests(now)
        else:
            scene.deliver((GUEST, Fatal(GUEST, "engine r10000.0 ended 3 times", restart=True, defect=True)))
        assert not guests.contacts, fault
        scene.coordinator.nodes.publish()
        assert scene.asked(RankLost) == [RankLost(GUEST)], fault
        assert scene.coordinator.state == "running", fault
        assert scene.coordinator.nodes.starting >= {1, 2}, "own nodes are as they were"


def test_a_lost_engine_of_a_guest_is_started_again(tmp_path: Path) -> None:
    scene = with_guest(tmp_path)
    scene.engines(GUEST, "rollout", "lost", ends=1)
    assert scene.asked(StartEngine)[-1] == StartEngine(GUEST, "rollout")
    assert scene.coordinator.nodes.guests.serving == ()


def test_nobody_joins_before_the_door_is_open_or_beyond_the_ranks_of_a_start(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    guests = scene.coordinator.nodes.guests
    assert guests.admit(HERE, 0.0) == "its ranks are starting"
    guests.open(FIRST_GUEST + RANKS_OF_A_START)
    ranks = [guests.admit(HERE, 0.0) for _ in range(RANKS_OF_A_START)]
    assert ranks == list(range(FIRST_GUEST, FIRST_GUEST + RANKS_OF_A_START))
    assert isinstance(guests.admit(HERE, 0.0), str)


def test_windows_of_the_planner_count_while_guests_come_and_go(tmp_path: Path) -> None:
    scene = opened(tmp_path)
    seen = scene.coordinator._observations
    nodes = scene.coordinator.nodes.receivers
    for second in range(4):
        if second == 2:
            assert scene.coordinator.nodes.guests.admit(HERE, 0.0) == GUEST
            scene.coordinator.nodes.publish()
            scene.engines(GUEST, "rollout")
        assert scene.coordinator.nodes.receivers == nodes
        report = RolloutReport(generated_tokens=100 * second, guest_tokens=1000 * second, buckets=((1, 1, 0, 0, 0.0),))
        seen.on_rollout(report, nodes, 10.0 + second)
    assert [window.generated for window in seen.windows] == [100, 100, 100]
    assert seen.tokens() == (3300, 0)


def test_offers_that_are_renewed_are_taken_up_to_the_gpus_that_the_run_wants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"planner": {"enabled": False}, "borrow": {"lenders": "any", "most_gpus": 3}}
    scene = Scene(tmp_path, config=validate(values))
    offers, planning, now = scene.coordinator.nodes.guests.offers, scene.coordinator._planning, [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    scene.run.offers.mkdir()
    for name, offer in {"a": "[0,1]", "b": "[2,1]", "c": "[4,1]", "torn": "[1", "none": "[0,0]"}.items():
        (scene.run.offers / f"{name}.json").write_text(offer)
    offers.read()
    assert planning.takes() == ["a", "b"], "an engine of the run has one GPU"
    now[0] += GONE_S
    (scene.run.offers / "b.json").write_text("[1,1]")
    (scene.run.offers / "a.json").chmod(0o666)
    offers.read()
    assert planning.takes() == ["b"], "a is not renewed"
    lends = LenderReport(name="a", kind="lender", engines=1, share=1.0, mean_share=0.5, turns=1, tokens=1)
    scene.coordinator._observations.report = RolloutReport(lenders=(lends,))
    assert planning.takes() == ["a", "b"], "but its guest is there"
    (scene.run.offers / "a.json").chmod(0o600)
    offers.read()
    assert {path.stem for path in scene.run.offers.iterdir()} == {"a", "b", "torn", "none"}, "c is over"
