"""`libra-hpc cancel`: have a run save and stop, or end its job at once."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from libra_hpc.errors import error_text
from libra_hpc.files import write_atomic
from libra_hpc.telemetry.rundir import RunDir

from . import jobs
from .output import busy, print_json, print_line, print_note
from .runs import FINAL, RUNS, JsonOption, RunArgument, RunsOption, find_run, read_status

POLL_S = 0.5
ASK_S = 15.0
"""Between two questions to the queue: the run itself tells of its end."""
LEAVES_S = 60.0
"""For the other ranks of a run that has ended, so that it can be resumed at once; two seconds are the rule."""
PATIENCE_S = 660.0
"""For a checkpoint at the next step boundary.  Rank 0 gives it 600 s; a minute more for its own end."""


def cancel(
    run: RunArgument = None,
    now: Annotated[bool, typer.Option("--now", help="End the job at once; a checkpoint has 4 s.")] = False,
    json: JsonOption = False,
    runs: RunsOption = Path(RUNS),
) -> None:
    found = find_run(run, runs)
    job = jobs.state(found)
    over, message = job.state in FINAL or not job.id, ""
    if not over and not now and asks(found, job):
        message = ask(found, job.id)
    if not over and not message:
        jobs.cancel(found)
    if json:
        state = job.state if over else "cancelled"
        print_json({"run": found.name, "job_id": job.id, "cancelled": not over, "state": state, "message": message})
    elif over:
        print_line(f"{found.name}: {f'job {job.id} is {job.state} already' if job.id else 'was never queued'}")
    else:
        resume = f"`libra-hpc submit --resume {found.name}`"
        further = f"{resume} continues" if found.latest_checkpoint() else "it has no checkpoint"
        print_line(f"{found.name}: job {job.id} cancelled; {f'{message}; ' if message else ''}{further}")


def asks(run: RunDir, job: jobs.JobView) -> bool:
    """Whether a run can be asked: rank 0 is there and trains."""
    status = read_status(run)
    return job.state == "running" and status is not None and status.state == "running"


def ask(run: RunDir, job_id: str) -> str:
    """Ask for a checkpoint and the end, and wait for both; what the run answers, empty when it does not.

    An interrupt leaves the request standing.
    """
    try:
        write_atomic(run.stop, b"{}\n")
    except OSError as error:
        print_note(f"the run cannot be asked to save: {run.stop}: {error_text(error)}")
        return ""
    print_note(f"job {job_id} saves at its next step boundary; Ctrl-C leaves it to that, --now ends it at once")
    deadline, asked_at = time.monotonic() + PATIENCE_S, time.monotonic()
    with busy("saving"):
        while time.monotonic() < deadline:
            if result := run.read_json(run.result):
                _leaves(run)
                return str(result.get("message", "")) or "it has ended"
            if time.monotonic() - asked_at > ASK_S:
                asked_at = time.monotonic()
                if jobs.state(run).state in FINAL:
                    return "its job has ended"
            time.sleep(POLL_S)
    return ""


def _leaves(run: RunDir) -> None:
    """Return once the job of a run that has ended is over."""
    deadline = time.monotonic() + LEAVES_S
    while jobs.state(run).state == "running" and time.monotonic() < deadline:
        time.sleep(2.0 * POLL_S)
