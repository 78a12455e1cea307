"""`libra-hpc submit`: from a run file to a queued job, and with ``--wait`` to its summary.

- Every check (`check_all`) passes before anything is written or queued.
- ``--dry-run`` -> print the script and stop.
- ``--until-done`` -> the job is queued again after its time limit.
- ``components.split = "auto"`` -> print the planner's table first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from libra_hpc.config.load import apply_override, load_resolved, validate, with_values
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import OperationError, UserError, invalid
from libra_hpc.facts.rundir import MODES, RunDir
from libra_hpc.facts.summary import render_summary, summarise
from libra_hpc.files import write_atomic
from libra_hpc.planning.initial import InitialPlan, plan_record
from libra_hpc.slurm.launch import Launch

from . import jobs
from .check import check_all, load, warn, with_absolute_paths
from .config_show import OverrideOption
from .follow import follow, wait_silently
from .output import print_json, print_line, print_note, show
from .runs import RUNS, JsonOption, attempt, find_run, job_id, run_names
from .split import show_split
from .summary import draw

UNTIL_DONE = 1000
"""Requeues of ``--until-done``: no bound for a run that advances; one that does not is stopped after three starts."""

EXECUTORS = ("auto", "slurm", "local")

ENGINES = ("real", "simulated")
ENDS = {
    "failed": "the run failed",
    "cancelled": "the run was cancelled",
    "time_limit": "the run was stopped by its time limit",
    "preempted": "the run was preempted",
    "unknown": "it is not known how the run ended",
}
"""First words of the error of `submit --wait` by the state of a run that did not complete."""

ExecutorOption = Annotated[
    str | None, typer.Option("--executor", metavar="|".join(EXECUTORS), help="Where to run; default: the run file's.")
]
EngineOption = Annotated[
    str | None,
    typer.Option(
        "--engine",
        metavar="|".join(ENGINES),
        help="simulated: a dry run with simulated engines; default: the run file's.",
    ),
]


def submit(
    run_file: Annotated[Path | None, typer.Argument(metavar="RUN.toml", help="Run file.")] = None,
    sbatch: Annotated[
        list[str] | None, typer.Argument(metavar="-- OPTION", help="Further sbatch options, e.g. -- --exclusive.")
    ] = None,
    override: OverrideOption = [],  # noqa: B006
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume", metavar="RUN", help="Go on with a run from its last checkpoint.", autocompletion=run_names
        ),
    ] = None,
    until_done: Annotated[
        bool, typer.Option("--until-done", help="Queue the job again after each time limit, until run.steps.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Follow the run and end with its summary; exit code 0 when it completed.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the job script and touch nothing.")] = False,
    executor: ExecutorOption = None,
    engine: EngineOption = None,
    parsable: Annotated[bool, typer.Option("--parsable", help="Print the job id only.")] = False,
    json: JsonOption = False,
) -> None:
    if (run_file is None) == (resume is None):
        raise UserError("submit needs either a run file or --resume RUN, and not both.")
    overrides = with_options(override, executor, engine)
    run: RunDir | None = None
    before: RunConfig | None = None
    if resume is not None:
        run = find_run(resume, Path(RUNS))
        assert run is not None
        before = load_resolved(run.config)
        config = resumed(run, before, overrides)
    else:
        assert run_file is not None
        config = load(run_file, overrides)
    if run is not None and config.components.split == "auto":
        raise invalid("components.split", "auto", "a resumed run keeps the split it has", "explicit")
    if sbatch:
        config = with_values(config, {"slurm.extra": [*config.slurm.extra, *sbatch]})
    if until_done:
        config = with_values(config, {"slurm.requeues": max(UNTIL_DONE, config.slurm.requeues)})
    if run is not None:
        refuse_if_complete(run, config)
    config, made, environment, warnings, _ = check_all(config, slurm_required=not dry_run)
    warn(warnings)
    number = 1 if run is None else attempt(run) + 1
    if made is not None and not (parsable or json):
        show_split(made, stderr=dry_run)
    if dry_run:
        folder = run or RunDir(Path(config.run.dir) / f"{config.run.name}-NNN")
        print_line(jobs.script(Launch(config, folder, number)).rstrip("\n"))
        return
    if run is None or before is None:
        assert run_file is not None
        run = create(config, run_file)
    else:
        refuse_if_active(run)
        share(run, before, config)
    queued = queue(Launch(config, run, number), environment, made)
    if parsable:
        print_line(queued)
    elif json:
        split = None if made is None else made.chosen
        print_json(
            {
                "job_id": queued,
                "run": run.name,
                "path": str(run.path),
                "attempt": number,
                "executor": jobs.kind(environment),
                "cluster": jobs.cluster(run),
                "split": split,
            }
        )
    else:
        where = f" to {name}" if (name := jobs.cluster(run)) else ""
        print_line(f"Submitted {queued}{where}  run={run.path}")
    if wait:
        finish(run, queued, quiet=parsable or json)


def with_options(overrides: Sequence[str], executor: str | None, engine: str | None) -> list[str]:
    """``overrides``, and those that the options `ExecutorOption` and `EngineOption` stand for."""
    options = {"slurm.executor": executor, "run.engine": engine}
    return [*overrides, *(f"{key}={value}" for key, value in options.items() if value)]


def create(config: RunConfig, run_file: Path) -> RunDir:
    """Make the run directory with the run file as written."""
    try:
        run = RunDir.create(Path(config.run.dir), config.run.name, MODES[config.run.share])
        write_atomic(run.toml, run_file.read_bytes())
    except OSError as error:
        raise invalid(
            "run.dir", config.run.dir, f"no run directory can be made there ({error.strerror})", "a writable folder"
        ) from error
    return run


def queue(launch: Launch, environment: Mapping[str, str] | None, made: InitialPlan | None) -> str:
    """Queue one attempt and record the plan behind its split; a refused first attempt leaves no run directory."""
    run = launch.run
    try:
        run.write_json(run.config, launch.config.model_dump())
        if made is not None:
            run.write_json(run.plan, plan_record(made))
        return jobs.queue(launch, environment)
    except (UserError, OperationError):
        if launch.attempt == 1:
            jobs.discard(run)
        raise


def resumed(run: RunDir, before: RunConfig, overrides: list[str]) -> RunConfig:
    """The configuration of an earlier attempt with overrides; name and folder cannot change."""
    data = before.model_dump()
    for override in overrides:
        apply_override(data, override)
    config = with_absolute_paths(validate(data))
    if run.path.parent != Path(config.run.dir) or not run.path.name.startswith(config.run.name):
        raise invalid("--resume", run.name, "a resumed run keeps its run.name and run.dir")
    return config


def share(run: RunDir, before: RunConfig, config: RunConfig) -> None:
    """Give a resumed run's directory the mode of an overridden ``run.share``."""
    if before.run.share == config.run.share:
        return
    try:
        run.path.chmod(MODES[config.run.share])
    except OSError as error:
        why = f"the mode of {run.path} cannot be changed ({error.strerror})"
        raise invalid("run.share", config.run.share, why) from error


