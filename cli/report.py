"""`libra-hpc report`: one page about a run, for others."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from libra_hpc.errors import UserError, error_text
from libra_hpc.files import write_atomic
from libra_hpc.pictures.report_page import Ending, page
from libra_hpc.telemetry.rundir import RunDir

from . import jobs
from .output import busy, print_line
from .runs import FINAL, RUNS, RunArgument, RunsOption, find_run, read_status


def report(
    run: RunArgument = None,
    html: Annotated[bool, typer.Option("--html", help="One self-contained HTML page; the only format.")] = True,
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
        write_atomic(where, text.encode())
    except OSError as error:
        raise UserError(
            f"--out = {str(where)!r}: the page cannot be written ({error_text(error)}); valid: a file in a folder that"
            " you may write to."
        ) from None
    print_line(str(where.absolute()))


def ending(run: RunDir) -> Ending:
    """How the run stands: by its last status, else by the queue, which knows of a job that was killed."""
    snapshot = read_status(run)
    if snapshot is not None and snapshot.state in ("completed", "failed"):
        return Ending(snapshot.state, snapshot.message, over=True)
    job = jobs.state(run)
    # Slurm may have queued a stopped run again.
    if snapshot is not None and snapshot.state in FINAL and job.state != "pending":
        return Ending(snapshot.state, snapshot.message, over=True)
    cause = job.reason or str(run.read_json(run.result).get("message", ""))
    if job.state in FINAL:
        return Ending(job.state, cause, over=True)
    if snapshot is None or job.state == "pending":
        return Ending("not queued" if not job.id else job.state, job.reason, over=False)
    return Ending(snapshot.state, snapshot.message if job.state == "running" else job.reason, over=False)
