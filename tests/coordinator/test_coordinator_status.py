"""The coordinator without nodes: what its status says."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from libra_hpc.config.load import validate
from libra_hpc.coordinator.records import NOTICE_S, NOTICES, Notices
from libra_hpc.facts.rundir import read_lines
from libra_hpc.facts.status import StageEstimate, StepAccuracy, decode_status
from libra_hpc.protocol.agents import Fatal, MemberJoined, RolloutReport
from libra_hpc.protocol.plan import PlanDecision
from tests.protocol.step_reports import step_report

from .test_coordinator import Scene, run_until_over, trains


def test_every_step_is_written_with_the_estimate_of_its_split_and_the_status_shows_both(tmp_path: Path) -> None:
    scene = Scene(tmp_path, config=validate({"run": {"steps": 6}}))
    scene.engines(1, "train")
    scene.deliver((1, trains(joined=(MemberJoined(1, 1, 0, 0, 0.1),))))
    for rank in (2, 3):
        scene.engines(rank, "rollout")
    # One trainer and two rollout nodes; then an estimate of a split that is no longer the present one, as after a move.
    for step in range(1, 7):
        split = (1, 2) if step < 5 else (2, 1)
        if step > 1:
            seconds = {"train_s": 1.5, "rollout_s": 2.0, "batch_s": 2.0}
            numbers = {"train_nodes": float(split[0]), "rollout_nodes": float(split[1]), **seconds}
            scene.coordinator._planning._decisions.add(PlanDecision("hold", -1, "hold: measured", numbers), 0.0)
        scene.deliver((1, step_report(step, step_s=2.5, wait_s=0.5, train_nodes=1)))
        if step == 4:
            shown = scene.status()
            assert shown.estimate == StageEstimate(1.5, 2.0, 2.0)
            assert shown.accuracy == StepAccuracy(3, 2.0, 2.5, pytest.approx(0.2))
    run_until_over(scene, 6)
    assert [row["expected_s"] for row in read_lines(scene.run.metrics)] == [None, 2.0, 2.0, 2.0, None, None]
    assert decode_status(scene.run.status.read_bytes()).estimate is None


def test_why_admission_is_paused_is_the_message_while_the_run_runs(scene: Scene) -> None:
    why = "9 of the last 9 trajectories failed."
    report = RolloutReport(failures=(("raised", 9, "KeyError: 'x'"),), paused=why)
    scene.deliver((3, report))
    status = scene.status()
    assert status.message == "9 of the last 9 trajectories failed; starting engines"
    assert (status.paused, [(found.kind, found.count) for found in status.failures]) == (why, [("raised", 9)])
    scene.deliver((1, Fatal(3, "gone")))
    run_until_over(scene)
    status = decode_status(scene.run.status.read_bytes())
    assert (status.state, status.message) == ("failed", "node 3: gone")


def test_the_status_names_a_slow_engine_with_its_node(scene: Scene) -> None:
    since = time.mktime((2026, 3, 4, 12, 3, 0, 0, 0, -1))
    report = RolloutReport(slow=(("r3.1", 3, 2.44, since),))
    scene.deliver((3, report))
    status = scene.status()
    host = next(node.host for node in status.nodes if node.rank == 3)
    assert status.slow == [f"engine r3.1 ({host}) takes 2.4x its class' time per step since 12:03"]
    scene.deliver((1, Fatal(3, "gone")))
    run_until_over(scene)


def test_a_late_step_is_an_event_once(scene: Scene) -> None:
    now = time.time()
    for later in (0.0, 500.0, 501.0):
        scene.coordinator._check_progress(now + later)
    assert scene.coordinator._records._facts.flush(10.0)
    late = [event for event in read_lines(scene.run.events) if event["kind"] == "step_late"]
    assert [event["reason"] for event in late] == ["no step for 480 s: node 1 is starting"]
    scene.deliver((1, Fatal(3, "gone")))
    run_until_over(scene)


@pytest.mark.parametrize(("step", "least_s"), [(59, 0.0), (60, 100.0)])
def test_the_checkpoint_of_the_last_step_may_wait_for_room_as_long_as_for_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, least_s: float
) -> None:
    config = validate({"run": {"steps": 60}, "deadlines": {"storage_s": 100.0}})
    scene, found = Scene(tmp_path, step=step, config=config), list[float]()
    monkeypatch.setattr(scene.coordinator._ladder, "evaluate", lambda run, now: found.append(run.least_s))
    scene.coordinator._check_progress(time.time())
    assert found == [least_s]
    run_until_over(scene, 60)


def test_a_notice_that_comes_again_is_counted_and_leaves_room_for_others() -> None:
    notices = Notices()
    notices.add("host_lost", 10.0, {"reason": "killed", "host": "host0"})
    for number in range(2 * NOTICES):
        notices.add("node_lost", 11.0 + number, {"rank": 2, "reason": f"no message for {number + 12.5} s"})
    notices.add("node_lost", 40.0, {"rank": 3, "reason": "no message for 12.0 s"})
    last = 2 * NOTICES + 11.5
    assert notices.recent(41.0) == [
        "node 3: node lost: no message for 12.0 s",
        f"node 2: node lost: no message for {last} s ({2 * NOTICES} times)",
        "host lost: killed",
    ]
    notices.add("node_lost", 41.0 + NOTICE_S, {"rank": 3, "reason": "no message for 13.0 s"})
    assert notices.recent(42.0 + NOTICE_S) == ["node 3: node lost: no message for 13.0 s"], "that was long ago"
