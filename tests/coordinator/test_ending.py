"""How the ranks end, whatever comes first."""

from __future__ import annotations

from typing import Any

import pytest

from libra_hpc.coordinator.ending import SAVE_S, RunEnding

Event = tuple[Any, ...]
"""A method of a run's ending, and its arguments."""
SIGTERM = "stop", "SIGTERM", 4.0, 0.0
LIMIT = "stop", "time limit in 410 s", 400.0, 0.0, "time_limit"
CANCEL = "stop", "other", 400.0, 0.0, "cancelled"
PAUSE = "stop", "the reward fell", 600.0, 0.0, "paused"
BREAK = "stop", "the reward fell", 600.0, 0.0, "broken"
FULL = "stop", "the disk is full", 600.0, 0.0, "storage"
KILLED = "stop", "the owner of the run was killed", 60.0, 0.0, "orphaned"
LOST = "save_and_restart", "node 3 was lost", 0.0
LEADER = "fatal", "node 1 was lost", "lost"
UNSAVED = "fatal", "node 1: the last step could not be saved", "fatal"


def saved(step: int, repartition: bool = False) -> Event:
    return "finished", step, repartition


def after(*events: Event) -> RunEnding:
    """A run of ten steps."""
    run = RunEnding(10)
    for name, *arguments in events:
        getattr(run, name)(*arguments)
    return run


@pytest.mark.parametrize(
    ("events", "why", "state", "message"),
    [
        ([saved(10), UNSAVED], "completed", "completed", "step 10 is saved"),
        ([saved(10, True)], "completed", "completed", "step 10 is saved"),
        ([LIMIT, saved(10)], "completed", "completed", "step 10 is saved"),
        ([saved(4)], "lost", "restarting", "training stopped without an order to"),
        ([saved(4, True)], "repartition", "restarting", "step 4 is saved"),
        ([LOST, UNSAVED], "lost", "restarting", "node 3 was lost"),
        ([LOST, ("check", SAVE_S + 1.0)], "lost", "restarting", "node 3 was lost"),
        ([SIGTERM, LEADER], "cancelled", "cancelled", "node 1 was lost; the last checkpoint stands"),
        ([SIGTERM, LOST], "cancelled", "cancelled", "node 3 was lost; the last checkpoint stands"),
        ([LOST, SIGTERM, saved(7)], "cancelled", "cancelled", "step 7 is saved"),
        ([FULL, saved(7)], "storage", "failed", "the disk is full; step 7 is saved"),
        ([LIMIT, saved(7)], "time_limit", "time_limit", "time limit in 410 s; step 7 is saved"),
        ([LIMIT, CANCEL, saved(7)], "cancelled", "cancelled", "step 7 is saved"),
        ([CANCEL, LIMIT, saved(7)], "cancelled", "cancelled", "step 7 is saved"),
        ([PAUSE, LIMIT, saved(7, True)], "paused", "paused", "the reward fell; step 7 is saved"),
        ([CANCEL, PAUSE, saved(7, True)], "paused", "paused", "the reward fell; step 7 is saved"),
        ([PAUSE, saved(10)], "paused", "paused", "the reward fell; step 10 is saved"),
        ([BREAK, LEADER], "broken", "failed", "the reward fell; node 1 was lost; the last checkpoint stands"),
        (
            [SIGTERM, KILLED, saved(7)],
            "orphaned",
            "failed",
            "the owner of the run was killed; step 7 is saved; continue with --resume",
        ),
    ],
)
def test_the_first_end_stands_and_of_reasons_to_save_the_weightiest(
    events: list[Event], why: str, state: str, message: str
) -> None:
    run = after(*events)
    assert (run.why, run.state, run.message) == (why, state, message)


def test_a_second_notice_can_only_shorten_the_time_that_is_left() -> None:
    first = "stop", "SIGUSR1", 50.0, 0.0
    run = after(first, ("stop", "SIGTERM", 4.0, 10.0), ("check", 13.0))
    assert (run.over, run.message) == (False, "SIGTERM: saving and stopping")
    assert not after(LOST, ("check", SAVE_S)).over
    run.check(14.1)
    assert run.why == "cancelled"
