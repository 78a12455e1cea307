"""`libra-hpc list`: list the runs of a folder, without a query to the queue."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from libra_hpc.telemetry.rundir import RunDir
from libra_hpc.telemetry.summary import STATE_STYLES, duration

from .output import print_json, print_note, show
from .runs import FINAL, RUNS, JsonOption, RunsOption, all_runs, attempt, job_id, read_status

SILENT_S = 60.0
"""Age of the status from which an unfinished run is shown as silent."""


def list_runs(json: JsonOption = False, runs: RunsOption = Path(RUNS)) -> None:
    """List runs, oldest first."""
    rows = [row(run) for run in all_runs(runs)]
    if json:
        print_json(rows)
        return
    if not rows:
        print_note(f"no runs below {runs}/")
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("run", "job", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("attempt", "step", "reward", "updated"):
        table.add_column(name, no_wrap=True, justify="right")
    for fact in rows:
        step = "-" if fact["step"] is None else f"{fact['step']}/{fact['steps']}"
        reward = "-" if not fact["step"] else f"{fact['reward_first']:.3f} → {fact['reward']:.3f}"
        updated = "-" if fact["updated_at"] is None else f"{duration(max(time.time() - fact['updated_at'], 0.0))} ago"
        state = Text(fact["state"], style=STATE_STYLES.get(fact["state"], "yellow"))
        table.add_row(fact["run"], fact["job_id"] or "-", state, str(fact["attempt"] or "-"), step, reward, updated)
    show(table)


def row(run: RunDir) -> dict[str, Any]:
    """Facts of one run, from its folder."""
    status = read_status(run)
    facts: dict[str, Any] = {"run": run.name, "path": str(run.path), "job_id": job_id(run), "attempt": attempt(run)}
    if status is None:
        return {
            **facts,
            "state": "queued" if job_id(run) else "new",
            **dict.fromkeys(("step", "steps", "reward_first", "reward", "updated_at")),
        }
    silent = status.state not in FINAL and time.time() - status.updated_at > SILENT_S
    shown = {
        "step": status.step,
        "steps": status.steps,
        "reward_first": status.reward_first,
        "reward": status.reward,
        "updated_at": status.updated_at,
    }
    return {**facts, "state": "silent" if silent else status.state, **shown}
