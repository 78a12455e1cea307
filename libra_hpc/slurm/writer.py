"""The batch script of a run: a pure function of the run file and a few paths.

One heterogeneous job, one component per kind of node, one task per node; `srun` starts the node agents of all components as one MPI world.  The template
is ``sbatch/run.sbatch.j2``; every value that reaches it is checked here (one line, no spaces) or quoted for the shell.

What the script promises the agents: ``LIBRA_COMPONENTS`` tells a rank its component, SIGUSR1 means that the time limit is `WARNING_S` away, SIGTERM that the
job is being cancelled or preempted, and each rank's output goes to ``agent-<rank>.log``.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from importlib import resources

import jinja2

from libra_hpc.config.job import Component
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import invalid
from libra_hpc.telemetry.rundir import RunDir

from .fit import present_components
from .ranks import START_TRIES

WARNING_S = 60
"""Seconds before the time limit at which Slurm signals: a checkpoint of the policy takes a few."""
RANK_STARTER = ("-m", "libra_hpc.slurm.pmi")
"""What a rank is started through: MPI's start-up messages must fit Slurm's buffers."""


def component_counts(config: RunConfig) -> str:
    """``planner:1,train:1,...``: nodes by component in rank order, what agents find their component from."""
    return ",".join(f"{name}:{component.nodes}" for name, component in present_components(config))


def agent_arguments(run: RunDir, attempt: int) -> list[str]:
    """Arguments of the interpreter that start a node agent."""
    return ["-m", "libra_hpc.pool.agent", "--run", str(run.path), "--attempt", str(attempt)]


def agent_environment(config: RunConfig) -> dict[str, str]:
    """Variables every agent gets, whatever started it."""
    return {"LIBRA_COMPONENTS": component_counts(config), "PYTHONUNBUFFERED": "1"}


def het_script(config: RunConfig, run: RunDir, *, python: str, attempt: int, environment: Mapping[str, str], arguments: Sequence[str] | None = None) -> str:
    """The sbatch script of ``config``.

    ``python``: interpreter on the nodes; ``attempt``: 1 for the first submission; ``environment``: variables the agents get, beside
    `agent_environment`; ``arguments``: what the interpreter is given instead of the agent's.  Raises `UserError` for a value that cannot
    be written as an sbatch option.
    """
    components = present_components(config)
    exports = {**environment, **agent_environment(config)}
    command = [python, *RANK_STARTER, *(agent_arguments(run, attempt) if arguments is None else arguments)]
    template = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True).from_string(
        resources.files("libra_hpc_sbatch").joinpath("run.sbatch.j2").read_text()
    )
    return template.render(
        components=[(name, component.nodes, _options(config, name, component)) for name, component in components],
        common=[
            f"--job-name={_word('run.name', config.run.name)}",
            # Slurm expands % in file names; doubled it stands for itself.
            f'--output="{str(run.logs(attempt) / "slurm.out").replace("%", "%%")}"',
            "--open-mode=append",
            f"--signal=B:USR1@{WARNING_S}",
        ],
        exports=[f"{name}={shlex.quote(value)}" for name, value in sorted(exports.items())],
        groups=",".join(str(index) for index in range(len(components))) if len(components) > 1 else "",
        mpi=shlex.quote(_word("slurm.mpi", config.slurm.mpi)),
        log_prefix=shlex.quote(str(run.logs(attempt) / "agent-")),
        command=shlex.join(command),
        result=shlex.quote(str(run.result)),
        met=shlex.quote(str(run.met(attempt))),
        tries=START_TRIES,
        python=shlex.quote(python),
    )


def _options(config: RunConfig, name: str, component: Component) -> list[str]:
    """sbatch options of one component."""
    slurm, field = config.slurm, f"components.{name}"
    optional = {
        "partition": _word(f"{field}.partition", component.partition),
        "constraint": _word(f"{field}.constraint", component.constraint),
        "account": _word("slurm.account", slurm.account),
        "qos": _word("slurm.qos", slurm.qos),
    }
    options = [
        f"--nodes={component.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={component.cpus}",
        f"--mem={component.mem}",
        f"--time={_word('slurm.time_limit', slurm.time_limit)}",
        # The job outlives a lost node: the agents notice and go on.
        "--no-kill",
        *(f"--{option}={value}" for option, value in optional.items() if value),
    ]
    if component.gpus:
        kind = _word(f"{field}.gpu_type", component.gpu_type)
        options.append(f"--gres=gpu:{kind + ':' if kind else ''}{component.gpus}")
    for index, extra in enumerate(slurm.extra):
        if not extra.startswith("-") or not extra.isprintable():
            raise invalid(f"slurm.extra[{index}]", extra, "not an sbatch option", "one option such as '--constraint=nvlink'")
        options.append(extra)
    return options


def _word(field: str, value: str) -> str:
    """``value`` if it can stand unquoted in an sbatch option."""
    if any(character.isspace() or character in "\"'\\#" or not character.isprintable() for character in value):
        raise invalid(field, value, "not usable in an sbatch option", "a name without spaces or quotes")
    return value
