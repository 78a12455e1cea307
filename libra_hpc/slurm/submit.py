"""Queue a run with sbatch; read the state of a run or cancel it, with Slurm or without."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

import msgspec

from libra_hpc.config.node_groups import rank_components
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import OperationError, SlurmUnreachable, UserError, invalid
from libra_hpc.facts.rundir import RunDir, read_lines
from libra_hpc.files import OWNER_ONLY, write_atomic
from libra_hpc.process.agent_folders import removal
from libra_hpc.protocol.ranks_stop import STATES
from libra_hpc.slurm.queue.command import SlurmRefused, SlurmSilent, call
from libra_hpc.slurm.queue.job_record import JobRecord, read_job, start_attempt, write_job
from libra_hpc.slurm.queue.query import (
    JobInfo,
    JobState,
    answered_job,
    cluster_name,
    job,
    on_cluster,
    own_jobs,
    partitions,
)

from . import local
from .launch import Launch, component_options, memory_options, named_cluster
from .refusal import refusal
from .writer import het_script, spot_script

SUBMIT_TIMEOUT_S = 90.0
"""sbatch itself gives up after 60 s without a controller.  Ending it earlier could leave a queued job without a record.
"""
TEST = "--test-only"
USER_MISTAKES = (
    "invalid",
    "not available",
    "not be satisfied",
    "can not be satisfied",
    "unrecognized",
    "permitted",
    "denied",
    "dependency problem",
    "exceed",
    "violates",
    "must",
    "specify",
    "required",
    "limit",
)
"""Words of sbatch's refusals that mean a mistake in the request, not a fault of the cluster."""

CLEAN_MINUTES = 5
"""For hundreds of GB: memory is freed at 5 to 10 GB/s.  Half: too short on a busy node; double: it starts later."""
CLEAN_DEADLINE = "now+1day"
"""Until then the node must be up.  Half: over by morning; double: such jobs fill the user's list for longer."""


class MaybeQueued(OperationError):
    """Nobody knows whether a job was queued: its files must stay."""


def submit(launch: Launch, env: Mapping[str, str]) -> str:
    """Write ``job.sbatch``, queue it, write ``job.json``; returns the Slurm job id.

    ``env`` is Slurm's client environment (`slurm_environment`).  Raises `UserError` when Slurm finds a mistake in the
    request, `SlurmUnreachable` when no controller answers, `OperationError` when Slurm refuses for another reason,
    `MaybeQueued` when nobody knows what it did.
    """
    write_atomic(launch.run.script, het_script(launch).encode(), OWNER_ONLY)
    _test_spot(launch, env)
    start_attempt(launch.run, launch.attempt)
    # Before the job is queued: a failure after that would leave a job without a record.
    own = cluster_name(env)
    job_id, cluster = _queue(launch, env)
    record = JobRecord(
        "slurm",
        job_id,
        launch.attempt,
        time.time(),
        cluster or own,
        bool(cluster),
        name=launch.config.run.name,
        mark=launch.mark,
    )
    try:
        write_job(launch.run, record)
    except OSError:
        # Nobody could find it, or cancel it.
        cancel(job_id, env, record.asked)
        raise
    return job_id


def _queue(launch: Launch, env: Mapping[str, str]) -> tuple[str, str]:
    """Queue the script and return its job id, and its cluster where sbatch was asked for one.

    Sites print greetings beside the id, and an answer can get lost: then the queue is asked for a job of this script.
    """
    script, named = str(launch.run.script), named_cluster(launch.config)
    try:
        answer = _sbatch("--parsable", launch, env)
        job_id, cluster = answered_job(answer)
        if job_id:
            return job_id, cluster or named
        failure = OperationError(f"sbatch answered {answer.strip()!r} instead of a job id.")
    except SlurmSilent as silence:
        failure = silence
    try:
        jobs = own_jobs(env, named)
        ids = [job_id for job_id, info in jobs.items() if info.script == script and not info.state.ended]
    except OperationError:
        why = f"{str(failure).partition(';')[0].rstrip('.')}; its job may be queued, and squeue does not answer either"
        raise MaybeQueued(f"{why}. A job of {script} is in `squeue --me -o '%i %o'`, or was not queued.") from None
    if not ids:
        raise failure
    return max(ids, key=int), named


def expected_start(launch: Launch, env: Mapping[str, str]) -> float | None:
    """Let Slurm check the script (``sbatch --test-only``) and queue nothing; returns the time at which it would start,
    in epoch seconds, None where Slurm names none.  Raises as `submit` does."""
    write_atomic(launch.run.script, het_script(launch).encode(), OWNER_ONLY)
    _test_spot(launch, env)
    answer = _sbatch(TEST, launch, env)
    times = re.findall(r"to start at (\S+)", answer)
    # The last component to start starts the job.
    return max((datetime.fromisoformat(text).timestamp() for text in times), default=None)


