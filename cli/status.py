"""`libra-hpc status`: show one screen of a run, once or live."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from libra_hpc.telemetry.status import status_dict
from libra_hpc.telemetry.view import render

from . import jobs
from .follow import follow
from .output import print_json, print_line, show
from .runs import RUNS, JsonOption, RunArgument, RunsOption, find_run, read_status, rewards


def status(
    run: RunArgument = None,
    json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until the run ends.")] = False,
    runs: RunsOption = Path(RUNS),
) -> None:
    found = find_run(run, runs)
    found.resolved()
    if watch and not json:
        if follow(found) != "completed":
            raise typer.Exit(1)
        return
    snapshot = read_status(found)
    # The queue shows whether the job still runs, and whether a run that was stopped is queued again.
    job = None if snapshot is not None and snapshot.state in ("completed", "failed") else jobs.state(found)
    if json:
        value: dict[str, Any] = {"run": found.name, "path": str(found.path), "job": msgspec.to_builtins(job)}
        print_json({**value, "status": None if snapshot is None else status_dict(snapshot)})
        return
    if snapshot is not None:
        show(render(snapshot, now=time.time(), rewards=rewards(found)))
    if job is not None and not job.id:
        print_line(f"{found.name}: was never queued; files in {found.path}")
    elif job is not None and (snapshot is None or job.state != "running"):
        reason = f" ({job.reason})" if job.reason else ""
        print_line(f"{found.name}: job {job.id} is {job.state}{reason}; files in {found.path}")
