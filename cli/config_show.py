"""`libra-hpc config`: the merged configuration, and what each key means."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from libra_hpc.config.load import load_resolved, load_run_file
from libra_hpc.config.reference import as_records, as_text, select, tables
from libra_hpc.config.run import RunConfig
from libra_hpc.config.run_file_text import DEFAULTS, as_toml, values
from libra_hpc.config.site import dotted, site_profile
from libra_hpc.errors import UserError

from .output import print_json, print_line
from .runs import RUNS, JsonOption, find_run, run_names

app = typer.Typer(no_args_is_help=True)


def keys(incomplete: str) -> list[str]:
    """Sections and keys that a shell offers."""
    sections = {key.rpartition(".")[0]: None for key in DEFAULTS}
    return [name for name in (*sections, *DEFAULTS) if name.startswith(incomplete)]


def assignments(incomplete: str) -> list[str]:
    """Beginnings of an override that a shell offers."""
    return [f"{key}=" for key in DEFAULTS if key.startswith(incomplete)]


def run_files(ctx: typer.Context, incomplete: str) -> list[str]:
    """Run files of the working folder and runs, where either may be named."""
    return [
        *run_names(ctx, incomplete),
        *(str(path) for path in sorted(Path().glob(f"{glob.escape(incomplete)}*.toml"))),
    ]


RunFileArgument = Annotated[Path, typer.Argument(metavar="RUN.toml", help="Run file.")]
OverrideOption = Annotated[
    list[str],
    typer.Option(
        "-o",
        "--override",
        metavar="KEY=VALUE",
        help="Change one key, e.g. -o algorithm.eta=2; repeatable.",
        autocompletion=assignments,
    ),
]
EXECUTORS, ENGINES = ("auto", "slurm", "local"), ("real", "simulated")
ExecutorOption = Annotated[
    str | None, typer.Option("--executor", metavar="|".join(EXECUTORS), help="Where to run; default: the run file's.")
]
EngineOption = Annotated[
    str | None,
    typer.Option(
        "--engine",
        metavar="|".join(ENGINES),
        help="simulated: a dry run with simulated engines; default: the run file's.",
    ),
]


def with_options(overrides: Sequence[str], executor: str | None, engine: str | None) -> list[str]:
    """``overrides``, and those that the options `ExecutorOption` and `EngineOption` stand for."""
    options = {"slurm.executor": executor, "run.engine": engine}
    return [*overrides, *(f"{key}={value}" for key, value in options.items() if value)]


@app.command("show")
def show(
    wanted: Annotated[
        str, typer.Argument(metavar="RUN.toml|RUN", help="Run file, or a run.", autocompletion=run_files)
    ],
    override: OverrideOption = [],  # noqa: B006
    toml: Annotated[bool, typer.Option("--toml", help="Print a run file, without the defaults.")] = False,
    json: JsonOption = False,
) -> None:
    """Print the merged configuration, as JSON (the default) or as a run file; checks the schema only."""
    if toml and json:
        raise UserError("--toml and --json are two forms of one output; give one of them.")
    found = resolve(wanted, override)
    if toml:
        print_line(as_toml(found, dotted(site_profile())))
    else:
        print_json(found.as_data())


@app.command("explain")
def explain(
    key: Annotated[
        str, typer.Argument(metavar="KEY", help="A section or a key, e.g. rollout or rollout.tp.", autocompletion=keys)
    ] = "",
    run: Annotated[
        str,
        typer.Option(
            "--run",
            metavar="RUN.toml|RUN",
            help="With the present value in a run file or a run.",
            autocompletion=run_files,
        ),
    ] = "",
    override: OverrideOption = [],  # noqa: B006
    json: JsonOption = False,
) -> None:
    """Explain keys of a run file: valid values, default, meaning, where they may stand, and their present value."""
    found = select(key) if key else tables()
    if override and not run:
        raise UserError("-o changes a value of --run, which is not given.")
    present = values(resolve(run, override)) if run else None
    if json:
        print_json(as_records(found, present))
    else:
        print_line(as_text(found, present).rstrip("\n"))


def resolve(wanted: str, overrides: list[str]) -> RunConfig:
    """The configuration of a run file over the site profile, or of a run; raises `UserError`."""
    path = Path(wanted)
    if os.path.isfile(path) or path.suffix == ".toml":
        return load_run_file(path, overrides, site_profile())
    run = find_run(wanted, Path(RUNS))
    if overrides:
        raise UserError(f"-o {overrides[0]!r}: it changes a run file, and {run.name} is a run.")
    return load_resolved(run.readable_config)
