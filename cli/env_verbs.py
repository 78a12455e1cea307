"""`libra-hpc env`: what environments need besides ours."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Annotated

import typer
from libra_hpc_envs import install as installer

from libra_hpc.errors import OperationError, invalid

from .output import busy, print_line

LIBRARIES = {"verifiers": "verifiers.v1"}
"""What can be installed, and the module that must then import."""

app = typer.Typer(no_args_is_help=True)


@app.callback()
def env() -> None:
    """Stands before ``install``: typer makes a group of one command a plain verb."""


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
