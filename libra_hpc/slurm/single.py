"""Run one Python function as a Slurm job, through submitit: of one task, or of one rank on each of several nodes.

- submitit reads job states from ``sacct``, which needs accounting -> `QueueWatcher` asks the controller (`query.job`).
- Slurm has no record of the job for `GONE_AFTER_S` -> `Handle` reports it as ended.

The function and its arguments must be picklable, and importable where the job runs.  The pickles are in ``folder``,
which only this user can read.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import submitit
from msgspec.structs import replace
from submitit.core.core import Job
from submitit.core.utils import FailedJobError, UncompletedJobError
from submitit.slurm.slurm import SlurmInfoWatcher, SlurmJob

from libra_hpc.config.run import RunConfig
from libra_hpc.errors import OperationError, UserError, invalid
from libra_hpc.slurm.interpreter import start_command
from libra_hpc.slurm.queue.command import complaint
from libra_hpc.slurm.queue.query import JobState, cluster_in, job, on_cluster, partitions, slurm_seconds

from .fit import with_resources
from .interpreter import compute_python
from .launch import (
    agent_variables,
    check_lines,
    component_options,
    extra_options,
    marked,
    memory_options,
    named_cluster,
)
from .queue.command import clean_environment
from .queue.job_record import MARK
from .writer import RANK_STARTER, set_up_lines

POLL_S = 0.5
RESULT_WAIT_S = 5
"""Seconds that a result may need to appear on a network file system after the job has ended."""
GONE_AFTER_S = 30.0
"""Seconds after which a job that Slurm has no record of counts as gone; a controller that restarts is back earlier."""


class QueueWatcher(SlurmInfoWatcher):
    """Reads the states of submitit's jobs from the controller."""

    def __init__(self, env: Mapping[str, str], cluster: str = "") -> None:
        super().__init__(delay_s=5)
        self._env, self._cluster = env, cluster

    def update(self) -> None:
        """Query every job that has not ended."""
        for job_id in self._registered - self._finished:
            state = job(self._env, job_id, self._cluster).state
            self._info_dict[job_id] = {"State": state.value}
            if state.ended:
                self._finished.add(job_id)
        self._last_status_check = time.time()


class EnvironmentExecutor(submitit.SlurmExecutor):
    """submitit's Slurm executor with an explicit client environment and `QueueWatcher`."""

    def __init__(self, folder: Path, env: Mapping[str, str], python: str = "", options: Sequence[str] = ()) -> None:
        # submitit starts its commands with this process's environment; `env` adds the difference without changing that.
        super().__init__(folder, python=python or shlex.quote(sys.executable))
        self._prefix, self._options = env_command(env), options

        class WatchedJob(SlurmJob[Any]):
            watcher = QueueWatcher(env, cluster_in(options))

        self.job_class = WatchedJob

    @classmethod
    def name(cls) -> str:
        """Name of the submitit plugin in the job's own process."""
        return "slurm"

    @classmethod
    def affinity(cls) -> int:
        """Always usable: the given environment has the commands."""
        return 2

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        command, *rest = super()._make_submission_command(submission_file_path)
        # On the command line, because submitit's header has one value for each name.
        return [*self._prefix, command, *self._options, *rest]


