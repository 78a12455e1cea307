"""`libra-hpc cancel`: end a run's job; saying it twice does no harm."""

from __future__ import annotations

from pathlib import Path

from . import jobs
from .output import say
from .runs import FINAL, RUNS, RunArgument, RunsOption, find_run


def cancel(run: RunArgument = None, runs: RunsOption = Path(RUNS)) -> None:
    """Cancel the job of a run; a job that is over already is no error."""
    found = find_run(run, runs)
    job = jobs.state(found)
    if job.state in FINAL or not job.id:
        say(f"{found.name}: {'job ' + job.id + ' is ' + job.state + ' already' if job.id else 'was never queued'}")
        return
    jobs.cancel(found)
    say(f"{found.name}: job {job.id} cancelled; `libra-hpc submit --resume {found.name}` goes on from its last checkpoint")
