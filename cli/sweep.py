"""`libra-hpc sweep`: queue one run for every combination of some values.

- Every combination passes every check -> the first is queued; a mistake in one refuses all.
- The queue fails in the middle -> the same command queues the missing runs, and none twice.
- The command is repeated with further values -> the new combinations join the sweep.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from libra_hpc.config import grid
from libra_hpc.config.grid import Combination
from libra_hpc.config.job import NAME, NAME_LENGTH, NAME_WORDS
from libra_hpc.config.load import flat
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import OperationError, UserError, invalid
from libra_hpc.facts import sweep_record
from libra_hpc.facts.rundir import RunDir, readable
from libra_hpc.facts.series import first_and_last
from libra_hpc.facts.sweep_record import PlannedRun, SweepMember, SweepRecord
from libra_hpc.preflight.checked_run import CheckedRun, check

from .check import load, warn
from .config_show import EngineOption, ExecutorOption, OverrideOption, RunFileArgument, with_options
from .output import busy, print_json, print_note, show, table
from .runs import JsonOption, all_runs, job_id, rewards
from .submit import create, queue

MOST_RUNS = 32
"""Runs that are queued without ``--yes``: a fourth key of three values triples the GPU hours of a sweep of 27."""

OTHER_NAME = "another --name for another sweep"

OverOption = Annotated[
    list[str],
    typer.Option("--over", metavar="KEY=V1,V2", help="A key and its values, e.g. run.seed=0,1,2; repeatable."),
]
NameOption = Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the sweep; default: run.name.")]
MostOption = Annotated[
    int, typer.Option("--most", metavar="N", min=0, help="Most runs at a time; default: as the queue has room.")
]


class Member(NamedTuple):
    """One combination on its way into the queue."""

    combination: Combination
    checked: CheckedRun
    run: RunDir | None
    """Its run directory, where an earlier command queued it."""

    @property
    def name(self) -> str:
        return self.checked.config.run.name


def sweep(
    run_file: RunFileArgument,
    over: OverOption,
    name: NameOption = "",
    override: OverrideOption = [],  # noqa: B006
    executor: ExecutorOption = None,
    engine: EngineOption = None,
    most: MostOption = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and show the runs, and queue none.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help=f"Queue more than {MOST_RUNS} runs.")] = False,
    json: JsonOption = False,
) -> None:
    axes = grid.parse_axes(over)
    if not (yes or dry_run):
        few(axes)
    overrides = with_options(override, executor, engine)
    report(*swept(run_file, axes, overrides, name=name, most=most, dry_run=dry_run), json=json)


def swept(
    run_file: Path, axes: Sequence[grid.Axis], overrides: Sequence[str], *, name: str, most: int, dry_run: bool = False
) -> tuple[str, list[Member], dict[str, RunDir]]:
    """Check every combination and queue those that no earlier command queued; raises the first mistake.

    Returns the name of the sweep, its members, and the queued ones by ``run.name``.
    """
    first = load(run_file, [*overrides, *(f"{axis.key}={axis.texts[0]}" for axis in axes)])
    combinations = grid.combinations(axes, first.run.name)
    name, parent = checked_name(name or first.run.name), Path(first.run.dir)
    configs = [loaded(run_file, overrides, first.run.name, one) for one in combinations]
    earlier = sweep_record.members(all_runs(parent), name)
    record = planned(name, configs, combinations, sweep_record.read_sweep(parent, name) if earlier else None)
    members = check_each(configs, combinations, earlier, slurm_required=not dry_run)
    if most and members[0].checked.config.slurm.executor == "local":
        raise invalid("--most", most, "the local executor has no queue", 'slurm.executor = "slurm"')
    warn(sorted({line for member in members for line in member.checked.warnings}))
    queued = {member.name: member.run for member in members if member.run is not None}
    if not dry_run:
        print_note(f"sweep {name}: {len(members)} combinations are good; runs to queue: {len(members) - len(queued)}")
        with readable(first.run.share):
            write_record(parent, name, record)
        queue_all(run_file, name, members, queued, most)
    return name, members, queued


def few(axes: Sequence[grid.Axis]) -> None:
    """Raise `UserError` for more than `MOST_RUNS`."""
    count = grid.size(axes)
    if count > MOST_RUNS:
        product = " x ".join(str(len(axis.texts)) for axis in axes)
        raise UserError(
            f"--over gives {count} runs ({product}), more than {MOST_RUNS}; --dry-run shows them, --yes queues them."
        )


def loaded(run_file: Path, overrides: Sequence[str], run_name: str, one: Combination) -> RunConfig:
    """The configuration of one combination; raises `UserError` naming it."""
    try:
        return load(run_file, [*overrides, *one.overrides, f"run.name={run_name}-{one.name}"])
    except UserError as error:
        raise UserError(f"With {one.words}: {error}") from error


def planned(
    name: str, configs: Sequence[RunConfig], combinations: Sequence[Combination], earlier: SweepRecord | None
) -> SweepRecord:
    """The record of the sweep, with the runs of earlier commands.

    Raises `UserError` where the sweep of that name has other keys or another run file.
    """
    keys = list(combinations[0].values)
    shared = flat(configs[0].as_data())
    shared = {key: value for key, value in shared.items() if key != "run.name" and not inside(key, keys)}
    runs = [PlannedRun(config.run.name, one.values) for config, one in zip(configs, combinations, strict=True)]
    if earlier is None:
        return SweepRecord(keys, shared, runs)
    if set(earlier.keys) != set(keys):
        raise invalid("--name", name, f"the sweep of that name is over {', '.join(earlier.keys)}", OTHER_NAME)
    for key in [*shared, *earlier.shared]:
        if (now := shared.get(key)) != (then := earlier.shared.get(key)):
            raise invalid("--name", name, f"the sweep of that name has {key} = {then!r}, and not {now!r}", OTHER_NAME)
    return SweepRecord(keys, shared, [*runs, *(run for run in earlier.runs if run not in runs)])


def inside(key: str, keys: Sequence[str]) -> bool:
    """Whether ``key`` is one of ``keys`` or below one of them."""
    return any(key == one or key.startswith(f"{one}.") for one in keys)


def checked_name(name: str) -> str:
    """``name`` if it can stand in a file name; raises `UserError`."""
    if not re.fullmatch(NAME, name) or len(name) > NAME_LENGTH:
        raise invalid("--name", name, "malformed", NAME_WORDS)
    return name


def check_each(
    configs: Sequence[RunConfig],
    combinations: Sequence[Combination],
    earlier: Sequence[tuple[RunDir, SweepMember]],
    *,
    slurm_required: bool,
) -> list[Member]:
    """Run every check on every combination; raises `UserError` naming the first that fails."""
    members = []
    with busy("checking") as shown:
        for number, (config, one) in enumerate(zip(configs, combinations, strict=True), start=1):
            shown.update(f"checking {number} of {len(configs)}: {one.words}")
            run = next((run for run, member in earlier if member.values == one.values), None)
            if run is not None and not job_id(run):
                raise UserError(
                    f"{run.path} has no record of a job: a sweep was interrupted while it queued this run; look with"
                    " `squeue --me` whether it is queued, and if not, remove the folder and repeat the command."
                )
            try:
                members.append(Member(one, check(config, slurm_required=slurm_required), run))
            except UserError as error:
                raise UserError(f"With {one.words}: {error}") from error
    return members


def write_record(parent: Path, name: str, record: SweepRecord) -> None:
    """Record the sweep in the folder of its runs; raises `UserError` when it cannot be written."""
    try:
        sweep_record.write_sweep(parent, name, record)
    except OSError as error:
        why = f"no sweep can be recorded there ({error.strerror})"
        raise invalid("run.dir", str(parent), why, "a writable folder") from error


def queue_all(run_file: Path, name: str, members: Sequence[Member], queued: dict[str, RunDir], most: int) -> None:
    """Queue the missing runs, and add them to ``queued``, the run directories by ``run.name``.

    - ``most`` runs at a time -> each starts after the end of the run as many places before it; 0: no limit.
    - A refusal in the middle -> the same error, with what is queued and how to go on.
    """
    try:
        with busy("queueing") as shown:
            for place, member in enumerate(members):
                if member.run is None:
                    shown.update(f"queueing {place + 1} of {len(members)}: {member.name}")
                    after = job_id(queued[members[place - most].name]) if most and place >= most else ""
                    queued[member.name] = queue_one(run_file, name, member, after)
    except (UserError, OperationError) as error:
        done = ", ".join(run.name for run in queued.values())
        text = f"{len(queued)} of {len(members)} runs are queued{f' ({done})' if done else ''}"
        raise type(error)(f"{str(error).rstrip('.')}; {text}. The same command queues the others.") from error


def queue_one(run_file: Path, name: str, member: Member, after: str) -> RunDir:
    """Queue one run that belongs to a sweep; a refusal leaves no run directory."""
    run = create(member.checked.config, run_file)
    sweep_record.write_member(run, SweepMember(name, member.combination.values))
    queue(member.checked, run, 1, after)
    return run


def report(name: str, members: Sequence[Member], queued: dict[str, RunDir], *, json: bool) -> None:
    """Print every run of the sweep with its job and its values."""
    rows: list[dict[str, Any]] = []
    for member in members:
        run = queued.get(member.name)
        rows.append(
            {
                "run": member.name if run is None else run.name,
                "path": None if run is None else str(run.path),
                "job_id": None if run is None else job_id(run),
                "queued_before": member.run is not None,
                "values": member.combination.values,
                "reward": None if run is None else first_and_last(rewards(run))[1],
            }
        )
    if json:
        print_json({"sweep": name, "runs": rows})
        return
    labels = grid.short_keys(list(members[0].combination.values))
    shown = table("run~", "job~", *(f"{label}~" for label in labels.values()), "reward>")
    for row, member in zip(rows, members, strict=True):
        job = "-" if row["job_id"] is None else f"{row['job_id']}{' (before)' if row['queued_before'] else ''}"
        reward = "-" if row["reward"] is None else f"{row['reward']:.3f}"
        shown.add_row(row["run"], job, *(one.partition("=")[2] for one in member.combination.overrides), reward)
    show(shown)
