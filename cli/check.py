"""`libra-hpc check`: find mistakes in a run file before anything is queued; `submit` runs the same checks."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from libra_hpc.config.load import load_run_file, validate, with_values
from libra_hpc.config.rollout import PlannerSection
from libra_hpc.config.run import RunConfig
from libra_hpc.config.simulated import SimulatedSection
from libra_hpc.config.site import site_profile
from libra_hpc.errors import SlurmUnreachable, invalid
from libra_hpc.facts.rundir import RunDir
from libra_hpc.models.shapes import ModelShape
from libra_hpc.planning.initial import InitialPlan
from libra_hpc.preflight.checks import check_run, policy_shape
from libra_hpc.preflight.field_names import naming
from libra_hpc.preflight.gpu_needs import gpu_needs
from libra_hpc.preflight.host_memory_needs import HostNeed, check_hosts, host_needs
from libra_hpc.preflight.train_worlds import describe_worlds
from libra_hpc.slurm.fit import check_fit, het_groups, with_resources
from libra_hpc.slurm.interpreter import check_python
from libra_hpc.slurm.launch import Launch
from libra_hpc.slurm.plugins import check_plugin, mpi_plugins
from libra_hpc.slurm.queue.command import WAYS_OUT
from libra_hpc.slurm.queue.query import Partition
from libra_hpc.user_file import absolute

from . import jobs, memory_table
from .config_show import OverrideOption, RunFileArgument
from .output import print_json, print_line, print_note, show
from .runs import JsonOption
from .split import resolve, show_split


def check(run_file: RunFileArgument, override: OverrideOption = [], json: JsonOption = False) -> None:  # noqa: B006
    config, made, environment, warnings, hosts = check_all(load(run_file, override), slurm_required=False)
    if environment is None and config.slurm.executor != "local":
        warnings.append("no Slurm controller answers: partitions, nodes and limits were not checked")
    start = None if environment is None else jobs.expected_start(config, environment)
    warn(warnings)
    memory = memory_table.rows(gpu_needs(config, shape_of(config)), hosts)
    if json:
        split = None if made is None else made.chosen
        facts = {"checked_against_slurm": environment is not None, "warnings": warnings, "expected_start": start}
        facts |= {"layout": describe_worlds(config)}
        records = memory_table.as_records(memory)
        print_json({"run_file": str(run_file), "good": True, **facts, "split": split, "memory": records})
        return
    if made is not None:
        show_split(made)
    print_line(describe_worlds(config))
    if memory:
        show(memory_table.memory_table(memory))
    when = (
        "" if start is None else f"; Slurm would start it {time.strftime('on %d %B at %H:%M', time.localtime(start))}"
    )
    print_line(f"{run_file} is good{when}")


class Checked(NamedTuple):
    """A configuration that passed every check."""

    config: RunConfig
    """With its split, and on Slurm its CPUs and memory filled in."""
    made: InitialPlan | None
    """The plan behind the split; None where the split is explicit."""
    environment: jobs.Environment | None
    """Environment of Slurm's commands; None for the local executor, or when no Slurm answers."""
    warnings: list[str]
    hosts: list[HostNeed]
    """Host memory of every kind of node."""


def check_all(config: RunConfig, *, slurm_required: bool) -> Checked:
    """Fill in the split and run every check; raises the first mistake.

    ``slurm_required``: raise `SlurmUnreachable` when a Slurm is needed and none answers.
    """
    with naming(config):
        config, made = resolve(config)
    warnings = check_run(config) + check_python(config)
    environment = _environment(config) if slurm_required else jobs.environment_or_none(config.slurm.executor)
    check_plugin(config, [] if environment is None else mpi_plugins(environment))
    known: list[Partition] = []
    if environment is not None:
        known = jobs.partitions(environment)
        config = with_resources(config, known)
        check_fit(config, known)
    shape = shape_of(config)
    hosts = [] if shape is None else host_needs(config, shape, known)
    warnings += check_hosts(hosts)
    # The writer refuses what cannot stand in a script; a local run has none.
    jobs.script(Launch(config, RunDir(config.run.dir), 1))
    return Checked(config, made, environment, warnings, hosts)


