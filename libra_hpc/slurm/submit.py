"""Queue a run with sbatch; read the state of a run or cancel it, with Slurm or without."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from datetime import datetime

from libra_hpc.config.node_groups import COMPONENTS
from libra_hpc.errors import OperationError, SlurmUnreachable, UserError, invalid
from libra_hpc.facts.rundir import RunDir
from libra_hpc.files import write_atomic
from libra_hpc.slurm.queue.command import SlurmRefused, call
from libra_hpc.slurm.queue.job_record import JobRecord, read_job, start_attempt, write_job
from libra_hpc.slurm.queue.query import JobInfo, JobState, cluster_name, job

from . import local
from .launch import Launch, given_options
from .writer import het_script

SUBMIT_TIMEOUT_S = 90.0
"""sbatch itself gives up after 60 s without a controller.  Ending it earlier could leave a queued job without a record.
"""
USER_MISTAKES = (
    "invalid",
    "not available",
    "not be satisfied",
    "can not be satisfied",
    "unrecognized",
    "exceed",
    "violates",
    "limit",
)
"""Words of sbatch's refusals that mean a mistake in the request, not a fault of the cluster."""


def submit(launch: Launch, env: Mapping[str, str]) -> str:
    """Write ``job.sbatch``, queue it, write ``job.json``; returns the Slurm job id.

    ``env`` is Slurm's client environment (`slurm_environment`).  Raises `UserError` when Slurm finds a mistake in the
    request, `SlurmUnreachable` when no controller answers, `OperationError` when Slurm refuses for another reason.
    """
    write_atomic(launch.run.script, het_script(launch).encode())
    start_attempt(launch.run, launch.attempt)
    # Before the job is queued: a failure after that would leave a job without a record.
    cluster = cluster_name(env)
    answer = _sbatch(["--parsable"], launch, env)
    # "id" or "id;cluster"
    job_id = answer.strip().split(";")[0]
    if not job_id.isdigit():
        raise OperationError(f"sbatch answered {answer.strip()!r} instead of a job id.")
    write_job(launch.run, JobRecord("slurm", job_id, launch.attempt, time.time(), cluster=cluster))
    return job_id


def expected_start(launch: Launch, env: Mapping[str, str]) -> float | None:
    """Let Slurm check the script (``sbatch --test-only``) and queue nothing; returns the time at which it would start,
    in epoch seconds, None where Slurm names none.  Raises as `submit` does."""
    write_atomic(launch.run.script, het_script(launch).encode())
    answer = _sbatch(["--test-only"], launch, env)
    times = re.findall(r"to start at (\S+)", answer)
    # The last component to start starts the job.
    return max((datetime.fromisoformat(text).timestamp() for text in times), default=None)


def cancel(target: RunDir | str, env: Mapping[str, str] | None = None) -> bool:
    """Cancel a run, or a Slurm job by id; returns False when it had ended already.

    ``env`` is Slurm's client environment, not needed for a local run.
    """
    if isinstance(target, RunDir):
        record = read_job(target)
        if record.executor == "local":
            return local.cancel(target)
        job_id, found = record.job_id, state(target, env)
    else:
        job_id, found = target, job(_required(env, target), target)
    env = _required(env, job_id)
    if found.state.ended or found.state is JobState.UNKNOWN:
        return False
    try:
        call(["scancel", job_id], env)
    except SlurmRefused as refusal:
        if re.search("invalid job id", str(refusal), re.IGNORECASE):
            return False
        raise OperationError(f"Slurm did not cancel job {job_id}: {refusal}.") from None
    return True


def state(run: RunDir, env: Mapping[str, str] | None = None) -> JobInfo:
    """State of the job that carries ``run``; ``env`` as for `cancel`."""
    record = read_job(run)
    if record.executor == "local":
        return local.state(run)
    found = job(_required(env, record.job_id), record.job_id)
    return found if found.of(run.name) else JobInfo(record.job_id, JobState.UNKNOWN)


def _required(env: Mapping[str, str] | None, job_id: str) -> Mapping[str, str]:
    if env is None:
        raise SlurmUnreachable(f"Job {job_id} is a Slurm job, and no Slurm controller is known here.")
    return env


def _sbatch(options: list[str], launch: Launch, env: Mapping[str, str]) -> str:
    name = launch.config.run.name
    try:
        return call(
            ["sbatch", *options, str(launch.run.script)],
            env,
            tries=1,
            timeout_s=SUBMIT_TIMEOUT_S,
            # What a test would find out is on its error output.
            with_errors="--test-only" in options,
        )
    except SlurmRefused as refusal:
        reason = str(refusal)
        if any(word in reason.lower() for word in USER_MISTAKES):
            components = {name: getattr(launch.config.components, name) for name in COMPONENTS}
            for field, option in given_options(launch.config, components):
                if option.split("=")[0] in reason:
                    raise invalid(field, option, f"Slurm refuses it ({reason})") from None
            raise UserError(f"Slurm refuses the job of run {name!r}: {reason}.") from None
        raise OperationError(f"Slurm did not take the job of run {name!r}: {reason}.") from None
