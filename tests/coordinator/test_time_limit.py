"""When a run stops for its job's time limit, and how long it may then save."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from libra_hpc.config.job import SlurmSection
from libra_hpc.coordinator.time_limit import FACTOR, MARGIN_S, Stop, TimeLimit
from libra_hpc.protocol.ranks_stop import JOB_END, KILL_WAIT

END = 10_000.0


def limit(steps: tuple[float, ...] = (400.0, 260.0), save_s: float = 95.0, **slurm: Any) -> TimeLimit:
    """A job that ends at `END`; the first step has the start of the engines in it."""
    made = TimeLimit(SlurmSection(**slurm), 0.0, {JOB_END: str(int(END)), KILL_WAIT: "30"})
    for seconds in steps:
        made.on_step(seconds)
    made.on_saves(False, save_s, 0.0)
    return made


NEED = FACTOR * (260.0 + 95.0) + MARGIN_S
FITS = END - 260.0 - NEED
"""Until then a step and another one fit, with a save."""
LAST = END - FACTOR * 95.0 - MARGIN_S
"""Until then a save fits."""


@pytest.mark.parametrize(
    ("made", "began", "now", "after", "reason"),
    [
        (limit(), FITS - 1.0, FITS - 1.0, None, ""),
        (limit(), FITS + 1.0, FITS + 1.0, 8, f"time limit in {259.0 + NEED:.0f} s; a step takes 260 s and a save 95 s"),
        (limit(), FITS - 99.0, FITS + 1.0, None, "in the middle of a step its own end counts"),
        (limit(), END - 1000.0, LAST - 1.0, 8, "time limit in 154 s; a step takes 260 s and a save 95 s"),
        (limit(), END - 1000.0, LAST + 1.0, 0, "time limit in 152 s; a save takes 95 s"),
        (limit((400.0,)), END - 800.0, END - 800.0, 8, "time limit in 800 s; a step takes 400 s and a save 95 s"),
        (limit(), END - 1000.0, END - 1000.0, None, "the slow first step counts only until there is another"),
        (limit(notice_s=60.0), END - 1.0, END - 1.0, None, "Slurm stops it"),
    ],
)
def test_the_last_step_is_the_one_after_which_another_and_a_save_would_not_fit(
    made: TimeLimit, began: float, now: float, after: int | None, reason: str
) -> None:
    assert made.stop(7, began, now) == (None if after is None else Stop(after, reason))


def test_the_last_save_waits_for_the_end_of_a_write_that_is_in_flight() -> None:
    now = END - 250.0
    for ended in (False, True):
        writing = limit((10.0,))
        assert writing.stop(7, now, now) is None
        writing.on_saves(True, 0.0, now - 5.0)
        if ended:
            writing.on_saves(False, 0.0, now)
        stop = writing.stop(7, now, now)
        assert (stop is None) == ended
    assert stop is None
    writing.on_saves(True, 0.0, now - 80.0)
    writing.on_saves(True, 0.0, now - 1.0)
    assert writing.stop(7, now, now) is None, "it ends before the step does"


def test_a_save_that_was_never_measured_has_a_share_of_the_time() -> None:
    unknown = TimeLimit(SlurmSection(), 0.0, {JOB_END: "3600"})
    assert unknown.save_s == 120.0
    unknown.on_saves(False, 3.0, 0.0)
    unknown.on_saves(False, 2.0, 0.0)
    assert unknown.save_s == 3.0
    assert TimeLimit(SlurmSection(), 0.0, {JOB_END: "60"}).save_s == 6.0


@pytest.mark.parametrize("text", ["", "N/A", "-5", "9"])
def test_without_an_end_only_slurm_stops_the_run(text: str) -> None:
    unknown = TimeLimit(SlurmSection(), 10.0, {JOB_END: text})
    unknown.on_step(1.0)
    assert (unknown.stop(7, 20.0, 20.0), unknown.left_s(20.0)) == (None, 110.0), "what the notice leaves"


def test_what_is_left_is_less_than_the_job_has() -> None:
    assert limit(notice_s=60.0).left_s(END - 60.0) == 50.0
    assert limit().left_s(END - 3.0) == 4.0


def test_the_end_is_read_as_squeue_writes_it() -> None:
    made = TimeLimit(SlurmSection(), 0.0, {JOB_END: "2030-01-02T03:04:05"})
    assert made.end_at == datetime(2030, 1, 2, 3, 4, 5).timestamp()


@pytest.mark.parametrize(
    ("kill_wait", "grace_s", "found"), [("30", 0.0, 25.0), ("5", 0.0, 4.0), ("", 0.0, 4.0), ("30", 120.0, 115.0)]
)
def test_a_save_after_sigterm_has_slurms_kill_wait_unless_the_run_file_knows_better(
    kill_wait: str, grace_s: float, found: float
) -> None:
    assert TimeLimit(SlurmSection(grace_s=grace_s), 0.0, {KILL_WAIT: kill_wait}).grace_s == found


def test_slurms_notice_stops_a_run_that_cannot_tell_its_last_step_and_a_preempted_one() -> None:
    near, far = END - 150.0, END - 1000.0
    assert not limit().heeds_notice(near)
    assert limit().heeds_notice(far), "a preemption"
    assert limit(()).heeds_notice(near), "no step was measured"
    assert limit(notice_s=60.0).heeds_notice(near)
    assert TimeLimit(SlurmSection(), 0.0, {}).heeds_notice(near)
