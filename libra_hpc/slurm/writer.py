"""The batch script of a run: a pure function of a `Launch`.

The script is one heterogeneous job with one component per kind of node and one task per node.  `srun` starts all node
agents as one MPI world.  Values for the template ``sbatch/run.sbatch.j2`` are checked (no spaces) or quoted here.

- The time limit is near (`fit.notice_s`) -> the agents get SIGUSR1.
- The job is cancelled or preempted -> the agents get SIGTERM.
- A rank prints -> ``agent-<rank>.log``; it writes to descriptor `OUTPUT_FD` -> Slurm's own output.
- All ranks have ended -> `libra_hpc.slurm.outcome` decides, also whether the job is queued again.
"""

from __future__ import annotations

import math
import shlex
from importlib import resources
from typing import NamedTuple

import jinja2

from libra_hpc.config.job import Component
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import invalid

from .fit import HetGroup, notice_s
from .launch import Launch
from .outcome import JOB_END, KILL_WAIT, OUTPUT, OUTPUT_FD, REASON, RECOVERIES
from .pmi import GONE
from .ranks import STRAGGLERS_S

RESERVED = {
    "--signal": "",
    "--output": "",
    "-o": "",
    "--error": "",
    "-e": "",
    "--open-mode": "",
    "--job-name": "run.name",
    "-J": "run.name",
    "--ntasks": "",
    "-n": "",
    "--ntasks-per-node": "",
    "--nodes": "components.*.nodes",
    "-N": "components.*.nodes",
    "--cpus-per-task": "components.*.cpus",
    "-c": "components.*.cpus",
    "--mem": "components.*.mem",
    "--mem-per-cpu": "components.*.mem",
    "--mem-per-gpu": "components.*.mem",
    "--time": "slurm.time_limit",
    "-t": "slurm.time_limit",
    "--partition": "components.*.partition",
    "-p": "components.*.partition",
    "--requeue": "slurm.preempted",
    "--no-requeue": "slurm.preempted",
    "--array": "",
    "-a": "",
    "--parsable": "",
    "--wrap": "",
    "--wait": "",
    "-W": "",
    "--test-only": "",
    "--kill-on-invalid-dep": "",
    "--no-kill": "",
    "-k": "",
    "--chdir": "",
    "-D": "",
}
"""sbatch options that the script needs as they are, and the key that sets them where there is one."""
RANK_STARTER = ("-m", "libra_hpc.slurm.pmi")
"""Arguments that start a rank through the relay of its start-up messages."""


def het_script(launch: Launch) -> str:
    """The sbatch script of a launch; raises `UserError` for a value that cannot be written as an sbatch option."""
    config, run, groups = launch.config, launch.run, launch.groups
    requeue = config.slurm.preempted == "requeue"
    if config.slurm.requeues and not requeue:
        why = f"Slurm queues the job again for slurm.requeues = {config.slurm.requeues} as it does for a preemption"
        raise invalid("slurm.preempted", "stop", why, "requeue, or slurm.requeues = 0")
    logs, started = run.logs(launch.attempt), start_command(launch)
    ours = {GONE: str(run.gone(launch.attempt)), OUTPUT: str(OUTPUT_FD)}
    template = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    ).from_string(resources.files("libra_hpc_sbatch").joinpath("run.sbatch.j2").read_text())
    return template.render(
        groups=[(" and ".join(group.ranks), group.component.nodes, _options(config, group)) for group in groups],
        common=[
            f"--job-name={_word('run.name', config.run.name)}",
            # Slurm expands % in file names; doubled it stands for itself.
            f'--output="{str(logs / "slurm.out").replace("%", "%%")}"',
            "--open-mode=append",
            f"--signal=B:USR1@{math.ceil(notice_s(config.slurm))}",
            "--requeue" if requeue else "--no-requeue",
            *([f"--dependency=afterany:{launch.after}"] if launch.after else []),
            *_mail(config),
        ],
        setup=config.compute.setup,
        local_dir=config.compute.local_dir,
        exports=[f"{name}={_value(value)}" for name, value in sorted({**launch.variables, **ours}.items())],
        het_groups=",".join(str(index) for index in range(len(groups))) if len(groups) > 1 else "",
        container=shlex.join(started.step),
        mpi=shlex.quote(_word("slurm.mpi", config.slurm.mpi)),
        log_prefix=shlex.quote(str(logs / "agent-")),
        command=shlex.join([*started.prefix, launch.python, *RANK_STARTER, *launch.agent_arguments]),
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
        requeue=requeue,
        requeues=config.slurm.requeues,
        job_end=JOB_END,
        kill_wait=KILL_WAIT,
        outcome=shlex.join(
            [*started.batch, launch.python, "-m", "libra_hpc.slurm.outcome", str(run.path), str(launch.attempt)]
        ),
    )


