"""`libra-hpc list`: list the runs of a folder, with one question to the queue."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from libra_hpc.facts.rundir import RunDir
from libra_hpc.facts.series import first_and_last
from libra_hpc.facts.summary import duration, state_text
from libra_hpc.facts.sweep_record import read_member
from libra_hpc.slurm.queue.run_state import RunState

from . import jobs
from .output import busy, console, print_json, print_note, show, table
from .runs import RUNS, JsonOption, RunsOption, all_runs, identity, read_status, rewards

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
    # The run of a sweep has a long name.
    shown = table("run~", "job", "state", "attempt>", "step>", "reward>", "updated>")
    section = ""
    for fact in sorted(rows, key=lambda fact: fact["sweep"]):
        if fact["sweep"] != section:
            section = fact["sweep"]
            shown.add_section()
            shown.add_row(Text(f"sweep {section}", style="bold"))
        step = "-" if fact["step"] is None else f"{fact['step']}/{fact['steps']}"
        reward = "-" if fact["reward"] is None else f"{fact['reward_first']:.3f} → {fact['reward']:.3f}"
        updated = "-" if fact["updated_at"] is None else f"{duration(max(time.time() - fact['updated_at'], 0.0))} ago"
        state = state_text(fact["state"])
        shown.add_row(fact["run"], fact["job_id"] or "-", state, str(fact["attempt"] or "-"), step, reward, updated)
    show(shown)
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
        **identity(run, state),
        "sweep": "" if member is None else member.sweep,
        "step": None if status is None else status.step,
        "steps": None if status is None else status.steps,
        "reward_first": first,
        "reward": last,
        "updated_at": None if status is None else status.updated_at,
    }
