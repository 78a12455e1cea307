"""Jobs of runs, with Slurm or the local executor: queue, state (`libra_hpc.slurm.queue.run_state`), cancel."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import msgspec

from libra_hpc.config.load import load_resolved, validate
from libra_hpc.config.site import site_profile
from libra_hpc.errors import OperationError, UserError, error_text, invalid
from libra_hpc.facts.rundir import RunDir
from libra_hpc.facts.series import duration
from libra_hpc.facts.status import STALE_S, read_status, write_fault
from libra_hpc.files import complete_folder
from libra_hpc.slurm import local, submit
from libra_hpc.slurm.launch import Launch, memory_options
from libra_hpc.slurm.queue import query
from libra_hpc.slurm.queue.cause import with_cause
from libra_hpc.slurm.queue.command import clean_environment, slurm_environment
from libra_hpc.slurm.queue.job_record import JobRecord, read_job
from libra_hpc.slurm.queue.query import JobInfo, JobState
from libra_hpc.slurm.queue.run_state import SILENT_S, NoAnswer, RunRecords, RunState, run_end, run_state
from libra_hpc.slurm.writer import expanded, het_script, set_up_lines

from .output import busy, print_note

THREADS = 32
"""Runs whose state is found at a time: most of it is waiting."""
LOOK_S = 3.0
"""Between two looks at a status that seems old; it is replaced once a second."""
_offsets: dict[Path, tuple[float, float]] = {}
"""By run: the snapshot that was looked at twice, and by how many seconds its machine's clock is ahead of this one's."""

Environment = Mapping[str, str]

POLICY_MEMORY = "4G"
"""A trainer process takes 0.6 GB, plus torch's libraries."""
POLICY_TIME = "00:30:00"
"""The warm start takes one or two minutes on a free core."""


def kind(environment: Environment | None) -> Literal["slurm", "local"]:
    """Name of the executor of an environment."""
    return "local" if environment is None else "slurm"


def environment(executor: str) -> Environment | None:
    """Environment of Slurm's client commands, or None for the local executor.

    Raises `SlurmUnreachable` when Slurm is needed and none answers.
    """
    return None if executor == "local" else slurm_environment()


def cluster(run: RunDir) -> str:
    """Name of the cluster that has the run's job; empty for the local executor."""
    return str(run.read_json(run.job).get("cluster", ""))


def script(launch: Launch) -> str:
    """The sbatch script of an attempt, or for the local executor its command line."""
    if launch.config.slurm.executor == "local":
        variables = expanded(launch.variables, clean_environment(os.environ))
        return shlex.join(["env", *(f"{name}={value}" for name, value in variables.items()), *local.command(launch)])
    return het_script(launch)


def queue(launch: Launch, environment: Environment | None) -> str:
    """Queue one attempt, or start it here without an environment; returns the job id."""
    return local.start(launch) if environment is None else submit.submit(launch, environment)


class JobQueue:
    """Asks Slurm, or the local launcher, about jobs of runs.

    It finds Slurm once: every further question is one call.
    """

    def __init__(self) -> None:
        self._found: Environment | None = None

    def ask(self, run: RunDir) -> JobInfo | NoAnswer:
        """The job of the run's last attempt."""
        record, _ = _record(run)
        if record is None:
            return NoAnswer()
        try:
            return submit.state(run, None if record.executor == "local" else self._slurm())
        except OperationError as error:
            # Next time a ping comes first, which a dead controller fails at once.
            self._found = None
            return _silence(error)

    def ask_all(self, runs: Sequence[RunDir]) -> dict[str, JobInfo | NoAnswer]:
        """The jobs of several runs by path, with one question to the queue, and one to the accounting for those that
        the queue has no record of."""
        records = {run: record for run in runs if (record := _record(run)[0]) is not None}
        found = {str(run.path): self.ask(run) for run, record in records.items() if record.executor == "local"}
        queued = {run: record for run, record in records.items() if record.executor == "slurm"}
        if not queued:
            return found
        try:
            known = self._known(queued)
        except OperationError as error:
            print_note(f"runs are shown as their folders have them: {error}")
            return {**found, **{str(run.path): _silence(error) for run in queued}}
        for run, record in queued.items():
            info, none = known.get((record.asked, record.job_id)), JobInfo(record.job_id, JobState.UNKNOWN)
            found[str(run.path)] = info if info is not None and info.of(run, record) else none
        return found

    def _known(self, queued: Mapping[RunDir, JobRecord]) -> dict[tuple[str, str], JobInfo]:
        """What queue and accounting know, by cluster and job id."""
        found: dict[tuple[str, str], JobInfo] = {}
        for cluster in sorted({record.asked for record in queued.values()}):
            ids = {record.job_id: run for run, record in queued.items() if record.asked == cluster}
            known = query.own_jobs(self._slurm(), cluster)
            unlisted = [job_id for job_id, run in ids.items() if job_id not in known and not run.result.exists()]
            try:
                known.update(query.accounts(self._slurm(), unlisted, cluster) if unlisted else {})
            except OperationError as error:
                print_note(f"runs that have left the queue are shown as their folders have them: {error}")
            found |= {(cluster, job_id): info for job_id, info in known.items()}
        return found

    def _slurm(self) -> Environment:
        if self._found is None:
            self._found = slurm_environment()
        return self._found


