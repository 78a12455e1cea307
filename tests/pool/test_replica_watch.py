from __future__ import annotations

from libra_hpc.pool.replica_watch import FRESH_S, ReplicaWatch
from libra_hpc.process.deadlines import DeadlineSettings
from libra_hpc.protocol.trainer import Alive, Join, Joined, StepDone, StepFailed, TrainStep, WorkerError

SETTINGS = DeadlineSettings(floor_s=60.0, first_s=600.0, factor=10.0)
JOIN, STEP = Join(1, 0, 2, "/meet"), TrainStep(1, 1, (), ())
DONE = StepDone(1, 1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0, 0.0, 0.0, 0.0)


def trained(seconds: float = 1.0) -> ReplicaWatch:
    """Of a replica whose first step took so long."""
    watch = ReplicaWatch(SETTINGS)
    watch.asked(STEP, 0.0)
    watch.answered(DONE, seconds)
    return watch


def alive(watch: ReplicaWatch, phase: str, now: float, processes: int = 2) -> None:
    for process in range(processes):
        watch.alive(process, Alive(phase, 1.0), now)


def test_a_replica_that_computes_too_long_is_late_once_and_then_hung() -> None:
    watch = trained(seconds=8.0)
    watch.asked(STEP, 100.0)
    seen = []
    for second in range(100, 182):
        alive(watch, "compute", float(second))
        seen += [(second, sentence) for sentence in watch.late(float(second))]
        assert (watch.hung(float(second)) != "") == (second > 180)
    assert seen == [(141, "train step has not ended after 41 s (limit 80 s)")]
    assert watch.hung(181.0) == "train step has not ended after 81 s (limit 80 s), in phase: compute"


def test_a_replica_that_waits_for_peers_has_three_times_as_long() -> None:
    watch = trained()
    watch.asked(STEP, 0.0)
    alive(watch, "waiting for peers", 100.0)
    assert watch.hung(100.0) == ""
    watch.alive(1, Alive("compute", 90.0), 100.0)
    assert watch.hung(100.0) != "", "one of its processes keeps the others waiting"
    alive(watch, "waiting for peers", 100.0)
    assert watch.hung(100.0 + FRESH_S + 1.0) != "", "that it waited a while ago does not excuse it now"
    alive(watch, "waiting for peers", 181.0)
    assert watch.hung(181.0) != ""


def test_a_process_that_is_stopped_is_late_and_hung_long_before_an_unmeasured_order_is() -> None:
    watch = ReplicaWatch(SETTINGS)
    watch.asked(JOIN, 0.0)
    alive(watch, "compute", 10.0)
    watch.alive(0, Alive("compute", 1.0), 70.0)
    assert watch.late(70.0) == ["process 1 has given no sign of life for 60 s (limit 60 s), last in phase: compute"]
    assert watch.late(70.5) == []
    assert watch.hung(70.0) == ""
    assert "process 1 has given no sign of life for 61 s" in watch.hung(71.0)
    watch.answered(Joined(1, 0, 0, 1.0), 71.0)
    assert watch.hung(500.0) == "", "an idle replica is asked for nothing"


def test_time_in_which_the_agent_was_stopped_counts_for_nobody() -> None:
    watch = trained()
    watch.asked(STEP, 0.0)
    alive(watch, "compute", 30.0)
    watch.discount(100.0)
    assert watch.hung(159.0) == ""
    assert watch.late(130.0) == []
    assert watch.hung(161.0) != ""


def test_failures_are_not_waited_for_and_teach_nothing() -> None:
    watch = trained()
    for order, answer in ((STEP, StepFailed(1, 1, "a peer left")), (JOIN, WorkerError("not formed", False, 1))):
        watch.asked(order, 0.0)
        watch.answered(answer, 59.0)
        assert watch.hung(1e6) == ""
    watch.asked(STEP, 0.0)
    assert watch.hung(61.0) != "", "the limit is still that of the step that took a second"
    watch.started(100.0)
    assert watch.hung(699.0) == ""
    assert "start has not ended" in watch.hung(701.0)
    watch.ready(702.0)
    assert watch.hung(1e6) == ""
