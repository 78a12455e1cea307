"""One function on several nodes of a component, as ranks of one MPI world: a job of submitit and the site profile."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from libra_hpc.config.run import RunConfig
from libra_hpc.telemetry.rundir import RunDir

from .fit import with_resources
from .launch import Launch
from .query import partitions
from .single import Handle, run_single
from .writer import RANK_STARTER, component_options, start_command

TIME_LIMIT = "00:10:00"
"""Two minutes are the rule; a cold file system needs several for the imports."""


def submit_probe(
    probe: Callable[..., Any], config: RunConfig, env: Mapping[str, str], folder: Path, nodes: int
) -> Handle:
    """Queue ``probe(device, interface, local_dir, meeting)`` on ``nodes`` train nodes."""
    config = with_resources(config, partitions(env))
    train = config.components.train.model_copy(update={"nodes": nodes})
    launch = Launch(config, RunDir(folder), 1)
    started = start_command(launch)
    python = shlex.join([*started.prefix, launch.python, *RANK_STARTER])
    exports = [f"export {name}={shlex.quote(value)}" for name, value in sorted(launch.variables.items())]
    return run_single(
        probe,
        config.slurm.device,
        config.slurm.interface,
        config.compute.local_dir,
        str(folder),
        env=env,
        name="libra-doctor",
        folder=folder,
        cpus=train.cpus,
        mem=train.mem,
        time_limit=TIME_LIMIT,
        python=python,
        parameters={
            "nodes": nodes,
            "setup": [*config.compute.setup, *exports],
            "srun_args": [f"--mpi={config.slurm.mpi}", *started.step],
            "additional_parameters": component_options(config, "train", train),
        },
    )