def records(run: RunDir) -> RunRecords:
    """What the run directory has of the last attempt."""
    (job, unread), result = _record(run), run.read_json(run.result)
    attempt = 0 if job is None else job.attempt
    end = run_end(result.get("state"), result.get("message"), result.get("t"))
    end = end if result.get("attempt", attempt) == attempt else None
    return RunRecords(job, read_status(run, attempt), end, unread)


def state(run: RunDir, queue: JobQueue | None = None) -> RunState:
    """The state of a run; the queue is asked only where it can add something."""
    answer = NoAnswer() if records(run).settled else (queue or JobQueue()).ask(run)
    return judge(run, answer, time.time())


def states(runs: Sequence[RunDir]) -> dict[str, RunState]:
    """The states of several runs by path."""
    answers = JobQueue().ask_all([run for run in runs if not records(run).settled])
    with ThreadPoolExecutor(THREADS) as pool:
        found = pool.map(lambda run: judge(run, answers.get(str(run.path), NoAnswer()), time.time()), runs)
        return {str(run.path): state for run, state in zip(runs, found, strict=True)}


def judge(run: RunDir, answer: JobInfo | NoAnswer, now: float) -> RunState:
    """The state of a run by its records, which are read now, and an answer of before; a failure has its cause."""
    ended = isinstance(answer, JobInfo) and answer.state.ended
    now = now if ended or records(run).settled else clock(run, now)
    known = records(run)
    found = run_state(known, answer, now)
    age = now - known.at
    if known.at and age > STALE_S and not found.over and (why := write_fault(run)):
        reason = "; ".join(filter(None, [f"its status is {duration(age)} old, because {why}", found.reason]))
        return msgspec.structs.replace(found, reason=reason)
    if found.state != "failed" or known.job is None:
        return found
    return msgspec.structs.replace(found, reason=with_cause(found.reason, run.logs(known.job.attempt)))


def clock(run: RunDir, now: float) -> float:
    """``now`` by the clock of the machine that writes a run's status, where that differs from this one's by much.

    A status that seems old, or of a time to come, is read again: a newer one proves that the run lives.
    """
    status, (looked, offset) = read_status(run, 0), _offsets.get(run.path, (0.0, 0.0))
    seen = now if status is None else status.updated_at
    if abs(now + offset - seen) > SILENT_S and seen != looked:
        time.sleep(LOOK_S)
        later = read_status(run, 0)
        if later is not None and later.updated_at > seen:
            seen = later.updated_at
            offset = seen - now
        _offsets[run.path] = seen, offset
    return now + offset


def run_folder(job_id: str) -> Path | None:
    """The run directory of a Slurm job, by the script that Slurm has of it; None when it does not know the job."""
    try:
        script = query.job_script(slurm_environment(), job_id) if job_id.isdigit() else None
    except OperationError:
        return None
    return None if script is None else script.parent


def _silence(error: OperationError) -> NoAnswer:
    """Why no queue answered, without the ways out."""
    return NoAnswer(str(error).partition(";")[0].rstrip("."))


