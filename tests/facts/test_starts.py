"""When the ranks of a run were at work, from its events."""

from __future__ import annotations

import pytest

from libra_hpc.facts.starts import job_seconds, starts

from .synthetic import event


def test_nothing_is_no_start() -> None:
    assert starts([], []) == []
    assert job_seconds([]) == 0.0


def test_a_start_begins_with_the_first_rank_that_joins() -> None:
    log = [event(1, "agent_joined"), event(2, "agent_joined"), event(3, "job_started", ranks=2, attempt=1)]
    # A node that joins later begins no start.
    log += [event(8, "agent_joined"), event(9, "job_finished", state="completed", message="step 4 is saved")]
    (only,) = starts([{"t": 8.5}], log)
    assert (only.start, only.end, only.ranks, only.state, only.message) == (1, 9, 2, "completed", "step 4 is saved")


def test_a_restart_inside_the_job_waited_in_no_queue() -> None:
    log = [event(0, "job_started", attempt=1), event(5, "node_lost"), event(9, "job_started", attempt=1)]
    first, second = starts([{"t": 4.0}, {"t": 20.0}], log)
    assert (first.end, first.state, second.queued_s, second.end) == (5, "", 0.0, 20.0)
    assert job_seconds([first, second]) == 20.0


@pytest.mark.parametrize("finished", [True, False])
def test_a_further_job_waited_since_the_end_of_the_one_before(finished: bool) -> None:
    end = event(10, "job_finished", state="cancelled") if finished else event(10, "node_lost")
    log = [event(0, "job_started", attempt=1), end, event(1000, "job_started", attempt=2), event(1010, "x")]
    found = starts([], log)
    assert [start.queued_s for start in found] == [0.0, 990.0]
    assert job_seconds(found) == 20.0


def test_a_run_of_an_older_version_has_one_start() -> None:
    assert [(start.start, start.end) for start in starts([{"t": 3.0}, {"t": 7.0}], [])] == [(3.0, 7.0)]
