"""`libra-hpc config show`: the run file with every default filled in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from libra_hpc.config.load import load_run_file

from .output import say_json

app = typer.Typer(help="Look at configuration.", no_args_is_help=True)

RunFileArgument = Annotated[Path, typer.Argument(metavar="RUN.toml", help="Run file.")]
OverrideOption = Annotated[list[str], typer.Option("-o", "--override", metavar="KEY=VALUE", help="Change one key, e.g. -o algorithm.eta=2; repeatable.")]


@app.callback()
def config() -> None:
    """Look at configuration."""


@app.command("show")
def show(run_file: RunFileArgument, override: OverrideOption = []) -> None:  # noqa: B006
    """Print the resolved configuration as JSON; checks the schema only."""
    say_json(load_run_file(run_file, override).model_dump())
