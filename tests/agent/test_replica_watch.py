from __future__ import annotations

from libra_hpc.agent.replica_watch import FRESH_S, ReplicaWatch
from libra_hpc.process.deadlines import DeadlineSettings
from libra_hpc.protocol.trainer import (
    Join,
    Joined,
    Offered,
    OfferWeights,
    PortionDone,
    SaveCheckpoint,
    Saved,
    SaveFailed,
    SaveStarted,
    StepDone,
    StepFailed,
    TrainPortion,
    TrainStep,
    WorkerFailed,
    WorkerHeartbeat,
)

SETTINGS = DeadlineSettings(floor_s=60.0, first_s=600.0, factor=10.0)
STORAGE_S = 600.0
JOIN, STEP = Join(1, 0, 2, "/meet"), TrainStep(1, 1, (), ())
DONE = StepDone(1, 1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0, 0.0, 0.0, 0.0)


def trained(seconds: float = 1.0) -> ReplicaWatch:
    """Of a replica whose first step took so long."""
    watch = ReplicaWatch(SETTINGS, STORAGE_S)
    watch.asked(STEP, 0.0)
    watch.answered(DONE, seconds)
    return watch


def alive(watch: ReplicaWatch, phase: str, now: float, processes: int = 2) -> None:
    for process in range(processes):
        watch.alive(process, WorkerHeartbeat(phase, 1.0), now)


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


def test_a_step_that_is_done_again_has_time_for_the_parts_that_came_ahead_of_it_before() -> None:
    watch = trained(seconds=8.0)
    for number in range(2):
        watch.asked(TrainPortion(2, 1, number, ()), 100.0 * number)
        watch.answered(PortionDone(2, 1, number), 100.0 * number + 7.0)
    watch.asked(TrainPortion(2, 1, 2, ()), 200.0)
    watch.asked(TrainStep(2, 1, ((),), (9,), 3), 201.0)
    watch.answered(PortionDone(2, 1, 2, error="out of the generation"), 260.0)
    alive(watch, "compute", 300.0)
    assert watch.hung(339.0) == "", "it began when the portion before had ended"
    alive(watch, "compute", 341.0)
    assert watch.hung(341.0).startswith("train step has not ended after 81 s (limit 80 s)")
    watch.answered(DONE, 342.0)
    watch.clear()
    watch.asked(TrainStep(2, 2, ((), (), ()), (None, None, 9)), 400.0)
    alive(watch, "compute", 619.0)
    assert watch.hung(619.0) == "", "80 s, and 70 s for each part"
    alive(watch, "compute", 621.0)
    assert watch.hung(621.0) != ""


def test_a_replica_that_waits_for_peers_has_three_times_as_long() -> None:
    watch = trained()
    watch.asked(STEP, 0.0)
    alive(watch, "waiting for peers", 100.0)
    assert watch.hung(100.0) == ""
    watch.alive(1, WorkerHeartbeat("compute", 90.0), 100.0)
    assert watch.hung(100.0) != "", "one of its processes keeps the others waiting"
    alive(watch, "waiting for peers", 100.0)
    assert watch.hung(100.0 + FRESH_S + 1.0) != "", "that it waited a while ago does not excuse it now"
    alive(watch, "waiting for peers", 181.0)
    assert watch.hung(181.0) != ""


def test_a_process_that_is_stopped_is_late_and_hung_long_before_an_unmeasured_order_is() -> None:
    watch = ReplicaWatch(SETTINGS, STORAGE_S)
    watch.asked(JOIN, 0.0)
    alive(watch, "compute", 10.0)
    watch.alive(0, WorkerHeartbeat("compute", 1.0), 70.0)
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
    for order, answer in ((STEP, StepFailed(1, 1, "a peer left")), (JOIN, WorkerFailed("not formed", False, 1))):
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


def joined() -> ReplicaWatch:
    """Of a replica whose join, offer and checkpoint took a second each."""
    watch = ReplicaWatch(SETTINGS, STORAGE_S)
    for order, answer in (
        (JOIN, Joined(1, 0, 0, 1.0)),
        (OfferWeights("", 0, -1), Offered(0, -1, "t", 0, 0, 0, 1.0)),
        (SaveCheckpoint("", 0), SaveStarted(0, 1.0)),
    ):
        watch.asked(order, 0.0)
        watch.answered(answer, 1.0)
    watch.answered(SaveFailed("", 0, "no room"), 1.0)
    return watch


