"""The one state of a run: pure, from the queue's answer, the run's records, and the time.

- No job was recorded -> never_queued; its record cannot be read -> unknown.
- The job waits -> pending; it ran before -> requeued.
- The job runs -> starting, running, or silent by the age of status.json; a stopped run's job is given `LEAVES_S`.
- A status of a time to come is no sign of life either; ``now`` is by the clock of its machine while it is renewed.
- A component of the job waits and another does not -> failed, because Slurm starts only whole jobs; its owner has
  `SILENT_S` to queue it again.
- The job runs on without the node of its script -> failed once it is silent.
- The job has ended -> the state in result.json; without one Slurm's own.  What Slurm alone sees is added to a stop:
  time_limit, preempted.
- Slurm has no record of the job, or does not answer -> the state in result.json, else that of a fresh status.json,
  else unknown.  Unknown is not failed.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from libra_hpc.facts.series import duration
from libra_hpc.facts.status import FINAL, Status

from .job_record import JobRecord
from .query import JobInfo, JobState

State = Literal[
    "never_queued",
    "pending",
    "starting",
    "running",
    "silent",
    "requeued",
    "preempted",
    "time_limit",
    "cancelled",
    "paused",
    "failed",
    "completed",
    "unknown",
]
SILENT_S = 60.0
"""Age of status.json from which a running job is silent; it is replaced about once a second.

Half: a slow file system would do it; double: a hung run costs another minute."""
LEAVES_S = 60.0
"""A stopped run's job leaves the queue, or is queued again, within this time: Slurm's epilogues are part of it."""
PENDING = {
    "Priority": "other jobs come first",
    "Resources": "waiting for free nodes",
    "Dependency": "waiting for another job",
    "DependencyNeverSatisfied": "the job it waits for has failed",
    "BeginTime": "waiting for its begin time",
    "Cleaning": "its nodes are still busy with its last start",
    "JobHeldUser": "held by its owner",
    "JobHeldAdmin": "held by an administrator",
    "job requeued in held state": "held after it was queued again",
    "launch failed requeued held": "held, because its last start failed",
    "Licenses": "waiting for licenses",
    "Reservation": "waiting for its reservation",
    "ReqNodeNotAvail": "nodes it needs are down, drained or reserved",
    "Nodes required for job are DOWN": "nodes it needs are down, drained or reserved",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition is inactive",
    "PartitionTimeLimit": "its time limit exceeds the partition's",
    "PartitionNodeLimit": "it asks for more nodes than the partition has",
    "InvalidAccount": "its account is not valid",
    "InvalidQOS": "its QOS is not valid",
}
"""Slurm's reasons for waiting in plain words; one that is not here is shown as it is."""
OWNER_LOST = "the run's owner was killed"
"""Reason of a local run that ended without a result."""
NEVER_WHOLE = "Slurm has ended a part of its job and can never start the rest; continue with --resume"
"""Reason of a run whose heterogeneous job lost a component of one node."""
SCRIPT_LOST = "the node of its script was lost, and the job does nothing until its time limit; continue with --resume"
"""Reason of a run whose job Slurm lets run without a script, because nobody was left there to report its end."""
SCRIPT_KILLED = "JobLaunchFailure"
"""Slurm's reason for a job whose script was killed by a signal, as Slurm does where the script's node is set down."""
LIMITS = ("QOS", "Assoc", "MaxGRES", "MaxCpu")
"""Beginnings of reasons that name a limit of the account or the QOS."""
ENDED: dict[JobState, tuple[State, str]] = {
    # Whoever completes a run records it in its result.
    JobState.COMPLETED: ("failed", "its job ended without a result"),
    JobState.CANCELLED: ("cancelled", ""),
    JobState.TIMEOUT: ("time_limit", "the time limit is over"),
    JobState.PREEMPTED: ("preempted", "a job of higher priority took its nodes"),
    JobState.NODE_FAIL: ("failed", "a node failed"),
    JobState.FAILED: ("failed", "the job script failed"),
}
"""State and reason by the state in which Slurm has a job that has ended."""


class RunState(msgspec.Struct, frozen=True):
    """What is true of a run."""

    state: State
    reason: str = ""
    """Why it waits or how it ended, in words; of a running one what is wrong, empty where nothing is."""
    since: float | None = None
    """Epoch seconds; None: not known."""
    over: bool = False
    """Nothing goes on with it by itself."""
    broken: bool = False
    """Slurm has ended its job, or a part of it, in the middle of the run, and never starts it again."""

    @property
    def words(self) -> str:
        """The state as people read it."""
        return self.state.replace("_", " ")


class NoAnswer(NamedTuple):
    """Stands where a queue's answer would: it did not answer, or was not asked."""

    reason: str = ""


class RunEnd(NamedTuple):
    """How rank 0 or the launcher recorded the end of the last attempt."""

    state: State
    message: str
    at: float
    """Epoch seconds; 0: not known."""


class RunRecords(NamedTuple):
    """What the run directory has of the last attempt."""

    job: JobRecord | None
    status: Status | None
    result: RunEnd | None
    unread: str = ""
    """Why the record of the job cannot be read; empty where it can, or there is none."""

    @property
    def at(self) -> float:
        """Epoch seconds of the last snapshot; 0 without one."""
        return 0.0 if self.status is None else self.status.updated_at

    @property
    def settled(self) -> bool:
        """Whether no queue can add anything."""
        return self.job is None or (self.result is not None and self.result.state in ("completed", "failed", "paused"))

    @property
    def end(self) -> RunEnd | None:
        """The recorded end: result.json, else a last snapshot."""
        if self.result is None and self.status is not None and self.status.state in FINAL:
            return run_end(self.status.state, self.status.message, self.status.updated_at)
        return self.result


