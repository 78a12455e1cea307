"""`libra-hpc list`: list the runs of a folder, with one question to the queue."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.table import Table
from rich.text import Text

from libra_hpc.facts.phases import first_and_last
from libra_hpc.facts.rundir import RunDir
from libra_hpc.facts.summary import STATE_STYLES, duration
from libra_hpc.facts.sweep_record import read_member
from libra_hpc.slurm.queue.run_state import RunState

from . import jobs
from .output import busy, console, print_json, print_note, show
from .runs import RUNS, JsonOption, RunsOption, all_runs, attempt, job_id, read_status, rewards

PLAIN = ("running", "completed")
"""States without a reason to show, unless something is wrong."""


def list_runs(json: JsonOption = False, runs: RunsOption = Path(RUNS)) -> None:
    with busy("asking the queue"):
        rows = all_rows(all_runs(runs))
    if json:
        print_json(rows)
        return
    if not rows:
        print_note(f"no runs below {runs}/")
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    # The run of a sweep has a long name.
    table.add_column("run", overflow="fold")
    for name in ("job", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("attempt", "step", "reward", "updated"):
        table.add_column(name, no_wrap=True, justify="right")
    section = ""
    for fact in sorted(rows, key=lambda fact: fact["sweep"]):
        if fact["sweep"] != section:
            section = fact["sweep"]
            table.add_section()
            table.add_row(Text(f"sweep {section}", style="bold"))
        step = "-" if fact["step"] is None else f"{fact['step']}/{fact['steps']}"
        reward = "-" if fact["reward"] is None else f"{fact['reward_first']:.3f} → {fact['reward']:.3f}"
        updated = "-" if fact["updated_at"] is None else f"{duration(max(time.time() - fact['updated_at'], 0.0))} ago"
        state = Text(fact["state"].replace("_", " "), style=STATE_STYLES.get(fact["state"], "yellow"))
        table.add_row(fact["run"], fact["job_id"] or "-", state, str(fact["attempt"] or "-"), step, reward, updated)
    show(table)
    for fact in rows:
        if fact["reason"] and fact["state"] not in PLAIN:
            line = Text.assemble((f" {fact['run']}: ", "dim"), fact["reason"])
            line.truncate(console().width, overflow="ellipsis")
            show(line)


def all_rows(found: Sequence[RunDir]) -> list[dict[str, Any]]:
    """Facts of several runs, with one question to the queue."""
    states = jobs.states(found)
    return [row(run, states[str(run.path)]) for run in found]


def row(run: RunDir, state: RunState) -> dict[str, Any]:
    """Facts of one run: its state, and from its folder how far it is."""
    status = read_status(run)
    member = read_member(run)
    first, last = (None, None) if status is None else first_and_last(rewards(run), status.steps)
    return {
        "run": run.name,
        "path": str(run.path),
        "job_id": job_id(run),
        "cluster": jobs.cluster(run),
        "attempt": attempt(run),
        "sweep": "" if member is None else member.sweep,
        **msgspec.to_builtins(state),
        "step": None if status is None else status.step,
        "steps": None if status is None else status.steps,
        "reward_first": first,
        "reward": last,
        "updated_at": None if status is None else status.updated_at,
    }