def test_an_order_counts_from_when_the_one_before_it_was_answered() -> None:
    watch = joined()
    watch.asked(SaveCheckpoint("", 1), 0.0)
    for order in (Join(2, 0, 2, "/meet", 1), Join(2, 0, 2, "/meet", 2), OfferWeights("", 1, 0)):
        watch.asked(order, 1.0)
    alive(watch, "checkpoint", 59.0)
    assert watch.hung(59.0) == ""
    watch.answered(SaveStarted(1, 59.0), 59.0)
    alive(watch, "compute", 118.0)
    assert watch.hung(118.0) == ""
    watch.answered(WorkerFailed("a newer order came", False, 2, 1), 118.0)
    watch.answered(Joined(2, 0, 0, 1.0, 2), 119.0)
    alive(watch, "compute", 180.0)
    assert watch.hung(178.0) == ""
    assert "offer has not ended after 61 s (limit 60 s)" in watch.hung(180.0)


def test_the_write_of_a_checkpoint_is_an_operation_beside_the_next_orders() -> None:
    watch = joined()
    watch.asked(SaveCheckpoint("", 1), 0.0)
    watch.answered(SaveStarted(1, 1.0), 1.0)
    for second in range(2, 602):
        alive(watch, "compute", float(second))
        watch.asked(OfferWeights("", second, -1), float(second))
        watch.answered(Offered(second, -1, "t", 0, 0, 0, 0.0), float(second))
        assert watch.hung(float(second)) == "", "storage_s alone judges it"
    alive(watch, "compute", 602.0)
    assert "write of a checkpoint has not ended after 601 s" in watch.hung(602.0)
    watch.answered(SaveFailed("", 1, "no room"), 602.0)
    assert watch.hung(602.0) == ""
    watch.asked(SaveCheckpoint("", 2), 602.0)
    watch.answered(SaveStarted(2, 1.0), 603.0)
    watch.answered(Saved("", 2, 3.0), 606.0)
    alive(watch, "compute", 1000.0)
    assert watch.hung(1000.0) == ""


def test_a_write_that_is_slower_than_usual_is_late_and_only_storage_s_ends_it() -> None:
    watch = joined()
    watch.asked(SaveCheckpoint("", 1), 0.0)
    watch.answered(SaveStarted(1, 0.0), 0.0)
    watch.answered(Saved("", 1, 1.0), 1.0)
    watch.asked(SaveCheckpoint("", 2), 10.0)
    watch.answered(SaveStarted(2, 0.0), 10.0)
    late = []
    for second in range(11, 611):
        alive(watch, "compute", float(second))
        late += watch.late(float(second))
        assert watch.hung(float(second)) == ""
    assert late == ["write of a checkpoint has not ended after 31 s (limit 600 s)"]
    alive(watch, "compute", 611.0)
    assert watch.hung(611.0) == "write of a checkpoint has not ended after 601 s (limit 600 s), in phase: compute"


def test_orders_do_not_age_while_a_process_is_in_a_storage_phase() -> None:
    watch = trained()
    watch.asked(STEP, 0.0)
    late = []
    for second in range(500):
        watch.alive(0, WorkerHeartbeat("snapshot", 1.0), float(second))
        watch.alive(1, WorkerHeartbeat("compute", 1.0), float(second))
        late += watch.late(float(second))
        assert watch.hung(float(second)) == "", "its peers wait for it"
    assert late == ["snapshot has not ended after 301 s (limit 600 s)"]
    for second in range(500, 700):
        alive(watch, "compute", float(second))
        assert (watch.hung(float(second)) != "") == (second > 560), "the order has its whole time"


def test_a_storage_phase_that_never_ends_is_hung_and_four_in_a_row_name_the_key() -> None:
    watch, now, reasons = trained(), 0.0, []
    for _ in range(4):
        watch.started(now)
        for second in range(602):
            alive(watch, "load", now + second)
            assert (watch.hung(now + second) != "") == (second > 600)
        reasons.append(watch.give_up(now + 601.0))
        now += 1000.0
    assert reasons[:3] == ["", "", ""]
    assert reasons[3].startswith("load has not ended after 601 s (limit 600 s)")
    assert "raise deadlines.storage_s" in reasons[3]


def test_a_process_that_is_stopped_in_a_storage_phase_is_hung_as_in_any_other() -> None:
    watch = trained()
    alive(watch, "checkpoint", 100.0)
    assert watch.hung(160.0) == ""
    assert "no sign of life for 61 s" in watch.hung(161.0)
