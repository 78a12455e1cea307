"""`libra-hpc config`: show a run file with every default, and the reference of all keys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from libra_hpc.config.load import load_run_file
from libra_hpc.config.reference import as_records, as_text, select, tables

from .output import print_json, print_line
from .runs import JsonOption

app = typer.Typer(help="Show a run file with its defaults, or the keys of run files.", no_args_is_help=True)

RunFileArgument = Annotated[Path, typer.Argument(metavar="RUN.toml", help="Run file.")]
OverrideOption = Annotated[
    list[str],
    typer.Option("-o", "--override", metavar="KEY=VALUE", help="Change one key, e.g. -o algorithm.eta=2; repeatable."),
]


@app.callback()
def config() -> None:
    """Show a run file with its defaults, or the keys of run files."""


@app.command("show")
def show(run_file: RunFileArgument, override: OverrideOption = []) -> None:  # noqa: B006
    """Print the resolved configuration as JSON; checks the schema only."""
    print_json(load_run_file(run_file, override).model_dump())


@app.command("keys")
def keys(
    key: Annotated[str, typer.Argument(metavar="KEY", help="A section or a key, e.g. rollout or rollout.tp.")] = "",
    json: JsonOption = False,
) -> None:
    """Print what the keys of a run file accept, their defaults and what they are for."""
    found = select(key) if key else tables()
    if json:
        print_json(as_records(found))
    else:
        print_line(as_text(found).rstrip("\n"))
