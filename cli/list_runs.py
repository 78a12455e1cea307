"""`libra-hpc list`: list the runs of a folder, with one question to the queue."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from libra_hpc.facts.rundir import RunDir
from libra_hpc.facts.series import first_and_last, short_duration
from libra_hpc.facts.status import dry_run, read_status
from libra_hpc.facts.summary import state_text
from libra_hpc.facts.sweep_record import read_member
from libra_hpc.slurm.queue.run_state import RunState

from . import jobs
from .output import busy, console, print_json, print_note, show, table
from .runs import RUNS, JsonOption, RunsOption, all_runs, created, identity, rewards

PLAIN = ("running", "completed")
"""States without a reason to show, unless something is wrong."""
COLUMNS = ("run", "job", "state", "attempt>", "step>", "reward>", "updated")
DISPENSABLE = ("attempt", "updated", "job", "reward", "step")
"""Left out one after the other where the terminal is too narrow."""
MISSING = ("", "-")
"""Texts of empty cells; a column of them is left out."""


def list_runs(json: JsonOption = False, runs: RunsOption = Path(RUNS)) -> None:
    with busy("asking the queue"):
        found = all_runs(runs)
        answers = jobs.states(found)
        rows = [row(run, answers[str(run.path)]) for run in found]
    if json:
        print_json(rows)
    elif rows:
        show_rows(rows)
    else:
        print_note(f"no runs below {runs}/")


def row(run: RunDir, state: RunState) -> dict[str, Any]:
    """Facts of one run: its state, and from its folder how far it is."""
    # Also of an earlier attempt: a resume that never started takes nothing back.
    status, member = read_status(run, 0), read_member(run)
    return {
        **identity(run, state),
        "sweep": "" if member is None else member.sweep,
        "submitted_at": created(run),
        "step": None if status is None else status.step,
        "steps": None if status is None else status.steps,
        "speedup": 1.0 if status is None else status.speedup,
        "reward": None if status is None else first_and_last(rewards(run))[1],
        "updated_at": None if status is None else status.updated_at,
    }


def show_rows(rows: Sequence[dict[str, Any]]) -> None:
    """The table, runs without a sweep first, and below it reasons."""
    now = time.time()
    cells = [(fact["sweep"], cells_of(fact, now)) for fact in rows]
    cells.sort(key=lambda row: row[0])
    shown = [name for name in COLUMNS if any(str(row[name.rstrip(">")]) not in MISSING for _, row in cells)]
    for less in range(len(DISPENSABLE) + 1):
        made = runs_table(cells, [name for name in shown if name.rstrip(">") not in DISPENSABLE[:less]])
        wide = console().options.update(max_width=1000)
        if Measurement.get(console(), wide, made).maximum <= console().width:
            break
    show(made)
    for fact in rows:
        if fact["reason"] and fact["state"] not in PLAIN:
            line = Text.assemble((f" {fact['run']}: ", "dim"), fact["reason"])
            line.truncate(console().width, overflow="ellipsis")
            show(line)


def runs_table(rows: Sequence[tuple[str, Mapping[str, str | Text]]], columns: Sequence[str]) -> Table:
    """Sweeps and texts by column as a table with a heading for every sweep."""
    made = table(*columns)
    for sweep, group in groupby(rows, key=lambda row: row[0]):
        if sweep:
            made.add_section()
            made.add_row(Text(f"sweep {sweep}", style="bold"))
        for _, cells in group:
            made.add_row(*(cells[name.rstrip(">")] for name in columns))
    return made


def cells_of(fact: dict[str, Any], now: float) -> dict[str, str | Text]:
    """The texts of a row of `COLUMNS`."""
    return {
        "run": fact["run"],
        "job": fact["job_id"] or "-",
        "state": Text.assemble(state_text(fact["state"]), dry_run(fact["speedup"])),
        "attempt": str(fact["attempt"]) if fact["attempt"] > 1 else "-",
        "step": "-" if fact["step"] is None else f"{fact['step']}/{fact['steps']}",
        "reward": "-" if fact["reward"] is None else f"{fact['reward']:.3f}",
        "updated": "-" if fact["updated_at"] is None else f"{short_duration(now - fact['updated_at'])} ago",
    }
