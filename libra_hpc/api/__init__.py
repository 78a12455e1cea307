"""Runs from Python: what the verbs of `libra-hpc` do, for notebooks and scripts.

    from libra_hpc import api

    run = api.submit("run.toml", ["run.steps=200"])
    api.wait(run)
    rewards = [step["reward"] for step in api.metrics(run)]

A run is what `submit` returns, its folder, its name, or its job id.  Warnings go to stderr, as those of the verbs do.
A mistake raises `libra_hpc.errors.UserError`, a failure `libra_hpc.errors.OperationError`, each with one sentence.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from libra_hpc_cli import jobs
from libra_hpc_cli import status as status_verb
from libra_hpc_cli import submit as submit_verb
from libra_hpc_cli.cancel import end_all
from libra_hpc_cli.check import check_all, warn
from libra_hpc_cli.follow import wait_silently
from libra_hpc_cli.runs import RUNS, find_run

from libra_hpc.facts import series
from libra_hpc.facts.rundir import RunDir
from libra_hpc.facts.status import Status
from libra_hpc.slurm.queue.run_state import RunState

Run = str | Path | RunDir
"""What names a run."""
__all__ = ["cancel", "metrics", "status", "submit", "wait"]


def submit(
    run_file: str | Path | None = None,
    overrides: Sequence[str] = (),
    *,
    resume: Run | None = None,
    from_step: int | None = None,
    until_done: bool = False,
) -> RunDir:
    """Check a run and queue it, as `libra-hpc submit` does; returns its folder.

    ``overrides``: other values, as after ``-o``.  ``resume``: a run to go on with, instead of a run file;
    ``from_step``: from which of its checkpoints.  ``until_done``: the job is queued again after each time limit.
    """
    file, before = None if run_file is None else Path(run_file), None if resume is None else str(_found(resume).path)
    config, attempt = submit_verb.configured(file, before, overrides)
    config = submit_verb.with_job_options(config, (), until_done)
    submit_verb.check_start(config, attempt, from_step)
    checked = check_all(config, slurm_required=True)
    warn(checked.warnings)
    run, _ = submit_verb.enqueue(checked, file, attempt, from_step)
    return run


def status(run: Run) -> dict[str, Any]:
    """What `libra-hpc status RUN --json` prints: ``state``, ``reason``, ``job_id``, ``path``, and more.

    ``status`` is the last snapshot of the run, of at most a second ago while it runs; None before the first.
    """
    return status_verb.facts(_found(run))


def metrics(run: Run) -> list[dict[str, Any]]:
    """One record a step so far, the numbers of docs/columns.md by name: ``pandas.DataFrame(api.metrics(run))``."""
    return [dict(line) for line in series.steps(_found(run))]


def wait(run: Run, timeout_s: float | None = None) -> RunState:
    """Wait until a run is over, or for ``timeout_s``; returns its state: ``state``, ``reason``, and whether it is
    ``over``.  An interrupt leaves the run alone."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s

    def late(status: Status | None) -> bool:
        return deadline is not None and time.monotonic() >= deadline

    return wait_silently(_found(run), late)


def cancel(run: Run, *, now: bool = False) -> RunState:
    """Have a run save at its next step boundary and stop, as `libra-hpc cancel` does; returns its state.

    ``now``: end the job at once, without a save.
    """
    found = _found(run)
    for _ in end_all([found], now=now):
        pass
    return jobs.state(found)


def _found(run: Run) -> RunDir:
    found = run if isinstance(run, RunDir) else find_run(str(run), Path(RUNS))
    found.resolved()
    return found