def _record(run: RunDir) -> tuple[JobRecord | None, str]:
    """The job of a run, or why its record cannot be read; empty where there is none."""
    try:
        return read_job(run), ""
    except UserError as error:
        return None, str(error).rstrip(".") if os.path.lexists(run.job) else ""


def cancel(run: RunDir) -> bool:
    """Cancel the job of the run's last attempt; returns False where none is to be cancelled."""
    try:
        return submit.cancel(run, None if read_job(run).executor == "local" else slurm_environment())
    except OSError as error:
        raise OperationError(f"{run.name} cannot be cancelled ({error_text(error)}).") from error


def clean_up(run: RunDir) -> str:
    """Have what the start before a requeue left in memory removed; a sentence about it, empty where nothing is left."""
    config, env, nodes = load_resolved(run.config), slurm_environment(), list[str]()
    for node in submit.kept_nodes(run, config, read_job(run).attempt):
        submit.queue_clean_up(run, config, node, env)
        nodes.append(node)
    return f"a small job a node frees the memory that its snapshots have on {', '.join(nodes)}" if nodes else ""


def cancel_left(name: str) -> list[str]:
    """Cancel this user's jobs with that id, or of a run of that name, whose folder is gone; returns their ids."""
    try:
        environment = slurm_environment()
        left = submit.left_jobs(name, environment)
    except OperationError:
        return []
    return [job_id for job_id in left if submit.cancel(job_id, environment)]


def discard(run: RunDir) -> None:
    """Remove the folder of a run that was never queued."""
    shutil.rmtree(run.path)


def make_policy(out: Path, task: str, seed: int, steps: int, executor: str) -> dict[str, Any]:
    """Make a tiny policy by a job of one task and return its facts; ``out`` appears complete or not at all.

    Raises `OperationError` when the job fails; its logs then stay beside ``out``.
    """
    found = environment(executor)
    config = validate(site_profile())
    compute = config.compute
    folder, unfinished = out.with_name(f".{out.name}.job"), out.with_name(f".{out.name}.unfinished")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise invalid(
            "OUT", str(out), f"{out.parent} cannot be made ({error.strerror})", "a new folder in a writable place"
        ) from error
    shutil.rmtree(unfinished, ignore_errors=True)
    from libra_hpc.slurm.single import run_single

    handle = run_single(
        make_tiny_policy,
        *(str(unfinished), task, seed, steps),
        env=clean_environment(os.environ) if found is None else found,
        name="make-policy",
        folder=folder,
        executor=kind(found),
        time_limit=POLICY_TIME,
        # A container would not see ``out``: there the submitting interpreter makes the policy.
        python=shlex.quote(compute.python) if compute.container == "none" and compute.python else "",
        parameters={"setup": set_up_lines(config, compute.env)},
        options=memory_options(config.slurm, POLICY_MEMORY),
    )
    print_note(f"job {handle.job_id} makes the policy (logs in {folder})")
    try:
        with busy("making the policy"):
            made: dict[str, Any] = handle.result()
    except KeyboardInterrupt:
        handle.cancel()
        raise
    shutil.rmtree(folder)
    if "error" in made:
        raise UserError(made["error"])
    complete_folder(unfinished, out)
    return made


def make_tiny_policy(out: str, task: str, seed: int = 0, steps: int = 2000) -> dict[str, Any]:
    """Make a tiny policy in ``out``, with ``steps`` supervised steps (0: random weights).

    Runs inside the job; its imports need not be installed where the job is submitted. Returns parameters, steps,
    seconds and final_loss (mean of the last 100 steps, nats per token; NaN for 0 steps), or ``error``: a sentence.
    """
    from libra_hpc.tasks.tiny_policy import batches, learnable, write_folder

    began, loss = time.perf_counter(), math.nan
    try:
        found = learnable("--task", task)
    except UserError as error:
        return {"error": str(error)}
    parameters = write_folder(out, found.words, seed)
    if steps:
        from libra_hpc.trainer.sft import warm_start

        loss = warm_start(out, out, batches(out, found, seed, steps), steps)["last_loss"]
    return {"parameters": parameters, "steps": steps, "seconds": time.perf_counter() - began, "final_loss": loss}
