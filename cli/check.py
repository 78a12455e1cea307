"""`libra-hpc check`: everything that can be wrong with a run file, before anything is queued."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from libra_hpc.config.load import load_run_file
from libra_hpc.config.rollout import PlannerSection
from libra_hpc.config.run import RunConfig
from libra_hpc.config.simulated import SimulatedSection
from libra_hpc.config.site import site_profile
from libra_hpc.preflight.checks import check_run
from libra_hpc.slurm.fit import check_fit
from libra_hpc.slurm.interpreter import check_python
from libra_hpc.slurm.plugins import check_plugin, mpi_plugins

from . import jobs
from .config_show import OverrideOption, RunFileArgument
from .output import note, say, say_json
from .runs import JsonOption
from .split import resolve, show_split


def check(run_file: RunFileArgument, override: OverrideOption = [], json: JsonOption = False) -> None:  # noqa: B006
    """Check a run file against its schema, its model and task, and the partitions of the Slurm that would get it."""
    config, made = resolve(load(run_file, override))
    warnings = check_run(config) + check_python(config)
    environment = jobs.environment_or_none(config.slurm.executor)
    check_site(config, environment)
    if environment is None and config.slurm.executor != "local":
        warnings.append("no Slurm controller answers: partitions, nodes and limits were not checked")
    warn(warnings)
    if json:
        split = None if made is None else made.chosen
        checked = {"checked_against_slurm": environment is not None, "warnings": warnings}
        say_json({"run_file": str(run_file), "good": True, **checked, "split": split})
        return
    if made is not None:
        show_split(made)
    say(f"{run_file} is good")


def check_site(config: RunConfig, environment: jobs.Environment | None) -> None:
    """Raise the first thing that the Slurm of ``environment`` (None: none that answers) could never start."""
    check_plugin(config, [] if environment is None else mpi_plugins(environment))
    if environment is not None:
        check_fit(config, jobs.partitions(environment))


def warn(warnings: Sequence[str]) -> None:
    """Print what could not be checked, a line each."""
    for line in warnings:
        note(f"warning: {line}")


def load(run_file: Path, overrides: Sequence[str]) -> RunConfig:
    """Load a run file with every path made absolute: the job starts elsewhere."""
    config = load_run_file(run_file, overrides, site_profile().values)
    task = config.task.name
    path, separator, name = task.rpartition(":")
    if separator:
        task = f"{Path(path).absolute()}:{name}"
    model = str(Path(config.model.path).absolute()) if config.model.path else ""
    compute = config.compute
    python = compute.python
    if compute.container == "none" and os.sep in python:
        python = str(Path(python).expanduser().absolute())
    elif compute.container == "none" and python:
        python = shutil.which(python) or python
    folder = Path(os.path.expandvars(config.run.dir)).expanduser().absolute()
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"dir": str(folder)}),
            "compute": compute.model_copy(update={"python": python}),
            "model": config.model.model_copy(update={"path": model}),
            "task": config.task.model_copy(update={"name": task}),
            "planner": config.planner.model_copy(update=_absolute(config.planner)),
            "simulated": config.simulated.model_copy(update=_absolute(config.simulated)),
        }
    )


def _absolute(section: PlannerSection | SimulatedSection) -> dict[str, str]:
    """The files that planning or a dry run reads; a model is one only where there is such a folder, else it is a
    name."""
    named = {name: getattr(section, name, "") for name in ("trace", "calibration", "devices", "model")}
    return {
        name: str(Path(path).absolute())
        for name, path in named.items()
        if path and (name != "model" or Path(path).exists())
    }
