"""`libra-hpc submit`: from a run file to a queued job, and with ``--wait`` to its summary.

- Every check (`check_all`) passes before anything is written or queued.
- ``--dry-run`` -> print the script and stop.
- ``--until-done`` -> the job is queued again after its time limit; with ``--wait`` a new one, where Slurm broke it.
- ``components.split = "auto"`` -> print the planner's table first.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from libra_hpc.config.learn import LoraSection
from libra_hpc.config.load import apply_override, load_resolved, validate, with_absolute_paths, with_values
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import OperationError, UserError, error_text, invalid
from libra_hpc.facts.rundir import MODES, RunDir, keep_user_files, readable
from libra_hpc.files import OTHERS_WRITE, OWNER_ONLY, write_atomic
from libra_hpc.owner.claim import HeldLease, LeaseRefused, acquire
from libra_hpc.preflight.checked_run import CheckedRun
from libra_hpc.slurm.queue.job_record import read_job
from libra_hpc.slurm.submit import MaybeQueued

from . import jobs
from .check import check_all, expected_start, load, warn
from .config_show import EngineOption, ExecutorOption, OverrideOption, with_options
from .output import KEY, no_option, print_json, print_line, print_note
from .runs import RUNS, JsonOption, attempt, find_run, is_own, job_id, run_names

UNTIL_DONE = 1000
"""Requeues of ``--until-done``: no bound for a run that advances; one that does not is stopped after three starts."""

LEAVES_S = 2.0
"""For an owner that has written the result to release the lease."""
KEPT = (*(f"lora.{key}" for key in LoraSection.__struct_fields__), "model.dtype", "run.seed")
"""Keys of what a checkpoint has: adapters, types of weights, a place in the data order."""
ENDS = {
    "failed": "the run failed",
    "cancelled": "the run was cancelled",
    "paused": "the run was paused",
    "time_limit": "the run was stopped by its time limit",
    "preempted": "the run was preempted",
    "unknown": "it is not known how the run ended",
}
"""First words of the error of `submit --wait` by the state of a run that did not complete."""


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
    from_step: Annotated[
        int | None,
        typer.Option("--from-step", min=0, metavar="N", help="With --resume: from checkpoint N; 0: the beginning."),
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
    run_file, sbatch = split_arguments(run_file, sbatch or [], resume)
    config, before = configured(run_file, resume, with_options(override, executor, engine))
    config = with_job_options(config, sbatch, until_done)
    check_start(config, before, from_step)
    checked = check_all(config, slurm_required=not dry_run)
    warn(checked.warnings)
    if checked.plan is not None and not (parsable or json):
        from .plan_tables import show_split

        show_split(checked.plan, stderr=dry_run)
    number = 1 if before is None else before.number + 1
    if dry_run:
        folder = RunDir(Path(config.run.dir) / f"{config.run.name}-NNN") if before is None else before.run
        expected_start(checked)
        print_line(jobs.script(checked.launch(folder, number, from_step=from_step)).rstrip("\n"))
        return
    run, queued = enqueue(checked, run_file, before, from_step)
    if parsable:
        print_line(queued)
    else:
        announce(checked, run, queued, number, json=json)
    if wait:
        finish(run, queued, quiet=parsable or json, again=until_done)


def split_arguments(run_file: Path | None, sbatch: list[str], resume: str | None) -> tuple[Path | None, list[str]]:
    """Run file and options of sbatch: with ``--resume`` the first option after ``--`` stands where a run file would."""
    if named := [word for word in (str(run_file), *sbatch) if KEY.match(word)]:
        raise no_option(named[0])
    if resume is not None and run_file is not None and str(run_file).startswith("-"):
        return None, [str(run_file), *sbatch]
    return run_file, sbatch


class Attempt(NamedTuple):
    """The last attempt of a run that is resumed."""

    run: RunDir
    number: int
    config: RunConfig

    @classmethod
    def last(cls, run: RunDir) -> Attempt:
        if not is_own(run):
            raise invalid("--resume", run.name, "it is another user's", "a run of your own")
        # A job may still have the run, though nobody can read which.
        number = read_job(run).attempt if os.path.lexists(run.job) else 0
        return cls(run, number, load_resolved(run.config))

    def resumed(self, overrides: Sequence[str]) -> RunConfig:
        """The configuration with overrides; name, folder and split cannot change."""
        data = self.config.as_data()
        for override in overrides:
            apply_override(data, override)
        config = with_absolute_paths(validate(data))
        saved = Path(self.config.run.dir)
        if self.run.path.parent != saved == Path(config.run.dir):
            why = f"it was moved from {saved}, and its files name each other by their paths there"
            raise invalid("--resume", self.run.name, why, f"its old place: mv {self.run.path} {saved}")
        if self.run.path.parent != Path(config.run.dir) or not self.run.path.name.startswith(config.run.name):
            raise invalid("--resume", self.run.name, "a resumed run keeps its run.name and run.dir")
        if config.components.split == "auto":
            raise invalid("components.split", "auto", "a resumed run keeps the split it has", "explicit")
        return config


def configured(run_file: Path | None, resume: str | None, overrides: Sequence[str]) -> tuple[RunConfig, Attempt | None]:
    """What to submit, and the attempt before where a run is resumed."""
    if run_file is not None and resume is None:
        return load(run_file, overrides), None
    if run_file is not None or resume is None:
        raise UserError("submit needs either a run file or --resume RUN, and not both.")
    before = Attempt.last(find_run(resume, Path(RUNS)))
    return before.resumed(overrides), before


def announce(checked: CheckedRun, run: RunDir, queued: str, number: int, *, json: bool) -> None:
    """Print what was queued."""
    if json:
        print_json(
            {
                "job_id": queued,
                "run": run.name,
                "path": str(run.path),
                "attempt": number,
                "executor": jobs.kind(checked.environment),
                "cluster": jobs.cluster(run),
                "split": None if checked.plan is None else checked.plan.chosen,
            }
        )
        return
    where = f" to {name}" if (name := jobs.cluster(run)) else ""
    print_line(f"Submitted {queued}{where}  run={run.path}")


def with_job_options(config: RunConfig, sbatch: Sequence[str], until_done: bool) -> RunConfig:
    """``config`` with the options of the command line."""
    changes: dict[str, Any] = {"slurm.extra": [*config.slurm.extra, *sbatch]} if sbatch else {}
    if until_done:
        changes["slurm.requeues"] = max(UNTIL_DONE, config.slurm.requeues)
    return with_values(config, changes) if changes else config


def check_start(config: RunConfig, before: Attempt | None, from_step: int | None) -> None:
    """Raise `UserError` where there is nothing to train, or nothing to start from."""
    if before is not None:
        check_step(before.run, from_step)
        refuse_if_complete(before.run, config, from_step)
        if from_step != 0 and (saved := before.run.latest_checkpoint()):
            check_kept(before.config, config, saved[0])
    elif from_step is not None:
        raise invalid("--from-step", from_step, "a new run starts at step 0", "only with --resume RUN")


def enqueue(
    checked: CheckedRun, run_file: Path | None, before: Attempt | None, from_step: int | None = None
) -> tuple[RunDir, str]:
    """Queue a new run, or the next attempt of one; returns it and its job id."""
    if before is None:
        assert run_file is not None
        run = create(checked.config, run_file)
        return run, queue(checked, run, 1, from_step=from_step)
    run = before.run
    refuse_if_active(run)
    # Of two that resume the run at once, one has the lease; the other then finds its job.
    with claimed(run):
        refuse_if_active(run)
        share(run, before.config, checked.config)
        return run, queue(checked, run, before.number + 1, from_step=from_step)


def create(config: RunConfig, run_file: Path) -> RunDir:
    """Make the run directory with the run file as written."""
    run = None
    try:
        # Who may read the run must reach it.
        with readable(config.run.share):
            run = RunDir.create(Path(config.run.dir), config.run.name, MODES[config.run.share])
        write_atomic(run.toml, run_file.read_bytes(), OWNER_ONLY)
    except OSError as error:
        if run is not None:
            jobs.discard(run)
        raise invalid(
            "run.dir", config.run.dir, f"no run directory can be made there ({error.strerror})", "a writable folder"
        ) from error
    return run


def queue(checked: CheckedRun, run: RunDir, number: int, after: str = "", from_step: int | None = None) -> str:
    """Queue one attempt and record the plan behind its split; a refused first attempt leaves no run directory."""
    try:
        # The job has the umask of the command that queued it.
        with readable(checked.config.run.share):
            run.toml.chmod(OWNER_ONLY)
            run.write_config(checked.config.as_data())
            for sentence in keep_user_files(run, checked.config.as_data(), number):
                print_note(f"warning: {sentence}")
            if checked.plan is not None:
                run.write_json(run.plan, checked.plan.record)
            return jobs.queue(checked.launch(run, number, after, from_step), checked.environment)
    except (UserError, OperationError, OSError) as error:
        if number == 1 and not isinstance(error, MaybeQueued):
            jobs.discard(run)
        if isinstance(error, OSError):
            why = f"{error.filename or 'a file of the run'} cannot be read or written ({error_text(error)})"
            raise invalid("run.dir", checked.config.run.dir, why, "a writable folder with room") from error
        raise


def share(run: RunDir, before: RunConfig, config: RunConfig) -> None:
    """Give a resumed run's directory the mode of an overridden ``run.share``; what is in it stays the owner's."""
    if before.run.share == config.run.share:
        return
    try:
        for path in run.path.rglob("*"):
            mode = path.lstat().st_mode
            if mode & OTHERS_WRITE and not path.is_symlink():
                path.chmod(stat.S_IMODE(mode) & ~OTHERS_WRITE)
        run.path.chmod(MODES[config.run.share])
    except OSError as error:
        why = f"the mode of {run.path} cannot be changed ({error.strerror})"
        raise invalid("run.share", config.run.share, why) from error


def check_step(run: RunDir, step: int | None) -> None:
    """Raise `UserError` for a step that has no checkpoint."""
    steps = [saved for saved, _ in run.complete_checkpoints()]
    if step and step not in steps:
        valid = ", ".join(map(str, (0, *steps)))
        raise invalid("--from-step", step, f"{run.name} has no checkpoint of that step", valid)


def check_kept(saved: RunConfig, wanted: RunConfig, step: int) -> None:
    """Raise `UserError` for another value of a key that the checkpoints of a run depend on."""
    for key in KEPT:
        value, new = map(attrgetter(key), (saved, wanted))
        if new != value:
            raise invalid(key, new, f"the checkpoint of step {step} has {key} = {value}", f"{value}, or --from-step 0")


def refuse_if_complete(run: RunDir, config: RunConfig, from_step: int | None = None) -> None:
    """Raise `UserError` where a job would have nothing to train."""
    newest = run.latest_checkpoint()
    if from_step is not None:
        if from_step >= config.run.steps:
            raise invalid("--from-step", from_step, f"run.steps = {config.run.steps} leaves nothing to train")
        return
    if newest is None or newest[0] < config.run.steps:
        return
    completed = run.read_json(run.result).get("state") == "completed"
    # Where the last step is saved, the policy may still have to be exported.
    if completed or newest[0] > config.run.steps:
        why = f"the run is complete at step {newest[0]}" if completed else f"step {newest[0]} is trained and saved"
        raise invalid("run.steps", config.run.steps, why, f"a larger number, for instance -o run.steps={2 * newest[0]}")


def refuse_if_active(run: RunDir) -> None:
    """Raise `UserError` while an earlier attempt may still run: two jobs would overwrite each other's files.

    What is left of a broken job is cancelled.
    """
    state = jobs.state(run)
    if state.broken:
        jobs.cancel(run)
    if not state.over and state.state != "unknown":
        raise invalid(
            "--resume",
            run.name,
            f"its job {job_id(run)} is {state.words}",
            f"a run that has ended (libra-hpc cancel {run.name} ends it)",
        )


def claimed(run: RunDir) -> HeldLease:
    """The lease of a run, so that nobody else resumes it; raises `UserError` while somebody else has it."""
    try:
        return acquire(run.leases, LEAVES_S)
    except LeaseRefused as refused:
        raise invalid("--resume", run.name, str(refused), "a run that has ended") from None
    except OSError as error:
        raise OperationError(f"{run.leases} cannot be written: {error.strerror}.") from error


def go_on(run: RunDir, reached: int) -> tuple[str, int]:
    """Queue the next attempt of a broken job's run.

    Returns its job id and the step of its checkpoint; no id where that is not beyond ``reached``, or is not wanted.
    """
    before, newest = Attempt.last(run), run.latest_checkpoint()
    saved = 0 if newest is None else newest[0]
    if saved <= reached or before.config.slurm.preempted == "stop":
        return "", reached
    checked = check_all(before.resumed(()), slurm_required=True)
    with claimed(run):
        refuse_if_active(run)
        return queue(checked, run, before.number + 1), saved


def finish(run: RunDir, queued: str, *, quiet: bool, again: bool = False) -> None:
    """Follow the run to its end, show its summary, and exit with 0 or 1; an interrupt leaves the job alone.

    ``again``: where Slurm broke the job, the next attempt follows, unless the one before saved nothing.
    """
    from .follow import follow, wait_silently
    from .status import show_run

    follower, reached = wait_silently if quiet else follow, -1
    try:
        while (state := follower(run)).broken and again:
            follows, reached = go_on(run, reached)
            if not follows:
                break
            print_note(f"job {queued}: {state.reason}; job {follows} goes on from step {reached}")
            queued = follows
    except KeyboardInterrupt:
        print_note(
            f"job {queued} goes on; `libra-hpc status {run.name} --watch` shows it, `libra-hpc cancel {run.name}`"
            " ends it"
        )
        raise typer.Exit(130) from None
    if not quiet:
        show_run(run, state)
    if state.state != "completed":
        why = f": {state.reason.rstrip('.')}" if state.reason else ""
        further = f"; `libra-hpc submit --resume {run.name}` goes on"
        if state.state in ("failed", "unknown"):
            further = f"; its logs are in {run.logs(attempt(run))} (`libra-hpc logs {run.name}`)"
        elif state.state == "paused":
            # Its reason has the way to go on.
            further = ""
        raise OperationError(f"{ENDS[state.state]}{why}{further}.")
