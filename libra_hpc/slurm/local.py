"""Runs without Slurm: start, watch and cancel all agents on this machine.

The owner of the run (`libra_hpc.owner.owner`) is detached.  It leads a process group of its own with all ranks in it,
so a signal to the group reaches the run and nothing else.  Its process id and ``result.json`` are the run's state.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

import msgspec

from libra_hpc.facts.rundir import RunDir
from libra_hpc.process.lease import newest_lease, start_ticks
from libra_hpc.slurm.queue.cause import OWNER_ENDS, tail
from libra_hpc.slurm.queue.job_record import JobRecord, read_job, start_attempt, write_job
from libra_hpc.slurm.queue.query import JobInfo, JobState
from libra_hpc.slurm.queue.run_state import OWNER_LOST

from .launch import Launch
from .queue.command import clean_environment
from .writer import expanded

GRACE_S = 20.0
"""Seconds between SIGTERM and SIGKILL, in which agents save and end their engines."""
POLL_S = 0.05


def command(launch: Launch) -> list[str]:
    """Command line of the owner of a run, which starts all agents."""
    agent = [launch.python, *launch.agent_arguments]
    return [sys.executable, "-m", "libra_hpc.owner.owner", *launch.owner_arguments, "--", *agent]


def start(launch: Launch) -> str:
    """Start one agent per node of every component, all on this machine, and return ``local-<pid>``.

    Output goes to ``agent-<rank>.log`` and ``launcher.log`` in the attempt's log folder.
    """
    run, attempt = launch.run, launch.attempt
    start_attempt(run, attempt)
    logs, env = run.logs(attempt), clean_environment(os.environ)
    env |= expanded(launch.variables, env)
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(logs / "launcher.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    pid = os.posix_spawn(sys.executable, command(launch), env, file_actions=actions, setsid=True)
    job_id = f"local-{pid}"
    try:
        write_job(run, JobRecord("local", job_id, attempt, time.time(), pid=pid, started=start_ticks(pid) or 0))
    except OSError:
        # Nobody could find it, or cancel it.
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    return job_id


def state(run: RunDir) -> JobInfo:
    """RUNNING while the owner lives, UNKNOWN where that is another machine's; then the state in ``result.json``, FAILED
    when there is none."""
    record = read_job(run)
    if _alive(record):
        return JobInfo(record.job_id, JobState.RUNNING, start_time=record.submitted_at)
    with contextlib.suppress(OSError):
        lease = newest_lease(run.leases)[1]
        if lease is not None and not (lease.released or lease.here):
            return JobInfo(record.job_id, JobState.UNKNOWN)
    if run.read_json(run.result).get("state") == "completed":
        return JobInfo(record.job_id, JobState.COMPLETED, exit_code=0, start_time=record.submitted_at)
    ended = JobState.CANCELLED if record.cancelled else JobState.FAILED
    explained = any(line.startswith(OWNER_ENDS) for line in tail(run.logs(record.attempt) / "launcher.log"))
    reason = "" if explained or record.cancelled or run.result.exists() else OWNER_LOST
    return JobInfo(record.job_id, ended, reason, exit_code=1, start_time=record.submitted_at)


def cancel(run: RunDir) -> bool:
    """End the run's processes with SIGTERM, after `GRACE_S` with SIGKILL; returns whether it was running."""
    record = read_job(run)
    if not _alive(record):
        return False
    write_job(run, msgspec.structs.replace(record, cancelled=True))
    _signal_group(record, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while _alive(record) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    if _alive(record):
        _signal_group(record, signal.SIGKILL)
    return True


def _signal_group(record: JobRecord, number: signal.Signals) -> None:
    """An evaluation leads no group; what it started ends with it."""
    with contextlib.suppress(ProcessLookupError):
        (os.killpg if os.getpgid(record.pid) == record.pid else os.kill)(record.pid, number)


def _alive(record: JobRecord) -> bool:
    return record.pid > 0 and start_ticks(record.pid) == record.started
