"""The batch script of a run: a pure function of a `Launch`.

The script is one job, heterogeneous with one component per kind of node, or plain (`het_groups`); one task per node.
`srun` starts all node agents as one MPI world.  Options are checked (`launch`); other values are quoted here.

- The time limit is near (`fit.notice_s`) -> the agents get SIGUSR1.
- The job is cancelled or preempted -> the agents get SIGTERM.
- A rank prints -> ``agent-<rank>.log``; it writes to descriptor `OUTPUT_FD` -> Slurm's own output.
- The script becomes the run's owner (`libra_hpc.owner.owner`), which starts the ranks and decides what follows.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Sequence

from libra_hpc.process.code_stamp import STAMP, code_stamp
from libra_hpc.protocol.ranks_stop import OUTPUT, OUTPUT_FD
from libra_hpc.slurm.script.container import start_command
from libra_hpc.slurm.script.template import script_text

from .fit import notice_s
from .interpreter import in_container
from .launch import Launch, NodeRequest, agent_variables, spot_options
from .set_up import CACHE_FOLDER, local_exports, set_up_lines

STEP = "step"
"""File in the log folder with the number of the step that the ranks are."""
RANK_STARTER = ("-m", "libra_hpc.slurm.pmi")
"""Arguments that start a rank through the relay of its start-up messages."""


def het_script(launch: Launch) -> str:
    """The sbatch script of a launch; raises `UserError` for a template that cannot make one."""
    config, run, groups = launch.config, launch.run, launch.request.groups
    logs, started = run.logs(launch.attempt), start_command(config, run.path, named=True)
    # Slurm's commands are outside a container, and so is the owner.
    python = sys.executable if in_container(config) else launch.python
    slurm = ["--slurm", "--nodes", *(str(group.used) for group in groups)]
    owner = shlex.join([python, "-m", "libra_hpc.owner.owner", *launch.owner_arguments, *slurm])
    ours = {OUTPUT: str(OUTPUT_FD)}
    ours |= {STAMP: code_stamp()} if in_container(config) else {}
    return script_text(
        config.slurm.template,
        groups=groups,
        common=[
            f"--job-name={config.run.name}",
            # Slurm expands % in file names; doubled it stands for itself.
            f'--output="{str(logs / "slurm.out").replace("%", "%%")}"',
            "--open-mode=append",
            f"--signal=B:USR1@{math.ceil(notice_s(config.slurm))}",
            "--requeue" if config.slurm.preempted == "requeue" else "--no-requeue",
            *([f"--dependency=afterany:{launch.after}"] if launch.after else []),
            *launch.request.mail,
        ],
        set_up=set_up_lines(
            config, {**launch.variables, **ours}, f'exec {owner} --unprepared "$cause"', local_exports(config)
        ),
        local_dir=config.compute.local_dir,
        parts=step_parts(groups),
        # A lost rank or node ends nothing else (-K0 -W0 --no-kill).
        step_options=[
            "--export=ALL",
            f"--mpi={shlex.quote(config.slurm.mpi)}",
            *("--no-kill", "-K0", "-W0", "--mem=0", "--cpu-bind=none"),
            *map(shlex.quote, started.step),
        ],
        log_prefix=shlex.quote(str(logs / "agent-")),
        command=shlex.join([*started.prefix, launch.python, *RANK_STARTER, *launch.agent_arguments]),
        output=OUTPUT_FD,
        step=shlex.quote(str(logs / STEP)),
        owner=owner,
    )


def spot_script(launch: Launch) -> str:
    """The script of a job of one node that joins the running job (``[borrow.spot]``)."""
    config, run = launch.config, launch.run
    started = start_command(config, run.path, named=False)
    join = [*started.prefix, launch.python, "-m", "libra_hpc_cli.app", "join", str(run.path), "--spot"]
    step = ["srun", "--ntasks=1", "--export=ALL", "--mem=0", "--cpu-bind=none", *started.step] if started.step else []
    options = [
        f"--job-name={config.run.name}-spot",
        f'--output="{str(run.logs(launch.attempt) / "spot-").replace("%", "%%")}%j.out"',
        "--no-requeue",
        *spot_options(config),
    ]
    lines = set_up_lines(config, agent_variables(config, {}), first=local_exports(config))
    lines += [f'mkdir -pm 700 "{CACHE_FOLDER}"'] if config.compute.local_dir else []
    head = ["#!/bin/bash", *(f"#SBATCH {option}" for option in options)]
    return "\n".join([*head, *lines, shlex.join(["exec", *step, *join]), ""])


def step_parts(groups: Sequence[NodeRequest]) -> list[list[str]]:
    """Options of each part of the step.  Tasks go in rank order over the nodes, the first of which gets what is left.

    A heterogeneous job has the tasks of each component from its request; where only the first node has one more, the
    first component is a part by itself.
    """
    counts = [f"--nodes={groups[0].used}", f"--ntasks={groups[0].tasks}", "--distribution=block"]
    if len(groups) == 1:
        return [counts]
    everyone = [str(index) for index in range(len(groups))]
    if groups[0].used in (1, groups[0].tasks):
        return [["--het-group=" + ",".join(everyone)]]
    return [["--het-group=0", *counts], ["--het-group=" + ",".join(everyone[1:])]]
