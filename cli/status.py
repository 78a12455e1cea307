"""`libra-hpc status`: show one screen of a run, once or live; of an ended one, its summary."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from libra_hpc.errors import UserError
from libra_hpc.facts import series
from libra_hpc.facts.columns import as_json
from libra_hpc.facts.rundir import RunDir
from libra_hpc.facts.summary import evaluation_results, render_summary, summarise
from libra_hpc.facts.view import status_screen
from libra_hpc.slurm.queue.run_state import RunState

from . import jobs
from .follow import follow, job_line
from .output import busy, print_json, print_line, print_note, show
from .runs import RUNS, JsonOption, RunArgument, RunsOption, find_run, identity, job_id, read_status, with_state


def facts(run: RunDir) -> dict[str, Any]:
    """Which run it is, how it stands, the last snapshot of its status, and the totals of an ended one, as JSON."""
    state, snapshot = jobs.state(run), read_status(run)
    shown = None if snapshot is None else as_json(with_state(snapshot, state))
    evaluations = msgspec.to_builtins(evaluation_results(run))
    totals = as_json(summarise(run)) if state.over else None
    return {**identity(run, state), "status": shown, "evaluations": evaluations, "summary": totals}


def status(
    run: RunArgument = None,
    json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until the run ends.")] = False,
    nodes: Annotated[bool, typer.Option("--nodes", help="A row for every node, however many.")] = False,
    runs: RunsOption = Path(RUNS),
) -> None:
    found = find_run(run, runs)
    found.resolved()
    if json:
        print_json(facts(found))
        return
    state = follow(found) if watch else jobs.state(found)
    show_run(found, state, nodes)
    if watch and state.state != "completed":
        raise typer.Exit(1)


def show_run(run: RunDir, state: RunState, every_node: bool = False) -> None:
    """Show a run: its last snapshot, or its summary once it is over."""
    # An evaluation has nothing of these screens.
    trains = not run.policies.exists()
    if trains and state.over and run.status.exists():
        draw(run)
        show(render_summary(run, summarise(run), state.state, state.reason))
        return
    snapshot = read_status(run) if trains else None
    if snapshot is not None:
        known, now = with_state(snapshot, state), jobs.clock(run, time.time())
        show(status_screen(known, now=now, steps=series.steps(run), every_node=every_node))
    if state.state == "never_queued":
        print_line(f"{run.name}: was never queued; files in {run.path}")
    elif snapshot is None or state.state != "running":
        where = f" on {name}" if (name := jobs.cluster(run)) else ""
        # The screen has the reason.
        line = state if snapshot is None else msgspec.structs.replace(state, reason="")
        print_line(f"{run.name}: {job_line(job_id(run) + where, line)}; files in {run.path}")
    for result in evaluation_results(run):
        print_line(f"{run.name}: evaluation {result.words()}")


def draw(run: RunDir) -> None:
    """Write the picture of a run that has a step; a folder that cannot be written is only a note."""
    if not series.steps(run):
        return
    from libra_hpc.pictures.report_charts import draw_run

    try:
        with busy("drawing"):
            draw_run(run, run.summary_picture)
    except UserError as error:
        print_note(f"no picture: {error}")
