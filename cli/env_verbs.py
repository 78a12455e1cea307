"""`libra-hpc env`: what environments need besides ours, and boxes of this machine and of the cluster's nodes."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Annotated

import typer
from libra_hpc_envs import install as installer

from libra_hpc.boxes.box_probe import TriedBox, tried_all
from libra_hpc.config.load import with_values
from libra_hpc.errors import OperationError, UserError, invalid

from .check import load, site_config
from .job_wait import on_a_node
from .output import busy, print_json, print_line, show, table
from .runs import JsonOption

LIBRARIES = {"verifiers": "verifiers.v1"}
"""What can be installed, and the module that must then import."""

HERE = "this machine"
NODE = {"components.env.nodes": 1, "components.env.cpus": 1, "components.env.mem": "1G", "components.env.gpus": 0}
"""What the trial needs of a node."""
TIME_LIMIT = "00:05:00"

app = typer.Typer(no_args_is_help=True)


@app.command("install", help="Make the Python environment of a library that cannot share ours.")
def install(
    library: Annotated[str, typer.Argument(metavar="LIBRARY", help="verifiers")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where all nodes see it.")],
    wheels: Annotated[
        Path | None, typer.Option("--wheels", metavar="FOLDER", help="All packages as files; no index is asked.")
    ] = None,
    index: Annotated[str, typer.Option("--index", metavar="URL", help="Package index; default: pip's own.")] = "",
    more: Annotated[
        list[str], typer.Option("--with", metavar="PACKAGE", help="Further package, such as a taskset; repeatable.")
    ] = [],  # noqa: B006
) -> None:
    if library not in LIBRARIES:
        raise invalid("LIBRARY", library, "unknown", LIBRARIES)
    if wheels is not None and not wheels.is_dir():
        raise invalid("--wheels", str(wheels), "no such folder", "a folder of wheels, as pip download makes it")
    source = ["--no-index", "--find-links", str(wheels)] if wheels else ["--index-url", index] if index else []
    packages, started = [*installer.requirements((library,)), *more], time.monotonic()
    print_line(f"installing {len(packages)} packages into {folder}")
    try:
        with busy("making the environment") as status:
            python = installer.make_venv(folder.absolute())
            installer.pip(python, *source, *packages, progress=lambda line: status.update(line.strip()[:70]))
    except installer.InstallError as error:
        raise OperationError(f"{str(error)[:1].upper()}{str(error)[1:].rstrip('.')}.") from error
    tried = subprocess.run([python, "-I", "-c", f"import {LIBRARIES[library]}"], capture_output=True, text=True)
    if tried.returncode:
        raise OperationError(f"{library} is installed and does not import: {tried.stderr.strip().splitlines()[-1]}.")
    print_line(f"{folder / 'bin' / 'python'} has {library} after {time.monotonic() - started:.0f} s")


@app.command("probe", help="Try boxes: which kind works, what a start and a command cost, and why others do not work.")
def probe_boxes(
    run_file: Annotated[
        Path | None, typer.Argument(metavar="RUN_FILE", help="Its [env]. Default: that of the site profile.")
    ] = None,
    partition: Annotated[
        list[str], typer.Option("--partition", metavar="NAME", help="On a node of it, in a job; repeatable.")
    ] = [],  # noqa: B006
    json: JsonOption = False,
) -> None:
    config = site_config() if run_file is None else load(run_file, [])
    rows: list[tuple[str, TriedBox]] = []
    for name in partition:
        there = with_values(config, NODE | {"components.env.partition": name})
        try:
            found = on_a_node(
                tried_all, config.env, config=there, component="env", name="libra-boxes", time_limit=TIME_LIMIT
            )
        except (UserError, OperationError) as error:
            found = [("-", str(error), 0.0, 0.0)]
        rows += [(name, TriedBox(*one)) for one in found]
    if not partition:
        rows = [(HERE, TriedBox(*one)) for one in tried_all(config.env)]
    if json:
        print_json([{"where": where, "works": not one.why, **one._asdict()} for where, one in rows])
        return
    made = table("where", "box", "works", "~", box=None)
    for where, one in rows:
        made.add_row(where, one.sandbox, "no" if one.why else "yes", one.why or one.cost)
    show(made)
