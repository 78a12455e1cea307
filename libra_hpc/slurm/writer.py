"""The batch script of a run: a pure function of a `Launch`.

The script is one heterogeneous job with one component per kind of node and one task per node.  `srun` starts all node
agents as one MPI world.  Values for the template ``sbatch/run.sbatch.j2`` are checked (no spaces) or quoted here.

- The time limit is `WARNING_S` away -> the agents get SIGUSR1.
- The job is cancelled or preempted -> the agents get SIGTERM.
- A rank prints -> ``agent-<rank>.log``; it writes to descriptor `OUTPUT_FD` -> Slurm's own output.
- All ranks have ended -> `libra_hpc.slurm.outcome` decides.
"""

from __future__ import annotations

import shlex
from importlib import resources

import jinja2

from libra_hpc.config.job import Component
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import invalid

from .launch import Launch
from .outcome import OUTPUT, OUTPUT_FD, REASON, RECOVERIES
from .pmi import GONE
from .ranks import STRAGGLERS_S

WARNING_S = 60
"""Seconds before the time limit at which Slurm signals."""
RANK_STARTER = ("-m", "libra_hpc.slurm.pmi")
"""Arguments that start a rank through the relay of its start-up messages."""


def het_script(launch: Launch) -> str:
    """The sbatch script of a launch; raises `UserError` for a value that cannot be written as an sbatch option."""
    config, run, components = launch.config, launch.run, launch.components
    logs, command = run.logs(launch.attempt), [launch.python, *RANK_STARTER, *launch.agent_arguments]
    ours = {GONE: str(run.gone(launch.attempt)), OUTPUT: str(OUTPUT_FD)}
    template = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    ).from_string(resources.files("libra_hpc_sbatch").joinpath("run.sbatch.j2").read_text())
    return template.render(
        components=[(name, component.nodes, _options(config, name, component)) for name, component in components],
        common=[
            f"--job-name={_word('run.name', config.run.name)}",
            # Slurm expands % in file names; doubled it stands for itself.
            f'--output="{str(logs / "slurm.out").replace("%", "%%")}"',
            "--open-mode=append",
            f"--signal=B:USR1@{WARNING_S}",
        ],
        exports=[f"{name}={shlex.quote(value)}" for name, value in sorted({**launch.variables, **ours}.items())],
        groups=",".join(str(index) for index in range(len(components))) if len(components) > 1 else "",
        mpi=shlex.quote(_word("slurm.mpi", config.slurm.mpi)),
        log_prefix=shlex.quote(str(logs / "agent-")),
        command=shlex.join(command),
        result=shlex.quote(str(run.result)),
        met=shlex.quote(str(run.met(launch.attempt))),
        again=shlex.quote(str(run.again(launch.attempt))),
        gone=shlex.quote(str(run.gone(launch.attempt))),
        grace=int(STRAGGLERS_S),
        output=OUTPUT_FD,
        others=launch.ranks - 1,
        step=shlex.quote(str(logs / "step")),
        recoveries=RECOVERIES,
        reason=REASON,
        restarts=config.slurm.restarts,
        outcome=shlex.join([launch.python, "-m", "libra_hpc.slurm.outcome", str(run.path), str(launch.attempt)]),
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
        # The job outlives a lost node: the agents go on without it.
        "--no-kill",
        *(f"--{option}={value}" for option, value in optional.items() if value),
    ]
    if component.gpus:
        kind = _word(f"{field}.gpu_type", component.gpu_type)
        options.append(f"--gres=gpu:{kind + ':' if kind else ''}{component.gpus}")
    for index, extra in enumerate(slurm.extra):
        if not extra.startswith("-") or not extra.isprintable():
            raise invalid(
                f"slurm.extra[{index}]", extra, "not an sbatch option", "one option such as '--constraint=nvlink'"
            )
        options.append(extra)
    return options


def _word(field: str, value: str) -> str:
    """``value`` if an sbatch option can contain it unquoted; else raises `UserError`."""
    if any(character.isspace() or character in "\"'\\#" or not character.isprintable() for character in value):
        raise invalid(field, value, "not usable in an sbatch option", "a name without spaces or quotes")
    return value
