"""Jobs of runs, with Slurm or the local executor: queue, state, cancel."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from libra_hpc.config.load import validate
from libra_hpc.config.run import RunConfig
from libra_hpc.config.site import site_profile
from libra_hpc.errors import OperationError, SlurmUnreachable, invalid
from libra_hpc.slurm import local, query, submit
from libra_hpc.slurm.launch import Launch
from libra_hpc.slurm.query import JobInfo, JobState, Partition
from libra_hpc.slurm.single import run_single
from libra_hpc.slurm.site import clean_environment, slurm_environment
from libra_hpc.slurm.writer import het_script
from libra_hpc.telemetry.rundir import RunDir

from .output import busy, print_note

Environment = Mapping[str, str]

POLICY_MEMORY = "4G"
"""A trainer process takes 0.6 GB, plus torch's libraries."""
POLICY_TIME = "00:30:00"
"""The warm start takes one or two minutes on a free core."""

STATES = {
    JobState.PENDING: "pending",
    JobState.RUNNING: "running",
    JobState.COMPLETED: "completed",
    JobState.CANCELLED: "cancelled",
    JobState.UNKNOWN: "unknown",
}
"""Every other state of Slurm is shown as ``failed``, with the state as the reason."""
REASONS = {
    "Priority": "other jobs come first",
    "Resources": "waiting for free nodes",
    "Dependency": "waiting for another job",
    "BeginTime": "waiting for its begin time",
    "JobHeldUser": "held by its owner",
    "JobHeldAdmin": "held by an administrator",
    "ReqNodeNotAvail": "nodes it needs are down, drained or reserved",
    "PartitionDown": "the partition is down",
    "PartitionTimeLimit": "its time limit exceeds the partition's",
    "PartitionNodeLimit": "it asks for more nodes than the partition has",
    "TIMEOUT": "time limit reached",
    "TimeLimit": "time limit reached",
    "PREEMPTED": "preempted",
    "NODE_FAIL": "a node failed",
    "NonZeroExitCode": "the job script failed",
}
"""Slurm's reasons in plain words; a reason that is not here is shown as it is."""


class JobView(msgspec.Struct, frozen=True):
    """A run's job in the queue."""

    id: str
    state: str
    """``pending`` | ``running`` | ``completed`` | ``failed`` | ``cancelled`` | ``unknown``"""
    reason: str = ""
    """Why it is pending or failed, in plain words."""


def kind(environment: Environment | None) -> Literal["slurm", "local"]:
    """Name of the executor of an environment."""
    return "local" if environment is None else "slurm"


def environment(executor: str) -> Environment | None:
    """Environment of Slurm's client commands, or None for the local executor.

    Raises `SlurmUnreachable` when Slurm is needed and none answers.
    """
    return None if executor == "local" else slurm_environment()


def environment_or_none(executor: str) -> Environment | None:
    """As `environment`, but None when no Slurm answers: for verbs that only read."""
    try:
        return environment(executor)
    except SlurmUnreachable:
        return None


def partitions(environment: Environment) -> list[Partition]:
    """The partitions of that Slurm."""
    return query.partitions(environment)


def expected_start(config: RunConfig, environment: Environment) -> float | None:
    """When Slurm would start the job, in epoch seconds; None where it names no time.

    Slurm checks the whole script for that: raises `UserError` for what it would refuse.
    """
    with tempfile.TemporaryDirectory() as folder:
        return submit.expected_start(Launch(config, RunDir(folder), 1), environment)


def cluster(run: RunDir) -> str:
    """Name of the cluster that has the run's job; empty for the local executor."""
    return str(run.read_json(run.job).get("cluster", ""))


def script(launch: Launch) -> str:
    """The sbatch script of an attempt, or for the local executor its command line."""
    if launch.config.slurm.executor == "local":
        return shlex.join(["mpiexec", "-n", str(launch.ranks), launch.python, *launch.agent_arguments])
    return het_script(launch)


def queue(launch: Launch, environment: Environment | None) -> str:
    """Queue one attempt, or start it here without an environment; returns the job id."""
    return local.start(launch) if environment is None else submit.submit(launch, environment)