def shape_of(config: RunConfig) -> ModelShape | None:
    """Shape of the policy; None in a dry run, which has no policy."""
    return None if config.run.engine == "simulated" else policy_shape(config)


def _environment(config: RunConfig) -> jobs.Environment | None:
    """As `jobs.environment`; the error proposes a run without Slurm where this machine has the GPUs."""
    try:
        return jobs.environment(config.slurm.executor)
    except SlurmUnreachable as error:
        real = config.run.engine == "real" and config.slurm.device == "cuda"
        needed = sum(group.component.nodes * group.component.gpus for group in het_groups(config)) if real else 0
        here = gpus_here()
        way = f"{WAYS_OUT}, or run without Slurm with `--executor local`"
        if needed > here:
            way = f"submit where `sinfo` answers: the run needs {needed} GPUs, and this machine has {here}"
        raise SlurmUnreachable(str(error).replace(WAYS_OUT, way)) from error


def gpus_here() -> int:
    """GPUs of this machine."""
    return sum(path.name.removeprefix("nvidia").isdigit() for path in Path("/dev").glob("nvidia*"))


def warn(warnings: Sequence[str]) -> None:
    """Print warnings, a line each."""
    for line in warnings:
        print_note(f"warning: {line}")


def load(run_file: Path, overrides: Sequence[str]) -> RunConfig:
    """Load a run file over the site profile, with every path made absolute."""
    return with_absolute_paths(load_run_file(run_file, overrides, site_profile().values))


def site_config(changes: Mapping[str, object] | None = None) -> RunConfig:
    """The site profile over the defaults, for jobs that have no run file; ``changes`` by dotted key."""
    config = validate(site_profile().values)
    return with_absolute_paths(with_values(config, changes) if changes else config)


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """``config`` for a job that starts in another folder."""
    model = str(Path(config.model.path).absolute()) if config.model.path else ""
    warm_start = str(Path(config.rollout.warm_start).absolute()) if config.rollout.warm_start else ""
    compute = config.compute
    python = compute.python
    if compute.container == "none" and os.sep in python:
        python = str(Path(python).expanduser().absolute())
    elif compute.container == "none" and python:
        python = shutil.which(python) or python
    folder = _run_folder(config.run.dir)
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"dir": str(folder)}),
            "compute": compute.model_copy(update={"python": python}),
            "model": config.model.model_copy(update={"path": model}),
            "task": config.task.model_copy(update={"name": absolute(config.task.name)}),
            "rollout": config.rollout.model_copy(
                update={"warm_start": warm_start, "policy": absolute(config.rollout.policy)}
            ),
            "planner": config.planner.model_copy(update=_absolute(config.planner)),
            "simulated": config.simulated.model_copy(update=_absolute(config.simulated)),
        }
    )


def _run_folder(given: str) -> Path:
    """``run.dir`` with its variables replaced; raises `UserError` for an empty one and for an unknown variable."""
    folder = os.path.expandvars(given)
    if not folder:
        raise invalid("run.dir", given, "not given", "a writable folder on a file system all nodes share")
    if "$" in folder:
        raise invalid("run.dir", given, "a variable in it is not set here", "a folder, or variables that are set")
    return Path(folder).expanduser().absolute()


def _absolute(section: PlannerSection | SimulatedSection) -> dict[str, str]:
    """Absolute paths of the files that planning or a dry run reads; a model is a path only where that folder exists."""
    named = {name: getattr(section, name, "") for name in ("trace", "train_speed", "calibration", "devices", "model")}
    return {
        name: str(Path(path).absolute())
        for name, path in named.items()
        if path and (name != "model" or Path(path).exists())
    }
