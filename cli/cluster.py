"""`libra-hpc cluster`: start, stop and show the embedded Slurm of this machine."""

from __future__ import annotations

import shlex
import shutil
from typing import Annotated, Any

import typer

from libra_hpc.annexes.devcluster.cluster import Cluster, ClusterInfo
from libra_hpc.annexes.devcluster.packages import runs_from
from libra_hpc.errors import SlurmUnreachable
from libra_hpc.files import cache_folder
from libra_hpc.slurm.queue.command import slurm_environment

from .output import busy, print_json, print_line, print_note
from .runs import JsonOption

NOT_RUNNING = "The embedded Slurm is not running; start it with `libra-hpc cluster up`."

app = typer.Typer(no_args_is_help=True)


@app.command("up")
def up(
    if_needed: Annotated[bool, typer.Option("--if-needed", help="Do nothing when a Slurm answers already.")] = False,
) -> None:
    """Start the embedded Slurm, or what of it is missing."""
    if if_needed:
        try:
            slurm_environment()
        except SlurmUnreachable:
            pass
        else:
            print_line("a Slurm controller answers; nothing to start")
            return
    info = Cluster().up(Progress())
    print_line(f"the embedded Slurm is up: {len(info.nodes)} nodes, partitions {', '.join(info.partitions)}")
    print_note('to use its commands yourself: eval "$(libra-hpc cluster env)"')


@app.command("env")
def env() -> None:
    """Print shell lines that make squeue, sinfo and the others talk to the embedded Slurm."""
    info = Cluster().info()
    if info is None:
        raise SlurmUnreachable(NOT_RUNNING)
    for name, value in info.environment.items():
        print_line(f"export {name}={shlex.quote(value)}")


@app.command("down")
def down(
    remove: Annotated[bool, typer.Option("--remove", help="Delete its folder and the unpacked Slurm too.")] = False,
) -> None:
    """Cancel the jobs of the embedded Slurm and stop its daemons."""
    cluster = Cluster()
    with busy("stopping the embedded Slurm"):
        stopped = cluster.down()
    print_line(f"stopped {', '.join(stopped)}" if stopped else "the embedded Slurm was not running")
    if not remove:
        return
    # Only folders with our files: an environment variable may point anywhere.
    for folder, mark in ((cluster.home, cluster.conf), (cache_folder(), cache_folder() / "slurm.lock")):
        if mark.exists() and runs_from(folder):
            print_line(f"kept {folder}: another embedded Slurm runs from it")
        elif mark.exists():
            shutil.rmtree(folder)
            print_line(f"removed {folder}")


@app.command("status")
def status(json: JsonOption = False) -> None:
    """Show whether the embedded Slurm runs; exit code 3 when it does not."""
    info = Cluster().info()
    if json:
        print_json(facts(info))
    elif info is not None:
        print_line(
            f"the embedded Slurm is up: nodes {', '.join(info.nodes)}; partitions {', '.join(info.partitions)}; folder"
            f" {info.home}"
        )
    if info is None:
        raise SlurmUnreachable(NOT_RUNNING)


class Progress:
    """Prints each stage once, without the growing numbers after the colon."""

    def __init__(self) -> None:
        self._stage = ""

    def __call__(self, message: str) -> None:
        stage = message.partition(":")[0]
        if stage != self._stage:
            print_note(stage)
        self._stage = stage


def facts(info: ClusterInfo | None) -> dict[str, Any]:
    """A cluster as plain data, for ``--json``."""
    if info is None:
        return {"running": False}
    return {
        "running": True,
        "home": str(info.home),
        "conf": str(info.conf),
        "nodes": list(info.nodes),
        "partitions": list(info.partitions),
        "ports": info.ports,
        "pids": info.pids,
    }