def cancel(target: RunDir | str, env: Mapping[str, str] | None = None, cluster: str = "") -> bool:
    """Cancel a run, or a Slurm job by id on a ``cluster``; returns False when it had ended already.

    ``env`` is Slurm's client environment, not needed for a local run.
    """
    if isinstance(target, RunDir):
        record = read_job(target)
        if record.executor == "local":
            return local.cancel(target)
        job_id, cluster, found = record.job_id, record.asked, state(target, env)
    else:
        job_id, found = target, job(_required(env, target), target, cluster)
    env = _required(env, job_id)
    if found.state.ended or found.state is JobState.UNKNOWN:
        return False
    try:
        call(["scancel", *on_cluster(cluster), job_id], env)
    except SlurmRefused as refusal:
        if re.search("invalid job id", str(refusal), re.IGNORECASE):
            return False
        raise OperationError(f"Slurm did not cancel job {job_id}: {refusal}.") from None
    return True


def left_jobs(name: str, env: Mapping[str, str]) -> list[str]:
    """This user's jobs with that id, or of a run of that name, whose script is gone with the run's folder."""

    def left(info: JobInfo) -> bool:
        script, run = Path(info.script), RunDir(Path(info.script).parent)
        ours = bool(info.mark) and run.name.startswith(info.name.removesuffix("-spot"))
        ours &= script in (run.script, run.spot_script) and Path(name).name in (info.job_id, run.name)
        return ours and not script.exists() and not info.state.ended

    return [job_id for job_id, info in own_jobs(env).items() if left(info)]


def kept_nodes(run: RunDir, config: RunConfig, attempt: int) -> list[str]:
    """Nodes on which the last start of an attempt left snapshots in memory."""
    why = run.read_json(run.ended(attempt)).get("why", "lost")
    if not config.train.snapshot_every or STATES.get(why) != "restarting":
        return []
    core = [rank for rank, name in enumerate(rank_components(config)) if name == "train"]
    joined = {event["rank"]: event["host"] for event in read_lines(run.events) if event.get("kind") == "agent_joined"}
    return sorted({joined[rank] for rank in core if rank in joined})


def queue_clean_up(run: RunDir, config: RunConfig, node: str, env: Mapping[str, str]) -> None:
    """Queue the job that empties a node's memory of a run; raises `OperationError`."""
    component = msgspec.structs.replace(config.components.train, gpus=0)
    given = component_options(config, "train", component) | {
        "job-name": f"{config.run.name}-clean-up",
        "nodelist": node,
        "nodes": "1",
        "ntasks": "1",
        "time": str(CLEAN_MINUTES),
        "deadline": CLEAN_DEADLINE,
        "output": "/dev/null",
        "chdir": "/",
        "wrap": removal(run.path),
    }
    given.pop("gres", None)
    options = [*(f"--{option}={value}" for option, value in given.items()), *memory_options(config.slurm, "100M")]
    call(["sbatch", *on_cluster(named_cluster(config)), "--parsable", *options], env, tries=1)


def state(run: RunDir, env: Mapping[str, str] | None = None) -> JobInfo:
    """State of the job that carries ``run``; ``env`` as for `cancel`."""
    record = read_job(run)
    if record.executor == "local":
        return local.state(run)
    found = job(_required(env, record.job_id), record.job_id, record.asked)
    return found if found.of(run, record) else JobInfo(record.job_id, JobState.UNKNOWN)


def _required(env: Mapping[str, str] | None, job_id: str) -> Mapping[str, str]:
    if env is None:
        raise SlurmUnreachable(f"Job {job_id} is a Slurm job, and no Slurm controller is known here.")
    return env


def _sbatch(option: str, launch: Launch, env: Mapping[str, str]) -> str:
    name = launch.config.run.name
    try:
        # What a test finds out is on its error output.
        return _answer([option, str(launch.run.script)], env, with_errors=option == TEST)
    except SlurmRefused as refused:
        reason = str(refused)
    try:
        known = partitions(env, "--all", *on_cluster(named_cluster(launch.config)))
    except OperationError:
        known = []
    if mistake := refusal(launch.config, reason, known):
        raise invalid(*mistake)
    if option == TEST and "not available" in reason:
        # Of nodes that are there: a job would be queued, and wait for them.
        return ""
    if any(word in reason.lower() for word in USER_MISTAKES):
        raise UserError(f"Slurm refuses the job of run {name!r}: {reason}.")
    raise OperationError(f"Slurm did not take the job of run {name!r}: {reason}.")


def _answer(words: Sequence[str], env: Mapping[str, str], *, with_errors: bool = False) -> str:
    return call(["sbatch", *words], env, tries=1, timeout_s=SUBMIT_TIMEOUT_S, with_errors=with_errors)


def _test_spot(launch: Launch, env: Mapping[str, str]) -> None:
    """Write the script of jobs of one node, and let Slurm check it where ``[borrow.spot]`` asks for some."""
    if launch.config.borrow.spot.nodes or launch.config.planner.fewer_nodes == "auto":
        write_atomic(launch.run.spot_script, spot_script(launch).encode(), OWNER_ONLY)
    if launch.config.borrow.spot.nodes:
        try:
            _answer([TEST, str(launch.run.spot_script)], env)
        except SlurmRefused as refused:
            if "not available" not in str(refused):
                raise UserError(f"[borrow.spot]: Slurm refuses its jobs ({refused}).") from None
