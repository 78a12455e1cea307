"""Run one Python function as a job of one task: submitit writes, submits and carries the result; this module watches.

submitit learns a job's state from ``sacct``, which needs an accounting database; without one, a job that dies before it
wrote its result would be waited for without end.  `QueueWatcher` asks the controller instead (`query.job`), and
`Handle` gives up on a job that Slurm has forgotten.

The function and its arguments must be picklable and, for the result to mean the same, importable where the job runs.
The pickles lie in ``folder``, which belongs to this user alone.
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
from submitit.core.core import Job
from submitit.core.utils import FailedJobError, UncompletedJobError
from submitit.slurm.slurm import SlurmInfoWatcher, SlurmJob

from libra_hpc.errors import OperationError, UserError, invalid

from .command import complaint
from .query import JobState, job, slurm_seconds
from .site import clean_environment

POLL_S = 0.5
RESULT_WAIT_S = 5
"""After the job has ended its result may need this long to show on a network file system."""
FORGOTTEN_AFTER_S = 30.0
"""Slurm not knowing the job for this long is no hiccup: the job is gone."""


class QueueWatcher(SlurmInfoWatcher):
    """States of submitit's jobs, from the controller."""

    def __init__(self, env: Mapping[str, str]) -> None:
        super().__init__(delay_s=5)
        self._env = env

    def update(self) -> None:
        """Ask for every job that has not ended."""
        for job_id in self._registered - self._finished:
            state = job(self._env, job_id).state
            self._info_dict[job_id] = {"State": state.value}
            if state.ended:
                self._finished.add(job_id)
        self._last_status_check = time.time()


class EmbeddedAwareExecutor(submitit.SlurmExecutor):
    """submitit's Slurm executor with an explicit client environment and our watcher."""

    def __init__(self, folder: Path, env: Mapping[str, str], python: str = "") -> None:
        # submitit starts its commands with this process's environment; `env` adds the difference without changing that.
        super().__init__(folder, python=python or shlex.quote(sys.executable))
        self._prefix = env_command(env)

        class WatchedJob(SlurmJob[Any]):
            watcher = QueueWatcher(env)

        self.job_class = WatchedJob

    @classmethod
    def name(cls) -> str:
        """submitit's plugin that the job's own process uses."""
        return "slurm"

    @classmethod
    def affinity(cls) -> int:
        """Always usable: the commands are found through the given environment."""
        return 2

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return [*self._prefix, *super()._make_submission_command(submission_file_path)]


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
        """Whether the function has ended, in whatever way."""
        return bool(self.job.done()) or self.state() not in (JobState.PENDING, JobState.RUNNING)

    def state(self) -> JobState:
        """The job's state; UNKNOWN only once Slurm has not known it for `FORGOTTEN_AFTER_S`."""
        word = str(self.job.state)
        if isinstance(self.job, submitit.LocalJob):
            # submitit's local executor has words of its own, and FINISHED says nothing about how.
            if word == "FINISHED":
                return JobState.COMPLETED if self._succeeded() else JobState.FAILED
            return JobState.CANCELLED if word == "INTERRUPTED" else JobState.RUNNING
        found = JobState.__members__.get(word, JobState.UNKNOWN)
        if found is not JobState.UNKNOWN:
            self._unknown_since = None
            return found
        self._unknown_since = self._unknown_since or time.monotonic()
        return JobState.UNKNOWN if time.monotonic() - self._unknown_since > FORGOTTEN_AFTER_S else JobState.PENDING

    def wait(self) -> None:
        """Return when the job has ended, in whatever way."""
        while not self.done():
            time.sleep(POLL_S)

    def result(self, timeout: float = math.inf) -> Any:
        """What the function returned, waiting at most ``timeout`` seconds.

        Raises ``TimeoutError`` when it has not ended by then, `OperationError` with the function's own traceback when
        it raised, and `OperationError` with the job's state and the end of its error output when it died without a
        result.
        """
        deadline = time.monotonic() + timeout
        while not self.done():
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {self.job_id} ({self.name}) has not ended after {timeout:.0f} s")
            time.sleep(POLL_S)
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
        """Its standard output so far."""
        return self.job.stdout() or ""

    def stderr(self) -> str:
        """Its error output so far."""
        return self.job.stderr() or ""

    def cancel(self) -> None:
        """End it; one that has ended is left alone."""
        self.job.cancel(check=False)


def run_single(
    function: Callable[..., Any],
    *args: Any,
    env: Mapping[str, str],
    name: str,
    folder: Path,
    executor: Literal["slurm", "local"] = "slurm",
    partition: str = "",
    cpus: int = 1,
    mem: str = "2G",
    time_limit: str = "01:00:00",
    python: str = "",
    parameters: Mapping[str, Any] | None = None,
) -> Handle:
    """Submit ``function(*args)`` as a job and return at once: one task, or one a node where ``parameters`` asks for
    several ``nodes``.

    ``python``: shell words that start the interpreter in the job; empty: this one.  ``parameters``: more of submitit's
    for Slurm.

    ``env`` is the environment of Slurm's commands (`slurm_environment`) and of the job; for ``local`` any environment
    will do.  ``folder`` takes pickles and logs.  Raises `UserError` when Slurm refuses the request.
    """
    try:
        seconds = slurm_seconds(time_limit)
    except ValueError:
        raise invalid("time_limit", time_limit, "not a Slurm time", "[days-]hours:minutes:seconds") from None
    minutes = math.ceil((seconds if seconds is not None else 365 * 86400) / 60)
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    if executor == "local":
        command = shlex.join([*env_command(clean_environment(env)), sys.executable])
        local = submitit.LocalExecutor(folder, python=command)
        local.update_parameters(timeout_min=minutes)
        return Handle(name, local.submit(function, *args))
    slurm = EmbeddedAwareExecutor(folder, env, python)
    given: dict[str, Any] = {"job_name": name, "time": minutes, "cpus_per_task": cpus, "mem": mem, "ntasks_per_node": 1}
    if partition:
        given["partition"] = partition
    slurm.update_parameters(**given, **(parameters or {}))
    try:
        # submitit prints Slurm's refusal; the exception carries it too.
        with contextlib.redirect_stderr(io.StringIO()):
            return Handle(name, slurm.submit(function, *args))
    except FailedJobError as error:
        raise UserError(f"Slurm refuses the job {name!r}: {complaint(str(error))}.") from None


def env_command(env: Mapping[str, str]) -> Sequence[str]:
    """An ``env`` command that turns this process's environment into ``env``."""
    removed = [part for name in sorted(os.environ) if name not in env for part in ("-u", name)]
    changed = [f"{name}={value}" for name, value in sorted(env.items()) if os.environ.get(name) != value]
    return ["/usr/bin/env", *removed, *changed]
