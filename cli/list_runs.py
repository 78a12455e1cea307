"""`libra-hpc list`: list the runs of a folder, with one question to the queue."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from libra_hpc.telemetry.rundir import RunDir
from libra_hpc.telemetry.summary import STATE_STYLES, duration
from libra_hpc.telemetry.sweep_record import read_member

from . import jobs
from .output import print_json, print_note, show
from .runs import FINAL, RUNS, JsonOption, RunsOption, all_runs, attempt, job_id, read_status

SILENT_S = 60.0
"""Age of the status from which an unfinished run is shown as silent."""


def list_runs(json: JsonOption = False, runs: RunsOption = Path(RUNS)) -> None:
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
        reward = "-" if not fact["step"] else f"{fact['reward_first']:.3f} → {fact['reward']:.3f}"
        updated = "-" if fact["updated_at"] is None else f"{duration(max(time.time() - fact['updated_at'], 0.0))} ago"
        state = Text(fact["state"], style=STATE_STYLES.get(fact["state"], "yellow"))
        table.add_row(fact["run"], fact["job_id"] or "-", state, str(fact["attempt"] or "-"), step, reward, updated)
    show(table)


def all_rows(found: Sequence[RunDir]) -> list[dict[str, Any]]:
    """Facts of several runs, with one question to the queue."""
    views = jobs.states([run for run in found if not settled(run)])
    return [row(run, views.get(str(run.path))) for run in found]


def settled(run: RunDir) -> bool:
    """Whether no queue can say more of the run than its own folder: it is over, and no job will go on with it."""
    status = read_status(run)
    return not job_id(run) or (status is not None and status.state in ("completed", "failed"))


def row(run: RunDir, job: jobs.JobView | None) -> dict[str, Any]:
    """Facts of one run, from its folder and, where it is not settled, from the queue."""
    status = read_status(run)
    facts: dict[str, Any] = {"run": run.name, "path": str(run.path), "job_id": job_id(run), "attempt": attempt(run)}
    member = read_member(run)
    facts["sweep"] = "" if member is None else member.sweep
    if status is None:
        return {
            **facts,
            "state": "new" if not job_id(run) else "queued" if job is None else job.state,
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
    state = "silent" if silent else status.state
    if job is not None and job.state == "pending":
        state = "requeued"
    elif job is not None and job.state in FINAL and status.state not in FINAL:
        state = job.state
    return {**facts, "state": state, **shown}
