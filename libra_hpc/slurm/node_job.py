"""One function on nodes of a component, as ranks of one MPI world: a job of submitit and the site profile."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from libra_hpc.config.run import RunConfig
from libra_hpc.errors import OperationError, UserError
from libra_hpc.slurm.interpreter import start_command
from libra_hpc.slurm.queue.query import on_cluster, partitions

from .fit import with_resources
from .interpreter import compute_python
from .launch import (
    agent_variables,
    check_lines,
    component_options,
    extra_options,
    marked,
    memory_options,
    named_cluster,
)
from .queue.job_record import MARK
from .single import Handle, run_single
from .writer import RANK_STARTER, set_up_lines


def answered(function: Callable[..., Any], *arguments: Any) -> tuple[str, Any]:
    """("", what the function returns), or (its error in one sentence, None), to be read in another process."""
    try:
        return "", function(*arguments)
    except (UserError, OperationError) as error:
        return str(error), None


def submit_on_nodes(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    config: RunConfig,
    env: Mapping[str, str],
    *,
    component: str,
    nodes: int,
    name: str,
    folder: Path,
    time_limit: str,
    mark: str = MARK,
) -> Handle:
    """Queue ``function(*arguments)`` as one rank on each of ``nodes`` nodes of ``component``, started as agents are.

    ``mark``: see `Launch.mark`.
    Raises `UserError` when Slurm refuses the job.
    """
    check_lines(config)
    config = with_resources(config, partitions(env, *on_cluster(named_cluster(config))))
    wanted = replace(getattr(config.components, component), nodes=nodes)
    started = start_command(config, folder, named=False)
    python = shlex.join([*started.prefix, compute_python(config), *RANK_STARTER])
    return run_single(
        function,
        *arguments,
        env=env,
        name=name,
        folder=folder,
        cpus=wanted.cpus,
        time_limit=time_limit,
        python=python,
        parameters={
            "nodes": nodes,
            "setup": set_up_lines(config, agent_variables(config, {})),
            "srun_args": [f"--mpi={config.slurm.mpi}", "--export=ALL", *started.step],
            "additional_parameters": component_options(config, component, wanted),
        },
        options=marked(
            [
                *memory_options(config.slurm, wanted.mem, wanted.cpus, wanted.gpus),
                *extra_options(config, component, wanted),
            ],
            mark,
        ),
    )
