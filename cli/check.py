"""`libra-hpc check`: find mistakes in a run file before anything is queued; `submit` runs the same checks."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from libra_hpc.config.load import load_run_file, validate, with_absolute_paths, with_values
from libra_hpc.config.run import RunConfig
from libra_hpc.config.site import site_profile
from libra_hpc.facts.rundir import RunDir
from libra_hpc.preflight import checked_run
from libra_hpc.preflight.checked_run import CheckedRun
from libra_hpc.preflight.gpu_memory import MemoryNeed
from libra_hpc.preflight.job_checks import describe_worlds
from libra_hpc.preflight.named_files import check_planner_files
from libra_hpc.slurm.submit import expected_start as job_start

from .config_show import EngineOption, OverrideOption, RunFileArgument, with_options
from .output import busy, gigabytes, narrow_table, print_json, print_line, print_note, show
from .runs import JsonOption

COLUMNS = 80
"""Width of the table: a terminal of usual width shows it whole."""


def check(
    run_file: RunFileArgument,
    override: OverrideOption = [],  # noqa: B006
    engine: EngineOption = None,
    json: JsonOption = False,
) -> None:
    checked = check_all(load(run_file, with_options(override, None, engine)), slurm_required=False)
    config, made, asked = checked.config, checked.plan, checked.environment is not None
    warnings = list(checked.warnings)
    if not asked and config.slurm.executor != "local":
        warnings.append("no Slurm controller answers: partitions, nodes and limits were not checked")
    start = expected_start(checked)
    warn(warnings)
    if json:
        split = None if made is None else made.chosen
        facts = {"checked_against_slurm": asked, "warnings": warnings, "expected_start": start}
        facts |= {"layout": describe_worlds(config), "facts": checked.facts}
        records = as_records(checked.memory)
        print_json({"run_file": str(run_file), "good": True, **facts, "split": split, "memory": records})
        return
    if made is not None:
        from .plan_tables import show_split

        show_split(made)
    for line in (describe_worlds(config), *checked.facts):
        print_line(line)
    if checked.memory:
        show(memory_table(checked.memory))
    when = (
        "" if start is None else f"; Slurm would start it {time.strftime('on %d %B at %H:%M', time.localtime(start))}"
    )
    print_line(f"{run_file} is good{when}")


def check_all(config: RunConfig, *, slurm_required: bool) -> CheckedRun:
    """`libra_hpc.preflight.checked_run.check`, and what it does meanwhile."""
    with busy("planning" if config.components.split == "auto" else "checking") as status:
        return checked_run.check(config, slurm_required=slurm_required, report=status.update)


def memory_table(found: Sequence[MemoryNeed]) -> Table:
    """A row for each, with its terms from large to small."""
    table = narrow_table("memory, GB~", "needs>~", "has>~", "terms~", width=COLUMNS)
    for row in found:
        largest = sorted(row.terms.items(), key=lambda term: -term[1])
        terms = ", ".join(f"{name} {gigabytes(size)}" for name, size in largest if size)
        table.add_row(row.where, gigabytes(row.needs), "?" if row.has is None else gigabytes(row.has), terms)
    return table


def as_records(found: Sequence[MemoryNeed]) -> list[dict[str, Any]]:
    """The rows of memory as plain data, in bytes."""
    return [{"where": row.where, "needs": row.needs, "has": row.has, "terms": dict(row.terms)} for row in found]


def expected_start(checked: CheckedRun) -> float | None:
    """When Slurm would start the job, in epoch seconds; None where it names no time, or does not answer.

    Slurm checks the whole script for that: raises `UserError` for what it would refuse.
    """
    if checked.environment is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        return job_start(checked.launch(RunDir(folder), 1), checked.environment)


def warn(warnings: Sequence[str]) -> None:
    """Print warnings, a line each."""
    for line in warnings:
        print_note(f"warning: {line}")


def load(run_file: Path, overrides: Sequence[str]) -> RunConfig:
    """Load a run file over the site profile, with every path made absolute."""
    config = with_absolute_paths(load_run_file(run_file, overrides, site_profile()))
    # Not for a run that is resumed: it has its split, and may outlive the files behind it.
    check_planner_files(config)
    return config


def site_config(changes: Mapping[str, object] | None = None) -> RunConfig:
    """The site profile over the defaults, for jobs that have no run file; ``changes`` by dotted key."""
    config = validate(site_profile())
    return with_absolute_paths(with_values(config, changes) if changes else config)