def state(run: RunDir) -> JobView:
    """The job of the run's last attempt; an empty id when it was never queued.

    Slurm has no record of the job, or no controller answers -> the state in ``result.json``, else ``unknown``.
    """
    record = run.read_json(run.job)
    if not record:
        return JobView("", "unknown")
    job_id = str(record.get("job_id", ""))
    try:
        info = submit.state(run, None if record.get("executor") == "local" else slurm_environment())
    except SlurmUnreachable as error:
        return JobView(job_id, _result(run) or "unknown", "" if _result(run) else str(error).rstrip("."))
    return _view(run, info)


def states(runs: Sequence[RunDir]) -> dict[str, JobView]:
    """The jobs of several runs by path, with one question to the queue; a run whose Slurm does not answer is left
    out."""
    records = {run: record for run in runs if (record := run.read_json(run.job))}
    found = {str(run.path): state(run) for run, record in records.items() if record.get("executor") == "local"}
    queued = [run for run, record in records.items() if record.get("executor") != "local"]
    if not queued:
        return found
    try:
        known = query.own_jobs(slurm_environment())
    except OperationError as error:
        print_note(f"jobs are shown as their runs left them: {error}")
        return found
    for run in queued:
        job_id = str(records[run].get("job_id", ""))
        found[str(run.path)] = _view(run, known.get(job_id, JobInfo(job_id, JobState.UNKNOWN)))
    return found


def _view(run: RunDir, info: JobInfo) -> JobView:
    """A job in plain words; one that Slurm has forgotten is as its run left it."""
    job_id = info.job_id
    if info.state is JobState.UNKNOWN:
        return JobView(job_id, _result(run) or "unknown", "" if _result(run) else "Slurm has no record of it")
    failed = info.state not in STATES
    reason = info.reason or (info.state.value if failed else "")
    if info.state is JobState.FAILED and info.exit_code:
        reason = f"exit code {info.exit_code}"
    return JobView(
        job_id,
        STATES.get(info.state, "failed"),
        "" if info.state is JobState.RUNNING else REASONS.get(reason.split(",")[0], reason),
    )


def cancel(run: RunDir) -> None:
    """Cancel the job of the run's last attempt."""
    record = run.read_json(run.job)
    submit.cancel(run, None if record.get("executor") == "local" else slurm_environment())


def _result(run: RunDir) -> str:
    """The state in the run's ``result.json``; empty without one."""
    state = str(run.read_json(run.result).get("state", ""))
    return state if state in ("completed", "failed", "cancelled") else ""


def discard(run: RunDir) -> None:
    """Remove the folder of a run that was never queued."""
    shutil.rmtree(run.path)


def make_policy(out: Path, task: str, seed: int, steps: int, executor: str) -> dict[str, Any]:
    """Make a tiny policy by a job of one task and return its facts; ``out`` appears complete or not at all.

    Raises `OperationError` when the job fails; its logs then stay beside ``out``.
    """
    found = environment(executor)
    compute = validate(site_profile().values).compute
    exports = [f"export {name}={shlex.quote(value)}" for name, value in sorted(compute.env.items())]
    folder, unfinished = out.with_name(f".{out.name}.job"), out.with_name(f".{out.name}.unfinished")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise invalid(
            "OUT", str(out), f"{out.parent} cannot be made ({error.strerror})", "a new folder in a writable place"
        ) from error
    shutil.rmtree(unfinished, ignore_errors=True)
    handle = run_single(
        _make_tiny_policy,
        *(str(unfinished), task, seed, steps),
        env=clean_environment(os.environ) if found is None else found,
        name="make-policy",
        folder=folder,
        executor=kind(found),
        mem=POLICY_MEMORY,
        time_limit=POLICY_TIME,
        # A container would not see ``out``: there the submitting interpreter makes the policy.
        python=shlex.quote(compute.python) if compute.container == "none" and compute.python else "",
        parameters={"setup": [*compute.setup, *exports]},
    )
    print_note(f"job {handle.job_id} makes the policy (logs in {folder})")
    try:
        with busy("making the policy"):
            made: dict[str, Any] = handle.result()
    except KeyboardInterrupt:
        handle.cancel()
        raise
    if out.exists():
        out.rmdir()
    unfinished.rename(out)
    shutil.rmtree(folder)
    return made


def _make_tiny_policy(out: str, task: str, seed: int, steps: int) -> dict[str, Any]:
    """Runs inside the job; its imports need not be installed where the job is submitted."""
    from libra_hpc.tasks.policy import make_tiny_policy

    return make_tiny_policy(out, task, seed, steps)
