"""`libra-hpc status`: show one screen of a run, once or live."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from libra_hpc.facts.columns import as_json
from libra_hpc.facts.rundir import RunDir
from libra_hpc.facts.summary import evaluation_results
from libra_hpc.facts.view import StatusScreen

from . import jobs
from .follow import follow, job_line
from .output import print_json, print_line, show
from .runs import (
    RUNS,
    JsonOption,
    RunArgument,
    RunsOption,
    find_run,
    identity,
    job_id,
    read_status,
    rewards,
    with_state,
)


def facts(run: RunDir) -> dict[str, Any]:
    """Which run it is, how it stands, and the last snapshot of its status, as JSON."""
    state, snapshot = jobs.state(run), read_status(run)
    shown = None if snapshot is None else as_json(with_state(snapshot, state))
    evaluations = msgspec.to_builtins(evaluation_results(run))
    return {**identity(run, state), "status": shown, "evaluations": evaluations}


def status(
    run: RunArgument = None,
    json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until the run ends.")] = False,
    runs: RunsOption = Path(RUNS),
) -> None:
    found = find_run(run, runs)
    found.resolved()
    if watch and not json:
        if follow(found).state != "completed":
            raise typer.Exit(1)
        return
    if json:
        print_json(facts(found))
        return
    state, snapshot = jobs.state(found), read_status(found)
    if found.policies.exists():
        # An evaluation has nothing of the screen of a run.
        snapshot = None
    if snapshot is not None:
        show(StatusScreen(with_state(snapshot, state), now=jobs.clock(found, time.time()), rewards=rewards(found)))
    if state.state == "never_queued":
        print_line(f"{found.name}: was never queued; files in {found.path}")
    elif snapshot is None or state.state != "running":
        where = f" on {name}" if (name := jobs.cluster(found)) else ""
        # The screen has the reason.
        line = state if snapshot is None else msgspec.structs.replace(state, reason="")
        print_line(f"{found.name}: {job_line(job_id(found) + where, line)}; files in {found.path}")
    for result in evaluation_results(found):
        print_line(f"{found.name}: evaluation {result.words()}")
