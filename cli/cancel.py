"""`libra-hpc cancel`: cancel a run's job."""

from __future__ import annotations

from pathlib import Path

from . import jobs
from .output import print_json, print_line
from .runs import FINAL, RUNS, JsonOption, RunArgument, RunsOption, find_run


def cancel(run: RunArgument = None, json: JsonOption = False, runs: RunsOption = Path(RUNS)) -> None:
    """Cancel the job of a run; a job that is over already is no error."""
    found = find_run(run, runs)
    job = jobs.state(found)
    over = job.state in FINAL or not job.id
    if not over:
        jobs.cancel(found)
    if json:
        print_json(
            {"run": found.name, "job_id": job.id, "cancelled": not over, "state": job.state if over else "cancelled"}
        )
    elif over:
        print_line(
            f"{found.name}: {'job ' + job.id + ' is ' + job.state + ' already' if job.id else 'was never queued'}"
        )
    else:
        print_line(
            f"{found.name}: job {job.id} cancelled; `libra-hpc submit --resume {found.name}` goes on from its last"
            " checkpoint"
        )
