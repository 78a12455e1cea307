"""Follow a run until it ends: a live panel on a terminal, plain progress lines elsewhere.

- status.json -> read every `REFRESH_S`.
- status.json is older than `QUIET_S` -> the queue is queried, with pauses that double from `FIRST_POLL_S` to
  `LONGEST_POLL_S`, because all users share the controller.
"""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Callable

import msgspec
from rich.console import RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from libra_hpc.telemetry.rundir import RunDir
from libra_hpc.telemetry.status import Status, because
from libra_hpc.telemetry.summary import duration
from libra_hpc.telemetry.view import WIDTH, render

from . import jobs
from .output import console, print_line
from .runs import FINAL, job_id, read_status, rewards

REFRESH_S = 1.0
"""status.json is replaced about once a second."""
FIRST_POLL_S, LONGEST_POLL_S = 2.0, 30.0
QUIET_S = 10.0
"""Age of status.json from which the job may be dead."""
LOST_S = 120.0
"""Seconds after which a job unknown to Slurm counts as failed.  It may be unknown for a moment after submission, or
while the controller restarts."""
LEAVES_S = 60.0
"""A stopped run's job leaves the queue, or is queued again, within this time: Slurm's epilogues are part of it."""
INDENT = 10 * " "
"""Indent of lines below a progress line: the width of its clock."""
LINE_EVERY_S = 10.0
"""Seconds between progress lines of plain mode while the state stays the same."""


Until = Callable[[Status | None], bool]
"""Gets the last snapshot; returns whether to stop following."""


class Follower:
    """The state of a followed run, refreshed by `refresh`."""

    def __init__(self, run: RunDir, clock: Callable[[], float] = time.time) -> None:
        self.run = run
        self.status: Status | None = None
        self.job = jobs.JobView(id=job_id(run), state="pending")
        self._clock = clock
        self._pause = 0.0
        self._poll_at = 0.0
        self._unknown_since: float | None = None

    def refresh(self) -> str:
        """Read the status or query the queue; returns the run's state, one of `FINAL` once it has ended."""
        now = self._clock()
        self.status = read_status(self.run)
        if self.status is not None and self.status.state in FINAL:
            return self._requeued(now) or self.status.state
        quiet = self.status is None or now - self.status.updated_at > QUIET_S
        if quiet and now >= self._poll_at:
            self._pause = min(max(self._pause * 2, FIRST_POLL_S), LONGEST_POLL_S)
            self._poll_at = now + self._pause
            self.job = self._ask(now)
            if self.job.state in FINAL:
                # The last snapshot may have arrived during the query.
                self.status = read_status(self.run)
                return self.status.state if self.status is not None and self.status.state in FINAL else self.job.state
        if not quiet:
            self._pause = 0.0
        return self.status.state if self.status is not None else self.job.state

    def _requeued(self, now: float) -> str:
        """State of the job of a stopped run, while that is running out or queued again (``scontrol requeue``,
        preemption); empty once it is over."""
        if self.status is None or self.status.state != "cancelled":
            return ""
        if now >= self._poll_at:
            self._poll_at = now + FIRST_POLL_S
            self.job = jobs.state(self.run)
        if self.job.state == "pending":
            self.status = None
            return "pending"
        leaving = self.job.state == "running" and now - self.status.updated_at < LEAVES_S
        return "running" if leaving else ""

    def _ask(self, now: float) -> jobs.JobView:
        job = jobs.state(self.run)
        if job.state != "unknown":
            self._unknown_since = None
            return job
        self._unknown_since = now if self._unknown_since is None else self._unknown_since
        return msgspec.structs.replace(job, state="failed") if now - self._unknown_since >= LOST_S else job

    def screen(self) -> RenderableType:
        """The panel of the present state."""
        if self.status is not None:
            return render(self.status, now=self._clock(), rewards=rewards(self.run))
        return Panel(Text(self.waiting()), title=Text(self.run.name, style="bold"), title_align="left", width=WIDTH)

    def line(self) -> str:
        """The present state as one line."""
        status = self.status
        if status is None:
            return self.waiting()
        elapsed = duration(max(status.updated_at - status.started_at, 0.0))
        if status.step == 0 and status.state not in FINAL:
            engines = [engine for node in status.nodes for engine in node.engines.values()]
            return f"{elapsed:>8}  {status.state}  {engines.count('ready')} of {len(engines)} engines ready"
        speeds = f"train {status.train.tokens_per_s:,.0f} tok/s, rollout {status.rollout.tokens_per_s:,.0f} tok/s"
        nodes = f"nodes {status.train.nodes}+{status.rollout.nodes}"
        return (
            f"{elapsed:>8}  {status.state}  step {status.step}/{status.steps}  reward {status.reward:.3f}  {speeds} "
            f" {nodes}"
        )

    def waiting(self) -> str:
        """State of a job without a snapshot, as one line."""
        reason = f" ({self.job.reason})" if self.job.reason else ""
        return f"job {self.job.id or '?'} is {self.job.state}{reason}"


def follow(run: RunDir, until: Until = lambda status: False) -> str:
    """Show a run until it ends or ``until`` returns True; returns its state.  An interrupt does not stop the job."""
    follower = Follower(run)
    return _panel(follower, until) if sys.stdout.isatty() else _lines(follower, until)


def wait_silently(run: RunDir, until: Until = lambda status: False) -> str:
    """As `follow`, with nothing on stdout."""
    follower = Follower(run)
    while (state := follower.refresh()) not in FINAL and not until(follower.status):
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


def _panel(follower: Follower, until: Until) -> str:
    state = follower.refresh()
    with Live(follower.screen(), console=console(), auto_refresh=False) as live:
        while state not in FINAL and not until(follower.status):
            time.sleep(REFRESH_S)
            state = follower.refresh()
            live.update(follower.screen(), refresh=True)
    return state


def _lines(follower: Follower, until: Until) -> str:
    printed_at, printed, last = 0.0, "", ("", "")
    while True:
        state = follower.refresh()
        remarks = planner_line(follower.status), message_of(follower.status)
        for before, text in zip(last, remarks, strict=True):
            if text and text != before:
                print_line(textwrap.fill(text, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT))
        last = remarks
        key = state if follower.status is not None else follower.waiting()
        seen = until(follower.status)
        if seen or key != printed or (follower.status is not None and time.monotonic() - printed_at > LINE_EVERY_S):
            printed_at, printed = time.monotonic(), key
            print_line(follower.line())
        if seen or state in FINAL:
            return state
        time.sleep(REFRESH_S)
