"""`libra-hpc check`: find mistakes in a run file before anything is queued; `submit` runs the same checks."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from rich.table import Table

from libra_hpc.config.learn import INITIAL, TaskTable
from libra_hpc.config.load import load_run_file, validate, with_values
from libra_hpc.config.run import RunConfig
from libra_hpc.config.site import site_profile
from libra_hpc.errors import invalid
from libra_hpc.facts.rundir import RunDir
from libra_hpc.preflight import checked_run
from libra_hpc.preflight.checked_run import CheckedRun
from libra_hpc.preflight.gpu_memory import MemoryNeed
from libra_hpc.preflight.named_files import check_planner_files
from libra_hpc.preflight.train_worlds import describe_worlds
from libra_hpc.slurm.submit import expected_start as job_start
from libra_hpc.user_file import absolute, placed

from .config_show import OverrideOption, RunFileArgument
from .output import busy, narrow_table, print_json, print_line, print_note, show
from .runs import JsonOption
from .split import show_split, simulating

MODELS = ("path", "model")
"""Keys of models."""
COLUMNS = 80
"""Width of the table: a terminal of usual width shows it whole."""


def check(run_file: RunFileArgument, override: OverrideOption = [], json: JsonOption = False) -> None:  # noqa: B006
    checked = check_all(load(run_file, override), slurm_required=False)
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
    """`libra_hpc.preflight.checked_run.check` with a spinner."""
    with busy("planning" if config.components.split == "auto" else "checking") as status:
        return checked_run.check(config, slurm_required=slurm_required, progress=partial(simulating, status))


def memory_table(found: Sequence[MemoryNeed]) -> Table:
    """A row for each, with its terms from large to small."""
    table = narrow_table("memory, GB~", "needs>~", "has>~", "terms~", width=COLUMNS)
    for row in found:
        largest = sorted(row.terms.items(), key=lambda term: -term[1])
        terms = ", ".join(f"{name} {_gb(size)}" for name, size in largest if size)
        table.add_row(row.where, _gb(row.needs), "?" if row.has is None else _gb(row.has), terms)
    return table


def as_records(found: Sequence[MemoryNeed]) -> list[dict[str, Any]]:
    """Plain data, in bytes."""
    return [{"where": row.where, "needs": row.needs, "has": row.has, "terms": dict(row.terms)} for row in found]


def _gb(size: float) -> str:
    return f"{size / 1e9:,.0f}" if size >= 100e9 else f"{size / 1e9:.1f}"


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


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """``config`` for a job that starts in another folder."""
    python, command, image = config.compute.python, config.notify.command, config.compute.image
    if config.compute.container == "none":
        python = _program("compute.python", python)
        command = [*(_program("notify.command", name) for name in command[:1]), *command[1:]]
    # Pyxis takes a file by its first character, and the name of a registry otherwise.
    if "://" not in image and (config.compute.container == "apptainer" or image.startswith(("/", ".", "~", "$"))):
        image = placed("compute.image", image)
    if not config.run.dir:
        raise invalid("run.dir", config.run.dir, "not given", "a writable folder on a file system all nodes share")
    reference = config.algorithm.reference
    parts = {
        name: [replace(one, task=absolute(f"task.{name}", one.task), **_own_files(one)) for one in tasks]
        for name, tasks in (("train", config.task.train), ("eval", config.task.eval))
    }
    return config.changed(
        run=_placed(config, "run", "dir"),
        slurm=_placed(config, "slurm", "template"),
        compute={"python": python, "image": image},
        notify={"command": command},
        model=_placed(config, "model", "path"),
        env={"mounts": [placed("env.mounts", path) for path in config.env.mounts]},
        task={"name": absolute("task.name", config.task.name), **parts, **_own_files(config.task)},
        algorithm={
            "advantage": absolute("algorithm.advantage", config.algorithm.advantage),
            "loss": absolute("algorithm.loss", config.algorithm.loss),
            "reference": reference if reference == INITIAL else placed("algorithm.reference", reference),
        },
        rollout={
            "policy": absolute("rollout.policy", config.rollout.policy),
            **_placed(config, "rollout", "warm_start"),
        },
        planner=_placed(config, "planner", "trace", "train_speed", "devices", "model"),
        simulated=_placed(config, "simulated", "trace", "calibration", "devices", "model"),
    )


def _own_files(task: TaskTable) -> dict[str, Any]:
    """Files that a task is made of, with absolute paths."""
    functions = {key: absolute(f"task.{key}", getattr(task, key)) for key in ("reward", "agent")}
    verifiers = {
        key: placed(f"task.verifiers.{key}", value)
        if isinstance(value, str) and (key == "python" or value.endswith(".py"))
        else value
        for key, value in task.verifiers.items()
    }
    return {"data": placed("task.data", task.data), **functions, "verifiers": verifiers}


def _program(field: str, given: str) -> str:
    """The path of a program, where it is found."""
    return placed(field, given) if os.sep in given else shutil.which(given) or given


def _placed(config: RunConfig, section: str, *keys: str) -> dict[str, str]:
    """Absolute paths of a section's files; a model that is no folder may be a short name (`model_shape`)."""
    given = {key: getattr(getattr(config, section), key) for key in keys}
    found = {key: placed(f"{section}.{key}", path) for key, path in given.items()}
    return {key: path for key, path in found.items() if key not in MODELS or os.path.exists(path)}
