"""Runs from Python: what the verbs of `libra-hpc` do, for notebooks and scripts.

    from libra_hpc import api

    job = api.submit("run.toml", {"run.steps": 200}, mail_type="END")
    job.wait()
    rewards = [step["reward"] for step in job.metrics()]
    latest = list(api.Runs("runs"))[-1]

Warnings go to stderr, as those of the verbs do.  A mistake raises `libra_hpc.errors.UserError`, a failure
`libra_hpc.errors.OperationError`, each with one sentence.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from libra_hpc_cli import jobs
from libra_hpc_cli import logs as logs_verb
from libra_hpc_cli import plan as plan_verb
from libra_hpc_cli import status as status_verb
from libra_hpc_cli import submit as submit_verb
from libra_hpc_cli.cancel import end_all
from libra_hpc_cli.check import check_all, load, warn
from libra_hpc_cli.config_show import with_options
from libra_hpc_cli.follow import wait_silently
from libra_hpc_cli.runs import RUNS, all_runs, attempt, find_run
from libra_hpc_cli.sweep import swept

from libra_hpc.config import grid
from libra_hpc.config.load import flat
from libra_hpc.config.run_file_text import toml_value
from libra_hpc.errors import OperationError, invalid
from libra_hpc.facts import series
from libra_hpc.facts.rundir import RunDir
from libra_hpc.protocol import trace
from libra_hpc.slurm.queue.run_state import RunState

Overrides = Mapping[str, Any] | Sequence[str]
"""Values by dotted key, ``{"optimizer.lr": 1e-6}``, or texts as after ``-o``; paths and NumPy's values, too."""
__all__ = ["Job", "Runs", "check", "plan", "resume", "submit", "sweep"]


class Job:
    """A run, and the job that carries it."""

    def __init__(self, run: RunDir) -> None:
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

    def metrics(self, since: int = 0) -> list[dict[str, Any]]:
        """One record for each step after ``since``, the numbers of docs/columns.md by name:
        ``pandas.DataFrame(job.metrics())``."""
        return [dict(line) for line in series.steps(self._run) if line["step"] > since]

    def trajectories(self) -> Iterator[trace.TrajectoryRecord]:
        """What ended so far: prompt, task, reward, and tokens, seconds and tools of each turn."""
        return trace.recorded(self._run.trajectories)

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


class Runs:
    """The runs of a folder, oldest first: ``[job.state for job in Runs("runs")]``."""

    def __init__(self, folder: str | Path = RUNS) -> None:
        self.folder = Path(folder)

    def __iter__(self) -> Iterator[Job]:
        return map(Job, all_runs(self.folder))

    def __getitem__(self, run: str | Path) -> Job:
        """The run with this name or job id, or of this folder; raises `UserError` where there is none, or its files
        cannot be read."""
        found = find_run(os.fspath(run), self.folder)
        found.resolved()
        return Job(found)


def check(run_file: str | Path, overrides: Overrides = ()) -> list[str]:
    """Check a run file as `libra-hpc check` does; returns its warnings."""
    return check_all(load(Path(run_file), _texts(overrides)), slurm_required=False).warnings


def plan(run_file: str | Path, overrides: Overrides = (), *, gpus: int = 0, best: int = 5) -> dict[str, Any]:
    """The best splits of the nodes, as `libra-hpc plan RUN.toml --json` prints them.

    ``gpus``: to plan for, 0: those of the run file.
    """
    config = load(Path(run_file), _texts(overrides))
    asked = plan_verb.question(config, gpus=gpus)
    return plan_verb.plan_facts(asked, plan_verb.best(asked, best))


def submit(
    run_file: str | Path,
    overrides: Overrides = (),
    *,
    executor: Literal["slurm", "local"] | None = None,
    engine: Literal["real", "simulated"] | None = None,
    until_done: bool = False,
    **sbatch: Any,
) -> Job:
    """Check a run and queue it, as `libra-hpc submit` does; ``until_done``: again after each time limit.

    ``sbatch``: its options by their long names, as ``mail_type="END"`` or ``exclusive=True``.
    """
    texts = with_options(_texts(overrides), executor, engine)
    return _queued(Path(run_file), None, texts, None, until_done, sbatch)


def resume(
    run: str | Path | Job,
    overrides: Overrides = (),
    *,
    from_step: int | None = None,
    until_done: bool = False,
    **sbatch: Any,
) -> Job:
    """Go on with a run, as `libra-hpc submit --resume` does; ``from_step``: from which of its checkpoints;
    ``sbatch``: see `submit`."""
    before = os.fspath(run.path if isinstance(run, Job) else run)
    return _queued(None, before, _texts(overrides), from_step, until_done, sbatch)


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

    ``over``: lists of values by dotted key; ``name``: of the sweep, empty: ``run.name``; ``most``: runs at a time, 0:
    as the queue has room.
    """
    lists = {key: _plain(key, values) for key, values in over.items()}
    for key, values in lists.items():
        if not isinstance(values, list):
            raise invalid(f"over[{key!r}]", values, "one value", "a list of values")
    axes = grid.parse_axes([f"{key}={','.join(map(toml_value, values))}" for key, values in lists.items()])
    texts = with_options(_texts(overrides), executor, engine)
    _, members, queued = swept(Path(run_file), axes, texts, name=name, most=most)
    return [Job(queued[member.name]) for member in members]


def _queued(
    run_file: Path | None,
    before: str | None,
    overrides: Sequence[str],
    from_step: int | None,
    until_done: bool,
    sbatch: Mapping[str, Any],
) -> Job:
    config, last = submit_verb.configured(run_file, before, overrides)
    config = submit_verb.with_job_options(config, list(_options(sbatch)), until_done)
    submit_verb.check_start(config, last, from_step)
    checked = check_all(config, slurm_required=True)
    warn(checked.warnings)
    run, _ = submit_verb.enqueue(checked, run_file, last, from_step)
    return Job(run)


def _texts(overrides: Overrides) -> list[str]:
    if not isinstance(overrides, Mapping):
        return list(overrides)
    return [f"{key}={toml_value(_plain(key, value))}" for key, value in flat(overrides).items()]


def _options(sbatch: Mapping[str, Any]) -> Iterator[str]:
    for name, value in sbatch.items():
        flag, plain = f"--{name.replace('_', '-')}", _plain(name, value)
        if plain is not False:
            yield flag if plain is True else f"{flag}={plain}"


def _plain(key: str, value: Any) -> Any:
    """A value as a run file has it; raises `UserError` for one of another type."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, (list, tuple, range)):
        return [_plain(key, one) for one in value]
    if isinstance(value, Mapping):
        return {name: _plain(f"{key}.{name}", one) for name, one in value.items()}
    if hasattr(value, "tolist"):
        # Numbers and arrays of NumPy and torch.
        return value.tolist()
    if not isinstance(value, (str, bool, int, float)):
        raise invalid(key, value, f"a {type(value).__name__}", "a text, a number, a boolean, a list or a table")
    return value