class Handle:
    """A submitted function."""

    def __init__(self, name: str, job: Job[Any]) -> None:
        self.name = name
        self.job = job
        self._unknown_since: float | None = None
        job._results_timeout_s = 0 if isinstance(job, submitit.LocalJob) else RESULT_WAIT_S

    @property
    def job_id(self) -> str:
        """Slurm job id, or the process id of a local one."""
        return str(self.job.job_id)

    def done(self) -> bool:
        """Whether the job has ended, with or without a result."""
        return bool(self.job.done()) or self.state() not in (JobState.PENDING, JobState.RUNNING)

    def state(self) -> JobState:
        """The job's state; UNKNOWN only after Slurm had no record of it for `GONE_AFTER_S`."""
        word = str(self.job.state)
        if isinstance(self.job, submitit.LocalJob):
            # submitit's local executor has its own words, and FINISHED covers success and failure.
            if word == "FINISHED":
                return JobState.COMPLETED if self._succeeded() else JobState.FAILED
            return JobState.CANCELLED if word == "INTERRUPTED" else JobState.RUNNING
        found = JobState.__members__.get(word, JobState.UNKNOWN)
        if found is not JobState.UNKNOWN:
            self._unknown_since = None
            return found
        self._unknown_since = self._unknown_since or time.monotonic()
        return JobState.UNKNOWN if time.monotonic() - self._unknown_since > GONE_AFTER_S else JobState.PENDING

    def wait(self, timeout: float = math.inf) -> None:
        """Return when the job has ended, in whatever way; raises ``TimeoutError`` after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while not self.done():
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {self.job_id} ({self.name}) has not ended after {timeout:.0f} s")
            time.sleep(POLL_S)

    def result(self, timeout: float = math.inf) -> Any:
        """What the function returned, after a wait of at most ``timeout`` seconds.

        Raises ``TimeoutError`` when it has not ended by then.  Raises `OperationError` with the function's traceback
        when it raised, or with the job's state and error output when it died without a result.
        """
        self.wait(timeout)
        try:
            outcome, value = self.job._get_outcome_and_result()
        except UncompletedJobError as error:
            raise OperationError(f"{self.name} (job {self.job_id}) ended without a result: {error}") from None
        if outcome == "error":
            raise OperationError(f"{self.name} (job {self.job_id}) failed:\n{value}")
        return value

    def of_task(self, task: int) -> Any:
        """What the function returned in one task of a job that has ended; None where it left nothing."""
        try:
            outcome, value = self.job.task(task)._get_outcome_and_result()
        except UncompletedJobError:
            return None
        return value if outcome == "success" else None

    def _succeeded(self) -> bool:
        try:
            return bool(self.job._get_outcome_and_result()[0] == "success")
        except UncompletedJobError:
            return False

    def stdout(self) -> str:
        """Standard output so far."""
        return self.job.stdout() or ""

    def stderr(self) -> str:
        """Error output so far."""
        return self.job.stderr() or ""

    def cancel(self) -> None:
        """Cancel the job, if it still runs."""
        self.job.cancel(check=False)


def run_single(
    function: Callable[..., Any],
    *args: Any,
    env: Mapping[str, str],
    name: str,
    folder: Path,
    executor: Literal["slurm", "local"] = "slurm",
    cpus: int = 1,
    time_limit: str = "01:00:00",
    python: str = "",
    parameters: Mapping[str, Any] | None = None,
    options: Sequence[str] = (),
) -> Handle:
    """Submit ``function(*args)`` as a job and return at once: one task, or one a node where ``parameters`` asks for
    several ``nodes``.

    ``python``: shell words that start the interpreter in the job; empty: this one.  ``parameters``: more of submitit's
    for Slurm.  ``options``: of sbatch, verbatim.

    ``env`` is the environment of Slurm's commands (`slurm_environment`) and of the job.  ``folder`` gets pickles and
    logs.  Raises `UserError` when Slurm refuses the request.
    """
    try:
        seconds = slurm_seconds(time_limit)
    except ValueError:
        raise invalid("time_limit", time_limit, "not a Slurm time", "[days-]hours:minutes:seconds") from None
    minutes = math.ceil((seconds if seconds is not None else 365 * 86400) / 60)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
    except OSError as error:
        raise UserError(f"{folder}: no folder can be made there ({error.strerror}).") from error
    if executor == "local":
        command = shlex.join([*env_command(clean_environment(env)), sys.executable])
        local = submitit.LocalExecutor(folder, python=command)
        local.update_parameters(timeout_min=minutes)
        return Handle(name, local.submit(function, *args))
    slurm = EnvironmentExecutor(folder, env, python, options)
    given: dict[str, Any] = {"job_name": name, "time": minutes, "cpus_per_task": cpus, "ntasks_per_node": 1}
    slurm.update_parameters(**given, **(parameters or {}))
    try:
        # submitit prints Slurm's refusal, which the exception also contains.
        with contextlib.redirect_stderr(io.StringIO()):
            return Handle(name, slurm.submit(function, *args))
    except FailedJobError as error:
        raise UserError(f"Slurm refuses the job {name!r}: {complaint(str(error))}.") from None


def env_command(env: Mapping[str, str]) -> Sequence[str]:
    """An ``env`` command line that turns this process's environment into ``env``."""
    removed = [part for name in sorted(os.environ) if name not in env for part in ("-u", name)]
    changed = [f"{name}={value}" for name, value in sorted(env.items()) if os.environ.get(name) != value]
    return ["/usr/bin/env", *removed, *changed]


def answered(function: Callable[..., Any], *arguments: Any) -> tuple[str, Any]:
    """("", what the function returns), or (its error in one sentence, None), to be read in another process."""
    try:
        return "", function(*arguments)
    except (UserError, OperationError) as error:
        return str(error), None


def submit_on_nodes(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    config: RunConfig,
    env: Mapping[str, str],
    *,
    component: str,
    nodes: int,
    name: str,
    folder: Path,
    time_limit: str,
    mark: str = MARK,
) -> Handle:
    """Queue ``function(*arguments)`` as one rank on each of ``nodes`` nodes of ``component``, started as agents are.

    ``mark``: see `Launch.mark`.
    Raises `UserError` when Slurm refuses the job.
    """
    check_lines(config)
    config = with_resources(config, partitions(env, *on_cluster(named_cluster(config))))
    wanted = replace(getattr(config.components, component), nodes=nodes)
    started = start_command(config, folder, named=False)
    python = shlex.join([*started.prefix, compute_python(config), *RANK_STARTER])
    return run_single(
        function,
        *arguments,
        env=env,
        name=name,
        folder=folder,
        cpus=wanted.cpus,
        time_limit=time_limit,
        python=python,
        parameters={
            "nodes": nodes,
            "setup": set_up_lines(config, agent_variables(config, {})),
            "srun_args": ["--mpi=none", "--export=ALL", *started.step],
            "additional_parameters": component_options(config, component, wanted),
        },
        options=marked(
            [
                *memory_options(config.slurm, wanted.mem, wanted.cpus, wanted.gpus),
                *extra_options(config, component, wanted),
            ],
            mark,
        ),
    )
