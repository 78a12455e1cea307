"""Runs from Python: what the verbs of `libra-hpc` do, for notebooks and scripts.

    from libra_hpc import api

    job = api.submit("run.toml", {"run.steps": 200})
    job.wait()
    rewards = [step["reward"] for step in job.metrics()]

Warnings go to stderr, as those of the verbs do.  A mistake raises `libra_hpc.errors.UserError`, a failure
`libra_hpc.errors.OperationError`, each with one sentence.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from libra_hpc_cli import jobs
from libra_hpc_cli import logs as logs_verb
from libra_hpc_cli import plan as plan_verb
from libra_hpc_cli import status as status_verb
from libra_hpc_cli import submit as submit_verb
from libra_hpc_cli.cancel import end_all
from libra_hpc_cli.check import check_all, load, warn
from libra_hpc_cli.follow import wait_silently
from libra_hpc_cli.runs import RUNS, attempt, find_run
from libra_hpc_cli.sweep import swept

from libra_hpc.config import grid
from libra_hpc.config.load import flat
from libra_hpc.errors import OperationError
from libra_hpc.facts import series
from libra_hpc.facts.rundir import RunDir
from libra_hpc.planning.work import Assumed
from libra_hpc.slurm.queue.run_state import RunState

Overrides = Mapping[str, Any] | Sequence[str]
"""Values by dotted key, ``{"optimizer.lr": 1e-6}``, or texts as after ``-o``."""
__all__ = ["Job", "check", "find", "submit"]


class Job:
    """A run, and the job that carries it."""

    def __init__(self, run: RunDir) -> None:
        run.resolved()
        self._run = run
        self.name, self.path = run.name, run.path

    def __repr__(self) -> str:
        return f"Job({str(self.path)!r})"

    @property
    def state(self) -> str:
        """``pending``, ``running``, ``completed``, ``failed``, and others of `libra-hpc status`."""
        return jobs.state(self._run).state

    def status(self) -> dict[str, Any]:
        """What `libra-hpc status RUN --json` prints; ``status`` in it is the last snapshot, None before the first,
        and ``summary`` has the totals of a run that is over."""
        return status_verb.facts(self._run)

    def metrics(self) -> list[dict[str, Any]]:
        """One record a step so far, the numbers of docs/columns.md by name: ``pandas.DataFrame(job.metrics())``."""
        return [dict(line) for line in series.steps(self._run)]

    def logs(self, tail: int = 20) -> dict[str, list[str]]:
        """The last lines of each log file of the last attempt, by file."""
        files = logs_verb.select(self._run.logs(max(attempt(self._run), 1)), None, None)
        return {str(path): logs_verb.last_lines(path, tail) for path in files}

    def wait(self, timeout_s: float | None = None) -> RunState:
        """Wait until the run is over, or for ``timeout_s``; returns its state: ``state``, ``reason``, and whether it
        is ``over``.  An interrupt leaves the run alone."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s

        def late() -> bool:
            return deadline is not None and time.monotonic() >= deadline

        return wait_silently(self._run, late)

    def result(self) -> dict[str, Any]:
        """Wait for the run and return its `status`; raises `OperationError` where it did not complete."""
        found = self.wait()
        if found.state != "completed":
            raise OperationError(f"{self.name} is {found.words}{f': {found.reason}' if found.reason else ''}")
        return self.status()

    def cancel(self, *, now: bool = False) -> None:
        """Have the run save at its next step boundary and stop, as `libra-hpc cancel` does.

        ``now``: end the job at once, without a save.
        """
        for _ in end_all([self._run], now=now):
            pass


def find(run: str | Path) -> Job:
    """The run with this folder, name or job id; raises `UserError` where there is none."""
    return Job(find_run(str(run), Path(RUNS)))


def check(run_file: str | Path, overrides: Overrides = ()) -> list[str]:
    """Check a run file as `libra-hpc check` does; returns its warnings."""
    return check_all(load(Path(run_file), _texts(overrides)), slurm_required=False).warnings


def plan(run_file: str | Path, overrides: Overrides = (), *, gpus: int = 0, best: int = 5) -> dict[str, Any]:
    """The best splits of the nodes, as `libra-hpc plan RUN.toml --json` prints them.

    ``gpus``: to plan for, 0: those of the run file.
    """
    config = load(Path(run_file), _texts(overrides))
    asked = plan_verb.question(config, Assumed(), gpus=gpus)
    return plan_verb.plan_facts(asked, plan_verb.best(asked, best))


def submit(
    run_file: str | Path,
    overrides: Overrides = (),
    *,
    executor: Literal["slurm", "local"] | None = None,
    engine: Literal["real", "simulated"] | None = None,
    until_done: bool = False,
) -> Job:
    """Check a run and queue it, as `libra-hpc submit` does; ``until_done``: again after each time limit."""
    texts = submit_verb.with_options(_texts(overrides), executor, engine)
    return _queued(Path(run_file), None, texts, None, until_done)


def resume(
    run: str | Path | Job, overrides: Overrides = (), *, from_step: int | None = None, until_done: bool = False
) -> Job:
    """Go on with a run, as `libra-hpc submit --resume` does; ``from_step``: from which of its checkpoints."""
    return _queued(None, str(run.path if isinstance(run, Job) else run), _texts(overrides), from_step, until_done)


def sweep(
    run_file: str | Path,
    over: Mapping[str, Sequence[Any]],
    overrides: Overrides = (),
    *,
    name: str = "",
    most: int = 0,
    executor: Literal["slurm", "local"] | None = None,
    engine: Literal["real", "simulated"] | None = None,
) -> list[Job]:
    """Queue a run for every combination of the values of ``over``, as `libra-hpc sweep` does, however many they are.

    ``name``: of the sweep, empty: ``run.name``; ``most``: runs at a time, 0: as the queue has room.
    """
    axes = grid.parse_axes([f"{key}={','.join(map(json.dumps, values))}" for key, values in over.items()])
    texts = submit_verb.with_options(_texts(overrides), executor, engine)
    _, members, queued = swept(Path(run_file), axes, texts, name=name, most=most)
    return [Job(queued[member.name]) for member in members]


def _queued(
    run_file: Path | None, before: str | None, overrides: Sequence[str], from_step: int | None, until_done: bool
) -> Job:
    config, last = submit_verb.configured(run_file, before, overrides)
    config = submit_verb.with_job_options(config, (), until_done)
    submit_verb.check_start(config, last, from_step)
    checked = check_all(config, slurm_required=True)
    warn(checked.warnings)
    run, _ = submit_verb.enqueue(checked, run_file, last, from_step)
    return Job(run)


def _texts(overrides: Overrides) -> list[str]:
    if not isinstance(overrides, Mapping):
        return list(overrides)
    # Of numbers, texts and lists JSON and TOML have one form.
    return [f"{key}={json.dumps(value)}" for key, value in flat(overrides).items()]
