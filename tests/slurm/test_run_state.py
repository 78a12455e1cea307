"""The one state of a run: every combination of queue, records and time that matters."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from libra_hpc.facts.rundir import RunDir
from libra_hpc.facts.status import FINAL, Status
from libra_hpc.slurm.queue.job_record import JobRecord
from libra_hpc.slurm.queue.query import HetComponent, JobInfo, JobState
from libra_hpc.slurm.queue.run_state import (
    ENDED,
    LEAVES_S,
    NEVER_WHOLE,
    OWNER_LOST,
    SCRIPT_KILLED,
    SILENT_S,
    NoAnswer,
    RunEnd,
    RunRecords,
    pending_words,
    run_end,
    run_state,
)
from tests.facts import synthetic

NOW = 1_000_000.0
JOB = JobRecord("slurm", "4711", 1, NOW - 500.0)
NO_RECORD, DEAD = JobInfo("4711", JobState.UNKNOWN), NoAnswer("No Slurm controller answers")


def snapshot(state: str, age_s: float = 1.0, message: str = "") -> Status:
    status = synthetic.make_status(RunDir(Path("/runs/a-001")), state=state)
    return msgspec.structs.replace(status, updated_at=NOW - age_s, started_at=NOW - 400.0, message=message)


def ended(state: str, age_s: float = 5.0, message: str = "step 41 is saved") -> RunEnd:
    end = run_end(state, message, NOW - age_s)
    assert end is not None
    return end


def job(state: str, reason: str = "", started_s: float | None = 450.0, **more: int) -> JobInfo:
    return JobInfo("4711", JobState[state], reason, start_time=None if started_s is None else NOW - started_s, **more)


RUNS, OLD, WAITS = snapshot("running"), snapshot("running", SILENT_S + 5.0), job("PENDING", "Resources", None)
SAVED = "step 41 is saved"


def parts(*states: str) -> JobInfo:
    """A heterogeneous job whose first component waits."""
    components = (HetComponent(offset, f"47{offset}", JobState[state], "") for offset, state in enumerate(states))
    return JobInfo("4711", JobState.PENDING, "Resources", components=tuple(components))


CASES = {
    # The job waits.
    "waits": (WAITS, None, None, ("pending", "waiting for free nodes", False)),
    "waits, its reason is new": (job("PENDING", "Phase_of_moon"), None, None, ("pending", "Phase_of_moon", False)),
    "waits again after a notice": (WAITS, snapshot("cancelled"), ended("cancelled"), "requeued"),
    "waits again after its time limit": (WAITS, snapshot("time_limit"), ended("time_limit"), "requeued"),
    "waits again, its nodes were lost": (WAITS, OLD, None, ("requeued", "waiting for free nodes", False)),
    "waits again, it never wrote": (job("PENDING", "BeginTime", None, restarts=1), None, None, "requeued"),
    # Slurm has ended a component, and the others can never start.
    "is dead": (parts("FAILED", "PENDING"), OLD, None, ("failed", NEVER_WHOLE, True)),
    "waits as a whole": (parts("PENDING", "PENDING"), OLD, None, "requeued"),
    "a component is ending before it is queued again": (parts("RUNNING", "PENDING"), OLD, None, "requeued"),
    # The job runs.
    "has just started": (job("RUNNING"), None, None, ("starting", "its agents are starting", False)),
    "the agents meet": (job("RUNNING"), snapshot("starting", message="waiting for the nodes"), None, "starting"),
    "runs": (job("RUNNING"), RUNS, None, ("running", "", False)),
    "runs, a step is late": (
        job("RUNNING"),
        snapshot("running", message="no step for 90 s"),
        None,
        ("running", "no step for 90 s", False),
    ),
    "restarts inside the job": (
        job("RUNNING"),
        snapshot("restarting", message="node 2 was lost"),
        None,
        ("starting", "node 2 was lost", False),
    ),
    "hangs": (job("RUNNING"), OLD, None, ("silent", "no status for 1:05", False)),
    "is dead, and its clock was ahead": (
        job("RUNNING"),
        snapshot("running", -7200.0),
        None,
        ("silent", "its status is 2:00:00 ahead of the clock here, and is not renewed", False),
    ),
    "was queued again and has started": (job("RUNNING", started_s=3.0), OLD, None, "starting"),
    "was stopped, and has started again": (job("RUNNING", started_s=3.0), snapshot("cancelled", 5.0), None, "starting"),
    "was stopped, and its job is ending": (
        job("RUNNING"),
        snapshot("cancelled"),
        ended("cancelled"),
        ("running", f"{SAVED}; its job is ending", False),
    ),
    "was stopped, and its job does not end": (
        job("RUNNING"),
        snapshot("cancelled"),
        ended("cancelled", LEAVES_S + 1.0),
        ("cancelled", SAVED, True),
    ),
    "rank 0 has ended, and others are ending": (
        job("RUNNING"),
        snapshot("failed", message="why"),
        None,
        ("running", "why; its job is ending", False),
    ),
    "is complete, and its job is ending": (job("RUNNING"), RUNS, ended("completed"), ("completed", SAVED, True)),
    "has failed, and its job is ending": (job("RUNNING"), RUNS, ended("failed", 5.0, "why"), ("failed", "why", True)),
    "started again before the old result was removed": (
        job("RUNNING", started_s=1.0),
        snapshot("cancelled"),
        ended("cancelled"),
        "starting",
    ),
    # The job has ended.
    "is complete": (job("COMPLETED"), snapshot("completed"), ended("completed"), ("completed", SAVED, True)),
    "is complete, and its job failed afterwards": (job("FAILED"), None, ended("completed"), ("completed", SAVED, True)),
    "its script left before the ranks": (
        job("COMPLETED", exit_code=0),
        None,
        None,
        ("failed", "its job ended without a result", True),
    ),
    "has failed": (job("FAILED"), snapshot("failed"), ended("failed", 5.0, "why"), ("failed", "why", True)),
    "the script failed": (job("FAILED", "NonZeroExitCode", exit_code=3), None, None, ("failed", "exit code 3", True)),
    "Slurm killed its script": (
        job("FAILED", SCRIPT_KILLED, exit_code=137),
        OLD,
        None,
        ("failed", "its script was killed by signal 9", True),
    ),
    "its owner was killed": (job("FAILED", OWNER_LOST, exit_code=1), RUNS, None, "failed"),
    "its owner was killed, and its ranks said so": (
        job("FAILED", OWNER_LOST),
        snapshot("failed", 9.0, "why"),
        None,
        ("failed", "why", True),
    ),
    "out of memory": (job("FAILED", "OutOfMemory", exit_code=125), RUNS, None, ("failed", "out of memory", True)),
    "a node failed": (job("NODE_FAIL", "NodeDown"), OLD, None, ("failed", "a node failed", True)),
    "cancelled": (job("CANCELLED"), snapshot("cancelled"), ended("cancelled"), ("cancelled", SAVED, True)),
    "cancelled while it waited": (job("CANCELLED", "Resources"), None, None, ("cancelled", "before it started", True)),
    "cancelled for another job": (
        job("CANCELLED", "DependencyNeverSatisfied"),
        None,
        None,
        ("cancelled", "the job it waits for has failed", True),
    ),
    "killed while it ran": (job("CANCELLED", "Resources"), RUNS, None, ("cancelled", "", True)),
    "paused": (job("FAILED"), snapshot("paused"), ended("paused"), ("paused", SAVED, True)),
    "paused, its job is ending": (job("RUNNING"), snapshot("paused"), ended("paused"), ("paused", SAVED, True)),
    "the notice of the time limit": (job("FAILED"), None, ended("time_limit"), ("time_limit", SAVED, True)),
    "the time limit without a notice": (job("TIMEOUT"), RUNS, None, ("time_limit", "the time limit is over", True)),
    "stopped, then the time limit": (job("TIMEOUT"), RUNS, ended("cancelled"), ("time_limit", SAVED, True)),
    "preempted": (job("PREEMPTED"), snapshot("cancelled"), ended("cancelled"), ("preempted", SAVED, True)),
    "preempted without a result": (job("PREEMPTED"), RUNS, None, "preempted"),
    "complete, though preempted": (job("PREEMPTED"), None, ended("completed"), ("completed", SAVED, True)),
    # Slurm cannot tell.
    "no record, and nothing in the folder": (
        NO_RECORD,
        None,
        None,
        ("unknown", "Slurm has no record of its job", False),
    ),
    "no record, and an old snapshot": (NO_RECORD, OLD, None, ("unknown", "Slurm has no record of its job", False)),
    "no record, and it writes": (NO_RECORD, RUNS, None, ("running", "", False)),
    "no record, and a result": (NO_RECORD, OLD, ended("completed"), ("completed", SAVED, True)),
    "no record, and a last snapshot": (NO_RECORD, snapshot("failed", 900.0, "why"), None, ("failed", "why", True)),
    "no controller": (DEAD, None, None, ("unknown", DEAD.reason, False)),
    "no controller, and its clock was ahead": (DEAD, snapshot("running", -7200.0), None, "unknown"),
    "no controller, and it writes": (DEAD, RUNS, None, ("running", "", False)),
    "no controller, and a result": (DEAD, OLD, ended("cancelled"), ("cancelled", SAVED, True)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_state_of_a_run_is(case: str) -> None:
    answer, status, result, expected = CASES[case]
    found = run_state(RunRecords(JOB, status, result), answer, NOW)
    if isinstance(expected, str):
        assert found.state == expected
    else:
        assert (found.state, found.reason, found.over) == expected


KILLED, APART, LEFT = job("FAILED", SCRIPT_KILLED), parts("PENDING", "FAILED"), parts("PENDING", "RUNNING")
LATE = snapshot("running", SILENT_S + LEAVES_S + 1.0)


@pytest.mark.parametrize(
    ("answer", "status", "result", "broken"),
    [
        (KILLED, OLD, None, True),
        (APART, OLD, None, True),
        (job("NODE_FAIL"), OLD, None, True),
        # Nobody reported the end of its script; before, it may be ending.
        (LEFT, LATE, None, True),
        (LEFT, OLD, None, False),
        (parts("PENDING", "PENDING"), LATE, None, False),
        (job("RUNNING", script_lost=True), OLD, None, True),
        # Its ranks may still save.
        (job("RUNNING", script_lost=True), RUNS, None, False),
        # It would be killed again.
        (KILLED, None, None, False),
        # Its owner may still queue a new job.
        (APART, RUNS, None, False),
        (KILLED, OLD, ended("cancelled"), False),
        (job("FAILED", "NonZeroExitCode", exit_code=3), OLD, None, False),
    ],
)
def test_a_job_is_broken_only_where_its_run_has_begun_and_could_not_say_how_it_ends(
    answer: JobInfo, status: Status | None, result: RunEnd | None, broken: bool
) -> None:
    assert run_state(RunRecords(JOB, status, result), answer, NOW).broken is broken


def test_a_run_without_a_job_was_never_queued_whatever_the_queue_answers() -> None:
    for answer in (NoAnswer(), NO_RECORD, WAITS):
        assert run_state(RunRecords(None, None, None), answer, NOW).state == "never_queued"


@pytest.mark.parametrize("state", [state for state in JobState if state.ended])
@pytest.mark.parametrize("end", [None, *FINAL])
def test_a_job_that_has_ended_is_over_and_a_failure_has_a_reason(state: JobState, end: str | None) -> None:
    found = run_state(RunRecords(JOB, None, None if end is None else ended(end)), JobInfo("4711", state), NOW)
    assert found.over
    assert found.reason or found.state == "completed"
    assert found.state == ENDED[state][0] if end is None else found.state in (end, "time_limit", "preempted")


def test_states_tell_since_when() -> None:
    assert run_state(RunRecords(JOB, None, None), WAITS, NOW).since == JOB.submitted_at
    assert run_state(RunRecords(JOB, RUNS, None), job("RUNNING"), NOW).since == RUNS.started_at
    assert run_state(RunRecords(JOB, OLD, None), job("RUNNING"), NOW).since == OLD.updated_at
    assert run_state(RunRecords(JOB, OLD, ended("failed")), job("FAILED"), NOW).since == NOW - 5.0


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("ReqNodeNotAvail, UnavailableNodes:a800-1", "nodes it needs are down, drained or reserved"),
        ("Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved", "nodes it needs are down, drained or reserved"),
        ("QOSMaxGRESPerUser", "a limit of the account or the QOS is reached (QOSMaxGRESPerUser)"),
        ("AssocGrpCpuLimit", "a limit of the account or the QOS is reached (AssocGrpCpuLimit)"),
        ("", ""),
    ],
)
def test_reasons_for_waiting_in_plain_words(reason: str, words: str) -> None:
    assert pending_words(reason) == words
