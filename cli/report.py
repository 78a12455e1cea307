"""`libra-hpc report`: one page about a run, for others."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from libra_hpc.errors import UserError, error_text
from libra_hpc.facts.rundir import RunDir
from libra_hpc.files import OWNER_ONLY, write_atomic
from libra_hpc.pictures.report_page import Standing, page

from . import jobs
from .output import busy, print_line
from .runs import RUNS, RunArgument, RunsOption, find_run


def report(
    run: RunArgument = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Where to write it; default: report.html of the run.")
    ] = None,
    runs: RunsOption = Path(RUNS),
) -> None:
    found = find_run(run, runs)
    found.resolved()
    where = found.report if out is None else out
    with busy("writing the report"):
        text = page(found, ending(found), time.time())
    try:
        write_atomic(where, text.encode(), OWNER_ONLY)
    except OSError as error:
        raise UserError(
            f"--out = {str(where)!r}: the page cannot be written ({error_text(error)}); valid: a file in a folder that"
            " you may write to."
        ) from None
    print_line(str(where.absolute()))


def ending(run: RunDir) -> Standing:
    """How the run stands."""
    now = jobs.state(run)
    return Standing(now.words, now.reason or str(run.read_json(run.result).get("message", "")), over=now.over)