def _value(text: str) -> str:
    """The right side of a shell assignment; one that begins with ``=`` is quoted, because ``==`` looks like a test."""
    return f"'{text}'" if text.startswith("=") and shlex.quote(text) == text else shlex.quote(text)


class StartCommand(NamedTuple):
    """What stands before the interpreter of the compute nodes."""

    prefix: list[str]
    """In every rank."""
    step: list[str]
    """Options of the step that starts the ranks."""
    batch: list[str]
    """In the batch script itself."""


def start_command(launch: Launch) -> StartCommand:
    """How the interpreter starts on the nodes: as it is, or inside the container of ``[compute]``."""
    compute = launch.config.compute
    if compute.container == "none":
        return StartCommand([], [], [])
    binds = [*compute.binds, str(launch.run.path)]
    if compute.container == "apptainer":
        gpus = ["--nv"] if launch.config.slurm.device == "cuda" else []
        prefix = ["apptainer", "exec", *gpus, *(f"--bind={bind}" for bind in binds), compute.image]
        return StartCommand(prefix, [], prefix)
    mounts = ",".join(bind if ":" in bind else f"{bind}:{bind}" for bind in binds)
    options = [f"--container-image={compute.image}", f"--container-mounts={mounts}"]
    return StartCommand([], options, ["srun", "--overlap", "--nodes=1", "--ntasks=1", *options])


def _mail(config: RunConfig) -> list[str]:
    """sbatch options for mail."""
    address = _word("slurm.mail", config.slurm.mail)
    return [f"--mail-user={address}", f"--mail-type={','.join(config.slurm.mail_on)}"] if address else []


def component_options(config: RunConfig, name: str, component: Component) -> dict[str, str]:
    """Where the nodes of a component come from and who pays for them: sbatch options without their dashes."""
    slurm, field = config.slurm, f"components.{name}"
    options = {
        "partition": _word(f"{field}.partition", component.partition),
        "constraint": _word(f"{field}.constraint", component.constraint),
        "reservation": _word(f"{field}.reservation", component.reservation),
        "account": _word(f"{field}.account", component.account) or _word("slurm.account", slurm.account),
        "qos": _word(f"{field}.qos", component.qos) or _word("slurm.qos", slurm.qos),
    }
    if component.gpus:
        kind = _word(f"{field}.gpu_type", component.gpu_type)
        spelling = _word("slurm.gpu_option", slurm.gpu_option).removeprefix("--")
        if not kind:
            spelling = spelling.replace("{type}:", "").replace("{type}", "")
        option, _, value = spelling.replace("{type}", kind).replace("{gpus}", str(component.gpus)).partition("=")
        options[option] = value
    return {option: value for option, value in options.items() if value}


def _options(config: RunConfig, group: HetGroup) -> list[str]:
    """sbatch options of one group of nodes."""
    component, tasks = group.component, len(group.ranks)
    options = [
        f"--nodes={component.nodes}",
        f"--ntasks-per-node={tasks}",
        f"--cpus-per-task={max(1, component.cpus // tasks)}",
        f"--mem={component.mem}",
        f"--time={_word('slurm.time_limit', config.slurm.time_limit)}",
        # The job outlives a lost node: the agents notice and go on.
        "--no-kill",
        *(f"--{option}={value}" for option, value in component_options(config, group.name, component).items()),
    ]
    return options + extra_options(config, group.name, component)


def extra_options(config: RunConfig, name: str, component: Component) -> list[str]:
    """The sbatch options that the run file gives verbatim for a component; raises `UserError` for a reserved one."""
    extras = [("slurm.extra", config.slurm.extra), (f"components.{name}.extra", component.extra)]
    return [_extra(f"{field}[{i}]", option) for field, given in extras for i, option in enumerate(given)]


def _extra(field: str, option: str) -> str:
    """An sbatch option that was given verbatim, unless it would undo one that the job needs."""
    name = option.split("=")[0].split()[0] if option.split() else ""
    if not name.startswith("-") or not option.isprintable():
        raise invalid(field, option, "not an sbatch option", "one option such as '--exclusive'")
    if any(character.isspace() for character in option):
        raise invalid(field, option, "it has a space", f"{name}=VALUE")
    if name in RESERVED:
        raise invalid(field, option, f"libra-hpc sets {name} itself", RESERVED[name] or "no such option")
    return option


def _word(field: str, value: str) -> str:
    """``value`` if an sbatch option can contain it unquoted; else raises `UserError`."""
    if any(character.isspace() or character in "\"'\\#" or not character.isprintable() for character in value):
        raise invalid(field, value, "not usable in an sbatch option", "a name without spaces or quotes")
    return value
