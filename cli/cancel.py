"""`libra-hpc cancel`: have a run, or all of a sweep, save and stop, or end the jobs at once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from libra_hpc.errors import OperationError, UserError, error_text, invalid
from libra_hpc.facts.rundir import RunDir
from libra_hpc.files import write_atomic
from libra_hpc.slurm.queue.run_state import RunState

from . import jobs
from .follow import job_line
from .output import busy, print_json, print_line, print_note
from .runs import RUNS, JsonOption, RunArgument, RunsOption, find_run, is_own, job_id, of_sweep

POLL_S = 0.5
ASK_S = 15.0
"""Between two questions to the queue: the run itself reports its end."""
LEAVES_S = 60.0
"""For the other ranks of a run that has ended, so that it can be resumed at once; two seconds are the rule."""
PATIENCE_S = 660.0
"""For a checkpoint at the next step boundary.  Rank 0 gives it 600 s; a minute more for its own end."""


def cancel(
    run: RunArgument = None,
    now: Annotated[bool, typer.Option("--now", help="End the job at once; a checkpoint has 4 s.")] = False,
    sweep: Annotated[str, typer.Option("--sweep", metavar="NAME", help="All runs of a sweep.")] = "",
    json: JsonOption = False,
    runs: RunsOption = Path(RUNS),
) -> None:
    if run and sweep:
        raise UserError("cancel needs either a run or --sweep NAME, and not both.")
    try:
        found = of_sweep(sweep, runs) if sweep else [find_run(run, runs)]
    except UserError:
        # Its folder may have been removed before its job ended.
        left = jobs.cancel_left(run) if run else []
        if not left:
            raise
        if json:
            print_json({"cancelled": True, "run": run, "job_ids": left})
        else:
            print_line(f"{run}: job {', '.join(left)} cancelled; its folder had been removed")
        return
    facts = []
    for one in end_all(found, now=now):
        facts.append(one.facts())
        if not json:
            print_line(one.words())
    if json:
        print_json({"sweep": sweep, "runs": facts} if sweep else facts[0])


class Cancelled(NamedTuple):
    """What became of one run."""

    run: RunDir
    job: str
    before: RunState
    message: str
    """What the run answered; empty where it was not asked, or did not answer."""
    cancelled: bool

    def facts(self) -> dict[str, Any]:
        """Facts for JSON."""
        state = "cancelled" if self.cancelled else self.before.state
        facts = {"cancelled": self.cancelled, "state": state, "message": self.message}
        return {"run": self.run.name, "job_id": self.job, **facts}

    def words(self) -> str:
        """What became of the run in one line, for people."""
        name, job = self.run.name, self.job
        if self.before.state == "never_queued":
            return f"{name}: was never queued"
        if not self.cancelled:
            return f"{name}: {job_line(job, self.before)}; nothing to cancel"
        resume = f"`libra-hpc submit --resume {name}`"
        further = f"{resume} continues" if self.run.latest_checkpoint() else "it has no checkpoint"
        if self.run.policies.exists():
            further = f"`libra-hpc eval {self.run.path}` goes on"
        return f"{name}: job {job} cancelled; {f'{self.message}; ' if self.message else ''}{further}"


def end_all(runs: Sequence[RunDir], *, now: bool) -> Iterator[Cancelled]:
    """Cancel jobs: first those that wait, the last one first, because with ``sweep --most`` it waits for another's end.

    The running ones save at the same time.
    """
    runs, queue = own_runs(runs), jobs.JobQueue()
    states = jobs.states(runs) if len(runs) > 1 else {str(runs[0].path): jobs.state(runs[0], queue)}
    saving = [] if now else [run for run in runs if states[str(run.path)].state == "running"]
    for run in reversed(runs):
        if run in saving:
            continue
        state, job = states[str(run.path)], job_id(run)
        if state.state == "silent" and not now:
            print_note(f"job {job} is not asked to save: {state.reason}")
        yield from at_once(run, job, state, alone=len(runs) == 1)
    asked = {run: request(run) for run in saving}
    for run, reachable in asked.items():
        state, job = states[str(run.path)], job_id(run)
        message = answer(run, job, queue) if reachable else ""
        yield Cancelled(run, job, state, message, ends(run, queue, message))


def at_once(run: RunDir, job: str, state: RunState, *, alone: bool) -> Iterator[Cancelled]:
    """Cancel a job that is not asked to save; where there are others, a record that cannot be read is only noted."""
    try:
        cancelled = (state.broken or not state.over) and jobs.cancel(run)
    except UserError as error:
        if alone:
            raise
        print_note(f"{run.name} is not cancelled: {error}")
        return
    message = ""
    if cancelled and (state.broken or state.state == "requeued"):
        try:
            message = jobs.clean_up(run)
        except (OperationError, UserError, OSError) as error:
            print_note(f"its snapshots may stay in memory of its nodes until your next job there: {error}")
    yield Cancelled(run, job, state, message, cancelled)


def own_runs(runs: Sequence[RunDir]) -> list[RunDir]:
    """The runs of this user among them; raises `UserError` where there is none."""
    found = [run for run in runs if is_own(run)]
    if not found:
        raise invalid("RUN", runs[0].name, "it is another user's", "a run of your own")
    if others := len(runs) - len(found):
        print_note(f"left alone: {others} of {len(runs)} runs, which are other users'")
    return found


def ends(run: RunDir, queue: jobs.JobQueue, message: str) -> bool:
    """Cancel the job of a run that was asked, unless it has ended; False where no job is left to cancel."""
    if message and jobs.state(run, queue).over:
        return True
    # Slurm, or the run itself, may have queued it again.
    return jobs.cancel(run) or bool(message)


def request(run: RunDir) -> bool:
    """Ask a run to save and stop; False where its folder takes no request."""
    try:
        write_atomic(run.stop, b"{}\n")
    except OSError as error:
        print_note(f"the run cannot be asked to save: {run.stop}: {error_text(error)}")
        return False
    print_note(f"job {job_id(run)} saves at its next step boundary; Ctrl-C leaves it to that, --now ends it at once")
    return True


def answer(run: RunDir, job: str, queue: jobs.JobQueue) -> str:
    """Wait for the end of a run that was asked to save; what it answers, empty when it does not.

    An interrupt leaves the request standing.
    """
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