def refuse_if_complete(run: RunDir, config: RunConfig) -> None:
    """Raise `UserError` where a job would have nothing to train."""
    newest = run.latest_checkpoint()
    if newest is not None and newest[0] >= config.run.steps and run.read_json(run.result).get("state") == "completed":
        why = f"the run is complete at step {newest[0]}"
        raise invalid("run.steps", config.run.steps, why, f"a larger number, for instance -o run.steps={2 * newest[0]}")


def refuse_if_active(run: RunDir) -> None:
    """Raise `UserError` while an earlier attempt may still run: two jobs would overwrite each other's files."""
    state = jobs.state(run)
    if not state.over and state.state != "unknown":
        raise invalid(
            "--resume",
            run.name,
            f"its job {job_id(run)} is {state.words}",
            f"a run that has ended (libra-hpc cancel {run.name} ends it)",
        )


def finish(run: RunDir, queued: str, *, quiet: bool) -> None:
    """Follow the run to its end, show its summary, and exit with 0 or 1; an interrupt leaves the job alone."""
    try:
        state = wait_silently(run) if quiet else follow(run)
    except KeyboardInterrupt:
        print_note(
            f"job {queued} goes on; `libra-hpc status {run.name} --watch` shows it, `libra-hpc cancel {run.name}`"
            " ends it"
        )
        raise typer.Exit(130) from None
    if not quiet:
        draw(run)
        show(render_summary(msgspec.structs.replace(summarise(run), state=state.state)))
    if state.state != "completed":
        why = f": {state.reason.rstrip('.')}" if state.reason else ""
        further = f"`libra-hpc submit --resume {run.name}` goes on"
        if state.state in ("failed", "unknown"):
            further = f"its logs are in {run.logs(attempt(run))} (`libra-hpc logs {run.name}`)"
        raise OperationError(f"{ENDS[state.state]}{why}; {further}.")
