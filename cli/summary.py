"""`libra-hpc summary`: show the results of a run."""

from __future__ import annotations

from pathlib import Path

import msgspec

from libra_hpc.errors import UserError
from libra_hpc.facts import series
from libra_hpc.facts.columns import as_json
from libra_hpc.facts.rundir import RunDir
from libra_hpc.facts.summary import render_summary, summarise

from . import jobs
from .output import busy, print_json, print_note, show
from .runs import RUNS, JsonOption, RunArgument, RunsOption, find_run


def summary(run: RunArgument = None, json: JsonOption = False, runs: RunsOption = Path(RUNS)) -> None:
    found = find_run(run, runs)
    found.resolved()
    show_end(found, jobs.state(found).state, json=json)


def show_end(run: RunDir, state: str, *, json: bool = False) -> None:
    """Draw a run and print its summary, with the state that its job has."""
    draw(run)
    facts = msgspec.structs.replace(summarise(run), state=state)
    if json:
        print_json(as_json(facts))
    else:
        show(render_summary(facts))


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
