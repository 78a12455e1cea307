"""`libra-hpc cancel`: have a run save and stop, or end its job at once."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from libra_hpc.errors import error_text
from libra_hpc.facts.rundir import RunDir
from libra_hpc.files import write_atomic
from libra_hpc.slurm.queue.run_state import RunState

from . import jobs
from .follow import job_line
from .output import busy, print_json, print_line, print_note
from .runs import RUNS, JsonOption, RunArgument, RunsOption, find_run, job_id

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
    queue, job = jobs.JobQueue(), job_id(found)
    state, message = jobs.state(found, queue), ""
    if not state.over and not now and state.state == "silent":
        print_note(f"job {job} is not asked to save: {state.reason}")
    elif not state.over and not now and state.state == "running":
        message = ask(found, job, queue)
        if message and not jobs.state(found, queue).over:
            # Slurm, or the run itself, has queued it again.
            jobs.cancel(found)
    cancelled = not state.over and (bool(message) or jobs.cancel(found))
    if json:
        facts = {"cancelled": cancelled, "state": "cancelled" if cancelled else state.state, "message": message}
        print_json({"run": found.name, "job_id": job, **facts})
    else:
        _show(found, job, state, cancelled=cancelled, message=message)


def _show(found: RunDir, job: str, state: RunState, *, cancelled: bool, message: str) -> None:
    """What became of the run, in one line."""
    if state.state == "never_queued":
        print_line(f"{found.name}: was never queued")
    elif not cancelled:
        print_line(f"{found.name}: {job_line(job, state)}; nothing to cancel")
    else:
        resume = f"`libra-hpc submit --resume {found.name}`"
        further = f"{resume} continues" if found.latest_checkpoint() else "it has no checkpoint"
        print_line(f"{found.name}: job {job} cancelled; {f'{message}; ' if message else ''}{further}")


def ask(run: RunDir, job: str, queue: jobs.JobQueue) -> str:
    """Ask for a checkpoint and the end, and wait for both; what the run answers, empty when it does not.

    An interrupt leaves the request standing.
    """
    try:
        write_atomic(run.stop, b"{}\n")
    except OSError as error:
        print_note(f"the run cannot be asked to save: {run.stop}: {error_text(error)}")
        return ""
    print_note(f"job {job} saves at its next step boundary; Ctrl-C leaves it to that, --now ends it at once")
    deadline, asked_at = time.monotonic() + PATIENCE_S, time.monotonic()
    with busy("saving"):
        while time.monotonic() < deadline:
            if result := run.read_json(run.result):
                _leaves(run, queue)
                return str(result.get("message", "")) or "it has ended"
            if time.monotonic() - asked_at > ASK_S:
                asked_at = time.monotonic()
                state = jobs.state(run, queue)
                if state.over:
                    return state.reason or f"it is {state.words}"
                if state.state == "silent":
                    print_note(f"job {job} does not save: {state.reason}; it is ended now")
                    return ""
            time.sleep(POLL_S)
    return ""


def _leaves(run: RunDir, queue: jobs.JobQueue) -> None:
    """Return once the job of a run that has ended is over."""
    deadline = time.monotonic() + LEAVES_S
    while jobs.state(run, queue).state == "running" and time.monotonic() < deadline:
        time.sleep(2.0 * POLL_S)
