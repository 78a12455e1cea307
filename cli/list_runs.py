"""`libra-hpc list`: list the runs of a folder, with one question to the queue."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from libra_hpc.errors import invalid
from libra_hpc.facts.rundir import RunDir
from libra_hpc.facts.series import first_and_last
from libra_hpc.facts.status import dry_run, read_status
from libra_hpc.facts.summary import state_text
from libra_hpc.facts.sweep_record import read_member
from libra_hpc.slurm.queue.run_state import RunState, State

from . import jobs
from .output import busy, console, print_json, print_note, show, table
from .runs import RUNS, JsonOption, RunsOption, all_runs, created, identity, rewards

PLAIN = ("running", "completed")
"""States without a reason to show, unless something is wrong."""
STATES = get_args(State)
SORTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "submitted": lambda fact: fact["submitted_at"],
    "updated": lambda fact: fact["updated_at"] or 0.0,
    "reward": lambda fact: -math.inf if fact["reward"] is None else fact["reward"],
    "step": lambda fact: fact["step"] or 0,
    "run": lambda fact: fact["run"],
}
"""What ``--sort`` sorts by, the greatest last: there it is next to the prompt."""
UNITS = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
"""Seconds by the letter of ``--since``."""
COLUMNS = ("run", "job", "state", "attempt>", "step>", "reward>", "updated")
DISPENSABLE = ("attempt", "updated", "job", "reward", "step")
"""Left out one after the other where the terminal is too narrow."""
MISSING = ("", "-")
"""Texts of empty cells; a column of them is left out."""


def list_runs(
    json: JsonOption = False,
    state: Annotated[
        list[str], typer.Option("--state", metavar="STATE", help="Only runs in this state; repeatable.")
    ] = [],  # noqa: B006
    since: Annotated[
        str, typer.Option("--since", metavar="WHEN", help="Only runs submitted or updated since: 12h, 7d, 2026-01-31.")
    ] = "",
    sort: Annotated[
        str, typer.Option("--sort", metavar="|".join(SORTS), help="What to sort by, the greatest last.")
    ] = "submitted",
    runs: RunsOption = Path(RUNS),
) -> None:
    if sort not in SORTS:
        raise invalid("--sort", sort, "unknown value", list(SORTS))
    states, after = [checked_state(one) for one in state], time_of(since, time.time()) if since else 0.0
    with busy("asking the queue"):
        found = all_runs(runs)
        rows = chosen_rows(found, states, after)
    rows.sort(key=SORTS[sort])
    if json:
        print_json(rows)
    elif rows:
        show_rows(rows, grouped=sort == "submitted")
    elif found:
        print_note(f"none of {len(found)} runs matches")
    else:
        print_note(f"no runs below {runs}/")


def chosen_rows(found: Sequence[RunDir], states: Sequence[str], after: float) -> list[dict[str, Any]]:
    """Facts of the runs in one of ``states`` (empty: all) with a change since ``after``.

    The queue is asked once, and about no run without a change.
    """
    chosen = [run for run in found if last_change(run) >= after]
    answers = jobs.states(chosen)
    rows = [row(run, answers[str(run.path)]) for run in chosen]
    return [row for row in rows if not states or row["state"] in states]


def checked_state(state: str) -> str:
    """A state as the facts have it; raises `UserError` for an unknown one."""
    word = state.replace(" ", "_").replace("-", "_")
    if word not in STATES:
        raise invalid("--state", state, "no state of a run", STATES)
    return word


def time_of(since: str, now: float) -> float:
    """Epoch seconds of ``--since``; raises `UserError` for anything else."""
    number, unit = since[:-1], since[-1:]
    if number.isascii() and number.isdigit() and unit in UNITS:
        return now - int(number) * UNITS[unit]
    try:
        return datetime.fromisoformat(since).timestamp()
    except (ValueError, OverflowError):
        valid = "a number with m, h, d or w, such as 7d, or a date such as 2026-01-31"
        raise invalid("--since", since, "malformed", valid) from None


def last_change(run: RunDir) -> float:
    """Epoch seconds of the last submission or status."""
    try:
        return max(created(run), run.status.stat().st_mtime)
    except OSError:
        return created(run)


def row(run: RunDir, state: RunState) -> dict[str, Any]:
    """Facts of one run: its state, and from its folder how far it is."""
    # Also of an earlier attempt: a resume that never started takes nothing back.
    status, member = read_status(run, 0), read_member(run)
    first, last = (None, None) if status is None else first_and_last(rewards(run), status.steps)
    return {
        **identity(run, state),
        "sweep": "" if member is None else member.sweep,
        "submitted_at": created(run),
        "step": None if status is None else status.step,
        "steps": None if status is None else status.steps,
        "speedup": 1.0 if status is None else status.speedup,
        "reward_first": first,
        "reward": last,
        "updated_at": None if status is None else status.updated_at,
    }


def show_rows(rows: Sequence[dict[str, Any]], *, grouped: bool) -> None:
    """The table, runs without a sweep first, and below it reasons."""
    now = time.time()
    cells = [(fact["sweep"] if grouped else "", cells_of(fact, now)) for fact in rows]
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
        "reward": "-" if fact["reward"] is None else f"{fact['reward_first']:.3f} → {fact['reward']:.3f}",
        "updated": "-" if fact["updated_at"] is None else age(now - fact["updated_at"]),
    }


def age(seconds: float) -> str:
    """Seconds as one number with its unit: ``42 s``, ``7 min``, ``31 h``, ``5 d``."""
    for name, unit in (("s", 1.0), ("min", 60.0), ("h", 3600.0)):
        if seconds < 100.0 * unit:
            return f"{max(seconds, 0.0) / unit:.0f} {name} ago"
    return f"{seconds / UNITS['d']:.0f} d ago"