def run_end(state: object, message: object, at: object) -> RunEnd | None:
    """An end from fields of a file; None when they are not those of an end."""
    known = next((final for final in FINAL if final == state), None)
    return None if known is None else RunEnd(known, str(message or ""), at if isinstance(at, (int, float)) else 0.0)


def run_state(records: RunRecords, answer: JobInfo | NoAnswer, now: float) -> RunState:
    """See the module docstring; ``now`` is epoch seconds."""
    if records.job is None:
        return RunState("unknown", records.unread) if records.unread else RunState("never_queued", over=True)
    if isinstance(answer, NoAnswer):
        return _by_records(records, records.job, answer.reason, now)
    if answer.state is JobState.UNKNOWN:
        return _by_records(records, records.job, "Slurm has no record of its job", now)
    if _never_whole(answer, abs(now - records.at)):
        lost = "" if records.status is None else records.status.message
        reason = "; ".join(filter(None, [lost, NEVER_WHOLE]))
        return RunState("failed", reason, records.at or None, over=True, broken=True)
    if answer.state is JobState.PENDING:
        return _waiting(records, records.job, answer)
    return _running(records, answer, now) if answer.state is JobState.RUNNING else _ended(records, answer)


def _never_whole(answer: JobInfo, silent_s: float) -> bool:
    """Whether a heterogeneous job can never start, because a component waits and another does not.

    One that neither waits nor has ended may be ending, to be queued again.
    """
    states = {component.state for component in answer.components}
    ended = any(state.ended for state in states)
    return JobState.PENDING in states and len(states) > 1 and silent_s > SILENT_S + (0.0 if ended else LEAVES_S)


def pending_words(reason: str) -> str:
    """Slurm's reason for waiting, in plain words."""
    word = reason.split(",")[0].replace("_", " ")
    if word.startswith(LIMITS):
        return f"a limit of the account or the QOS is reached ({reason})"
    return PENDING.get(word, reason)


def _by_records(records: RunRecords, job: JobRecord, why: str, now: float) -> RunState:
    end, status = records.end, records.status
    if end is not None:
        return RunState(end.state, end.message, end.at, over=True)
    if status is not None and abs(now - status.updated_at) <= SILENT_S:
        return _by_status(status, now)
    return RunState("unknown", why, job.submitted_at if status is None else status.updated_at)


def _waiting(records: RunRecords, job: JobRecord, answer: JobInfo) -> RunState:
    words, end, status = pending_words(answer.reason), records.end, records.status
    if end is not None:
        return RunState("requeued", "; ".join(filter(None, [end.message, words])), end.at)
    if status is not None or answer.restarts:
        return RunState("requeued", words, None if status is None else status.updated_at)
    return RunState("pending", words, job.submitted_at)


def _running(records: RunRecords, answer: JobInfo, now: float) -> RunState:
    end, status, started = records.end, records.status, answer.start_time or 0.0
    # A job that Slurm started again removes the last result before anything else.
    if end is not None and started <= end.at:
        # Rank 0's last snapshot comes before the result, by as long as the other ranks take to end.
        if records.result is not None and (records.settled or now - end.at >= LEAVES_S):
            return RunState(end.state, end.message, end.at, over=True)
        return RunState("running", "; ".join(filter(None, [end.message, "its job is ending"])), end.at)
    if answer.script_lost and status is not None and abs(now - status.updated_at) > SILENT_S:
        return RunState("failed", SCRIPT_LOST, status.updated_at, over=True, broken=True)
    if status is None or status.state in FINAL or started > status.updated_at:
        return RunState("starting", "its agents are starting", answer.start_time)
    return _by_status(status, now)


def _by_status(status: Status, now: float) -> RunState:
    age = now - status.updated_at
    if abs(age) > SILENT_S:
        ahead = f"its status is {duration(-age)} ahead of the clock here, and is not renewed"
        return RunState("silent", f"no status for {duration(age)}" if age > 0.0 else ahead, status.updated_at)
    # A restart inside the job is a start, too; its message has the reason.
    return RunState("running" if status.state == "running" else "starting", status.message, status.started_at)


def _ended(records: RunRecords, answer: JobInfo) -> RunState:
    state, reason = ENDED[answer.state]
    end = records.end
    if end is not None:
        if end.state == "cancelled" and state in ("time_limit", "preempted"):
            return RunState(state, end.message or reason, end.at, over=True)
        return RunState(end.state, end.message, end.at, over=True)
    broken = records.status is not None and (answer.reason == SCRIPT_KILLED or answer.state is JobState.NODE_FAIL)
    return RunState(state, _reason(records, answer, reason), answer.end_time, over=True, broken=broken)


def _reason(records: RunRecords, answer: JobInfo, usual: str) -> str:
    """Why a job ended that left no result."""
    if answer.state is JobState.CANCELLED:
        # Slurm's own reason is the one for which the job was still waiting.
        never = answer.reason == "DependencyNeverSatisfied"
        return PENDING[answer.reason] if never else "" if records.status is not None else "before it started"
    if answer.state is JobState.FAILED and answer.reason == "OutOfMemory":
        return "out of memory"
    if answer.reason == OWNER_LOST:
        return f"{OWNER_LOST}; continue with --resume"
    if answer.reason == SCRIPT_KILLED:
        return "its script was killed by signal 9"
    return f"exit code {answer.exit_code}" if answer.state is JobState.FAILED and answer.exit_code else usual
