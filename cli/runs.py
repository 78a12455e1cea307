"""Find runs by folder, name or job id, and read their status."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from libra_hpc.errors import UserError, error_text, invalid, nearest
from libra_hpc.facts import series
from libra_hpc.facts.rundir import RunDir
from libra_hpc.facts.status import FINAL, Status, as_ended, in_simulated_time
from libra_hpc.facts.status import read_status as last_status
from libra_hpc.facts.sweep_record import members, read_member
from libra_hpc.slurm.queue.run_state import RunState

from . import jobs

RUNS = "runs"
"""Default of ``run.dir``."""


def run_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of the runs that a shell offers: those in the folder of ``--runs``."""
    parent = ctx.params.get("runs") or RUNS
    try:
        names = sorted(os.listdir(parent))
    except OSError:
        return []
    return [
        name
        for name in names
        if name.startswith(incomplete) and os.path.isfile(os.path.join(parent, name, "config.json"))
    ]


RunArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN", help="Run folder, its name, or its job id; default: the latest run.", autocompletion=run_names
    ),
]
RunsOption = Annotated[Path, typer.Option("--runs", metavar="DIR", help="Parent of run folders.")]
WeightsOption = Annotated[
    float, typer.Option("--weights-mb-s", min=0.0, metavar="MB", help="Most MB/s for new weights; default: no limit.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def all_runs(parent: Path) -> list[RunDir]:
    """Runs below ``parent``, oldest first."""
    try:
        names = os.listdir(parent)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise invalid("--runs", str(parent), error_text(error), "a folder that you may read") from error
    # os.path, unlike Path, skips the private run of another user without an error.  A hidden one is being removed.
    named = (name for name in names if not name.startswith("."))
    found = (RunDir(parent / name) for name in named if is_run(parent / name))
    return sorted(found, key=lambda run: (created(run), run.name))


def find_run(wanted: str | None, parent: Path) -> RunDir:
    """The run that a user names, None: the latest; raises `UserError` naming the existing runs.

    The id of a job that Slurm still knows finds a run in any folder.
    """
    if wanted and is_run(Path(wanted)):
        return RunDir(wanted)
    if wanted and os.path.isdir(wanted) and not os.access(wanted, os.X_OK):
        valid = "a run of your own, or one shared with run.share"
        raise invalid("RUN", wanted, "this folder is private to its owner", valid)
    runs = all_runs(parent)
    if wanted is None:
        if not runs:
            raise UserError(
                f"There is no run below {parent}/; submit one with `libra-hpc submit RUN.toml`, or name another folder"
                " with --runs."
            )
        return runs[-1]
    for run in reversed(runs):
        if wanted in (run.name, job_id(run)):
            return run
    elsewhere = jobs.run_folder(wanted)
    if elsewhere is not None and is_run(elsewhere):
        return RunDir(elsewhere)
    names = [run.name for run in runs]
    valid = f"valid: {', '.join(names[-8:])}" if names else "there are none"
    raise UserError(
        f"RUN = {wanted!r}: no run of that name, folder or job id below {parent}/; {valid}{nearest(wanted, names)}."
    )


def is_run(folder: Path) -> bool:
    """Whether it is a run's folder: a model's has a config.json too."""
    return os.path.isfile(folder / "config.json") and not os.path.isfile(folder / "tokenizer.json")


def is_own(run: RunDir) -> bool:
    """Whether this user made it: another one's record of its job may name any process or job of this user."""
    return run.path.stat().st_uid == os.geteuid()


def of_sweep(sweep: str, parent: Path) -> list[RunDir]:
    """The runs of a sweep below ``parent``, the oldest first; raises `UserError` naming the sweeps that there are."""
    known = all_runs(parent)
    found = [run for run, _ in members(known, sweep)]
    if not found:
        names = sorted({member.sweep for run in known if (member := read_member(run)) is not None})
        valid = f"valid: {', '.join(names)}{nearest(sweep, names)}" if names else "there are none"
        raise UserError(f"--sweep = {sweep!r}: no sweep of that name has runs below {parent}/; {valid}.")
    return found


def job_id(run: RunDir) -> str:
    """Id of the run's last job; empty before it was queued."""
    return str(run.read_json(run.job).get("job_id", ""))


def attempt(run: RunDir) -> int:
    """Number of the last attempt; 0 before the first was queued."""
    value = run.read_json(run.job).get("attempt", 0)
    return value if isinstance(value, int) else 0


def identity(run: RunDir, state: RunState) -> dict[str, Any]:
    """Which run it is and how it stands, as JSON."""
    names = {"run": run.name, "path": str(run.path), "job_id": job_id(run), "cluster": jobs.cluster(run)}
    return {**names, "attempt": attempt(run), **msgspec.to_builtins(state)}


def read_status(run: RunDir) -> Status | None:
    """The last snapshot of the last attempt; None without one."""
    status = last_status(run, attempt(run))
    return status and in_simulated_time(status)


def with_state(status: Status, state: RunState) -> Status:
    """A snapshot with the state of its run, which knows more: of the queue, and of the time since."""
    known = msgspec.structs.replace(status, state=state.state, message=state.reason)
    return as_ended(known) if state.state in FINAL else known


def rewards(run: RunDir) -> list[float]:
    """Mean reward of every step so far."""
    return [value for value in series.column(series.steps(run), "reward") if math.isfinite(value)]


def created(run: RunDir) -> float:
    """Epoch seconds of the last submission; of a run that was never queued, when it was made."""
    submitted: Any = run.read_json(run.job).get("submitted_at")
    return float(submitted) if isinstance(submitted, (int, float)) else run.config.stat().st_mtime
