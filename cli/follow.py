"""Follow a run until it is over: a live panel on a terminal, plain progress lines elsewhere.

- The records -> read every `REFRESH_S`.
- status.json is older than `QUIET_S` -> the queue is queried, with pauses that double from `FIRST_POLL_S` to
  `LONGEST_POLL_S`, because all users share the controller.
"""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Callable
from functools import partial

import msgspec
from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from libra_hpc.facts import series
from libra_hpc.facts.rundir import RunDir
from libra_hpc.facts.series import duration
from libra_hpc.facts.status import Status, because
from libra_hpc.facts.view import WIDTH, status_screen
from libra_hpc.slurm.queue.query import JobInfo
from libra_hpc.slurm.queue.run_state import NoAnswer, RunState

from . import jobs
from .output import console, print_line
from .runs import job_id, read_status, rewards, with_state

REFRESH_S = 1.0
"""status.json is replaced about once a second."""
FIRST_POLL_S, LONGEST_POLL_S = 2.0, 30.0
QUIET_S = 10.0
"""Age of status.json from which the job may be dead."""
LOST_S = 120.0
"""Seconds after which nobody waits for a job unknown to Slurm.  It may be unknown for a moment after submission, or
while the controller restarts."""
INDENT = 10 * " "
"""Indent of lines below a progress line: the width of its clock."""
LINE_EVERY_S = 10.0
"""Seconds between progress lines of plain mode while the state stays the same."""


class Follower:
    """The state of a followed run, refreshed by `refresh`."""

    def __init__(self, run: RunDir, clock: Callable[[], float] = time.time) -> None:
        self.run = run
        self.job_id = job_id(run)
        self.status: Status | None = None
        self.state = RunState("unknown")
        self._clock = clock
        self._queue = jobs.JobQueue()
        self._answer: JobInfo | NoAnswer = NoAnswer()
        self._pause = 0.0
        self._asked_at = self._poll_at = 0.0
        self._lost_since: float | None = None

    def refresh(self) -> RunState:
        """Read the records, query the queue where it is due, and decide; the state is `RunState.over` at the end."""
        now = self._clock()
        known = jobs.records(self.run)
        newest = max(known.at, 0.0 if known.end is None else known.end.at)
        overtaken = newest > self._asked_at
        quiet = known.status is None or known.end is not None or abs(jobs.clock(self.run, now) - known.at) > QUIET_S
        if known.settled or (overtaken and not quiet):
            self._answer, self._pause = NoAnswer(), 0.0
        elif now >= self._poll_at or overtaken:
            leaving = known.end is not None and self.state.state != "requeued"
            self._pause = FIRST_POLL_S if leaving else min(max(self._pause * 2, FIRST_POLL_S), LONGEST_POLL_S)
            self._poll_at, self._asked_at = now + self._pause, now
            self._answer = self._queue.ask(self.run)
        self.state = self._found(jobs.judge(self.run, self._answer, now), now)
        waits = self.state.state in ("pending", "requeued")
        self.status = None if waits else read_status(self.run)
        return self.state

    def _found(self, state: RunState, now: float) -> RunState:
        """``state``, over where Slurm has had no record of the job for `LOST_S`."""
        lost = state.state == "unknown" and not isinstance(self._answer, NoAnswer)
        self._lost_since = (now if self._lost_since is None else self._lost_since) if lost else None
        over = self._lost_since is not None and now - self._lost_since >= LOST_S
        return msgspec.structs.replace(state, over=True) if over else state

    def screen(self, terminal: Console) -> RenderableType:
        """The panel of the present state; the short one where the terminal is too low."""
        if self.status is not None:
            status, known = with_state(self.status, self.state), series.steps(self.run)
            shown = partial(status_screen, status, now=jobs.clock(self.run, self._clock()), steps=known)
            return shown(short=len(terminal.render_lines(shown())) > terminal.height)
        return Panel(Text(self.waiting()), title=Text(self.run.name, style="bold"), title_align="left", width=WIDTH)

    def line(self) -> str:
        """The present state as one line."""
        status = self.status
        if status is None:
            return self.waiting()
        elapsed = duration(max(status.updated_at - status.started_at, 0.0))
        if status.step == 0 and not self.state.over:
            engines = [state for node in status.nodes for name, state in node.engines.items() if name[0] == "r"]
            return f"{elapsed:>8}  {self.state.words}  {engines.count('ready')} of {len(engines)} engines ready"
        now = f"train {status.train.tokens_per_s:,.0f} generated/s, rollout {status.rollout.tokens_per_s:,.0f}  "
        # Of the last seconds, in which a run that ends rolls out nothing; its summary has the speeds of its steps.
        speeds = "" if self.state.over else now
        nodes = f"nodes {status.train.nodes}+{status.rollout.nodes}"
        known = rewards(self.run)
        reward = f"reward {known[-1]:.3f}" if known else "reward -"
        return f"{elapsed:>8}  {self.state.words}  step {status.step}/{status.steps}  {reward}  {speeds}{nodes}"

    def waiting(self) -> str:
        """State of a job without a snapshot, as one line."""
        return job_line(self.job_id, self.state)


def job_line(job_id: str, state: RunState) -> str:
    """A run's job and its state in one line."""
    words = "stopped by its time limit" if state.state == "time_limit" else state.words
    return f"job {job_id or '?'} is {words}" + (f" ({state.reason})" if state.reason else "")


def follow(run: RunDir) -> RunState:
    """Show a run until it is over; returns its state.  An interrupt does not stop the job."""
    follower = Follower(run)
    return _panel(follower) if sys.stdout.isatty() else _lines(follower)


def wait_silently(run: RunDir, until: Callable[[], bool] = lambda: False) -> RunState:
    """Wait like `follow`, with nothing on stdout; at most until ``until`` returns True."""
    follower = Follower(run)
    while not (state := follower.refresh()).over and not until():
        time.sleep(REFRESH_S)
    return state


def planner_line(status: Status | None) -> str:
    """The planner's last decision as a line; empty without one, or for *hold*."""
    decision = None if status is None else status.decision
    if decision is None or decision.action == "hold":
        return ""
    who = f"node {decision.node} " if decision.node >= 0 else ""
    return f"planner: {who}{decision.action.replace('_', ' ')}: {because(decision.reason, decision.action)}"


def message_of(status: Status | None) -> str:
    """The message of a running run with at least one step, mostly empty."""
    return status.message if status is not None and status.state == "running" and status.step else ""


def _panel(follower: Follower) -> RunState:
    state = follower.refresh()
    if state.over:
        return state
    terminal = console()
    # Whoever asked shows how the run ended, in the place of its last screen.
    with Live(follower.screen(terminal), console=terminal, auto_refresh=False, transient=True) as live:
        while not state.over:
            time.sleep(REFRESH_S)
            state = follower.refresh()
            live.update(follower.screen(terminal), refresh=True)
    return state


def _lines(follower: Follower) -> RunState:
    printed_at, printed, last = 0.0, "", ("", "")
    while True:
        state = follower.refresh()
        remarks = planner_line(follower.status), message_of(follower.status)
        for before, text in zip(last, remarks, strict=True):
            if text and text != before:
                print_line(textwrap.fill(text, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT))
        last = remarks
        key = state.words if follower.status is not None else follower.waiting()
        if key != printed or (follower.status is not None and time.monotonic() - printed_at > LINE_EVERY_S):
            printed_at, printed = time.monotonic(), key
            print_line(follower.line())
        if state.over:
            return state
        time.sleep(REFRESH_S)
