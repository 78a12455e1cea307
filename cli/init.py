"""`libra-hpc init`: a site profile with what this cluster lists of itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from libra_hpc.config.site import OWN
from libra_hpc.errors import invalid
from libra_hpc.files import write_atomic
from libra_hpc.slurm.profile import profile_text
from libra_hpc.slurm.queue.command import slurm_environment
from libra_hpc.slurm.queue.query import partitions

from .output import print_line, print_note


def init(
    out: Annotated[Path | None, typer.Argument(metavar="FILE", help=f"Where to write it; default: {OWN}.")] = None,
    python: Annotated[str, typer.Option("--python", metavar="FILE", help="Interpreter of the compute nodes.")] = "",
    account: Annotated[str, typer.Option("--account", metavar="NAME", help="Slurm account.")] = "",
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    show: Annotated[bool, typer.Option("--print", help="Print it and write nothing.")] = False,
) -> None:
    environment = slurm_environment()
    if os.sep in python:
        python = str(Path(python).expanduser().absolute())
        if not os.access(python, os.X_OK):
            print_note(f"warning: {python} is no program here; the nodes must have one of that name")
    text = profile_text(partitions(environment), python, account)
    if show:
        print_line(text.rstrip("\n"))
        return
    path = (out or OWN).expanduser().absolute()
    if path.exists() and not force:
        raise invalid("FILE", str(path), "there is a profile already", "another file, --force or --print")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text.encode())
    print_line(f"wrote {path}; libra-hpc doctor examines the site with it")
