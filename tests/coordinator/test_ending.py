"""How the ranks end, whatever comes first."""

from __future__ import annotations

from libra_hpc.coordinator.ending import SAVE_S, RunEnding


def test_the_last_step_completes_the_run_and_the_first_end_stands() -> None:
    run = RunEnding(10)
    run.finished(10, False)
    assert (run.why, run.state, run.message) == ("completed", "completed", "step 10 is saved")
    run.fatal("node 1: late", "fatal")
    assert run.why == "completed"


def test_training_that_stops_without_an_order_to_is_not_a_completed_run() -> None:
    run = RunEnding(10)
    run.finished(4, False)
    assert (run.why, run.state) == ("lost", "restarting")
    run = RunEnding(10)
    run.finished(4, True)
    assert (run.why, run.state) == ("repartition", "restarting")


def test_what_cannot_be_saved_on_the_way_to_a_restart_still_leaves_an_older_checkpoint() -> None:
    run = RunEnding(10)
    assert run.save_and_restart("node 3 was lost", 0.0)
    run.fatal("node 1: the last step could not be saved", "fatal")
    assert (run.why, run.message) == ("lost", "node 3 was lost")
    run = RunEnding(10)
    run.save_and_restart("node 3 was lost", 0.0)
    run.check(SAVE_S)
    assert not run.over
    run.check(SAVE_S + 1.0)
    assert (run.why, run.message) == ("lost", "node 3 was lost")


def test_who_cancels_gets_no_restart() -> None:
    run = RunEnding(10)
    run.stop("SIGTERM", 4.0, 0.0)
    run.fatal("node 1, which leads training, was lost", "lost")
    assert (run.why, run.message) == ("cancelled", "node 1, which leads training, was lost; the last checkpoint stands")
    run = RunEnding(10)
    run.stop("SIGTERM", 4.0, 0.0)
    assert not run.save_and_restart("node 3, which leads rollout, was lost", 1.0)
    assert run.why == "cancelled"
    run = RunEnding(10)
    assert run.save_and_restart("node 3, which leads rollout, was lost", 0.0)
    run.stop("SIGTERM", 4.0, 1.0)
    run.finished(7, False)
    assert (run.why, run.message) == ("cancelled", "step 7 is saved")


def test_a_second_notice_can_only_shorten_the_time_that_is_left() -> None:
    run = RunEnding(10)
    run.stop("SIGUSR1", 50.0, 0.0)
    run.stop("SIGTERM", 4.0, 10.0)
    run.check(13.0)
    assert not run.over
    run.check(14.1)
    assert run.why == "cancelled"


def test_a_stop_for_storage_fails_the_run_with_its_reason_also_when_the_save_succeeded() -> None:
    run = RunEnding(10)
    run.stop("the run directory has taken no writes for 900 s: No space left", 600.0, 0.0, "storage")
    run.finished(7, False)
    assert (run.why, run.state) == ("storage", "failed")
    assert run.message == "the run directory has taken no writes for 900 s: No space left; step 7 is saved"


def test_a_run_that_the_time_limit_stopped_says_so_and_a_cancel_meanwhile_wins() -> None:
    run = RunEnding(10)
    run.stop("time limit in 410 s", 400.0, 0.0, "time_limit")
    assert run.message == "time limit in 410 s: saving and stopping"
    run.finished(7, False)
    assert (run.why, run.message) == ("time_limit", "time limit in 410 s; step 7 is saved")
    for first, second in (("time_limit", "cancelled"), ("cancelled", "time_limit")):
        run = RunEnding(10)
        run.stop("one", 400.0, 0.0, first)
        run.stop("other", 400.0, 0.0, second)
        run.finished(7, False)
        assert (run.why, run.message) == ("cancelled", "step 7 is saved"), "nothing queues it again"


def test_a_run_that_a_guard_ends_is_not_queued_again_and_not_complete() -> None:
    for other in ("time_limit", "cancelled"):
        for first, second in ((other, "paused"), ("paused", other)):
            run = RunEnding(10)
            run.stop("one", 400.0, 0.0, first)
            run.stop("other", 400.0, 0.0, second)
            run.finished(7, True)
            assert (run.why, run.state) == ("paused", "paused")
    run = RunEnding(10)
    run.stop("the reward fell", 600.0, 0.0, "broken")
    run.fatal("node 1, which leads training, was lost", "lost")
    assert (run.why, run.state) == ("broken", "failed")
    run = RunEnding(10)
    run.stop("the reward fell", 600.0, 0.0, "paused")
    run.finished(10, False)
    assert (run.state, run.message) == ("paused", "the reward fell; step 10 is saved")


def test_a_run_without_an_owner_saves_and_says_so() -> None:
    run = RunEnding(10)
    run.stop("Slurm sent SIGTERM", 4.0, 0.0)
    run.stop("the owner of the run (process 7 on n1) was killed", 60.0, 0.0, "orphaned")
    run.finished(7, False)
    assert (run.state, run.message) == (
        "failed",
        "the owner of the run (process 7 on n1) was killed; step 7 is saved; continue with --resume",
    )


def test_a_run_that_saves_its_last_step_on_notice_is_complete() -> None:
    run = RunEnding(10)
    run.stop("time limit in 410 s", 400.0, 0.0, "time_limit")
    run.finished(10, False)
    assert run.why == "completed"
