"""When a run has to stop for its job's time limit: pure, from measured times, with time as an argument.

- After the present step, another one and a save would not fit before the end -> stop after the present step.
- A save would not fit any more if it began later -> stop at once.
- A checkpoint is being written -> the last save waits for its end.
- Slurm's notice (SIGUSR1) comes, and ``slurm.notice_s`` is given, or the end or a step's time is unknown -> stop at
  once.  Long before the end it is that of a preemption, and stops the run too.

The batch script leaves the job's end and Slurm's ``KillWait`` in the environment, because a time limit may have been
changed while the job waited.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from datetime import datetime
from typing import NamedTuple

from libra_hpc.config.job import SlurmSection
from libra_hpc.protocol.ranks_stop import JOB_END, KILL_WAIT
from libra_hpc.slurm.fit import notice_s

FACTOR = 1.3
"""Margin over the longest measured step and save: half of the excess loses a step now and then, double idles a third
of one."""
MARGIN_S = 30.0
"""Before the end, for the agents to end.  Slurm compares times about every 30 s, so its own end is rather later."""
STEPS = 8
"""Steps whose longest counts."""
UNKNOWN_SAVE_S = 120.0
"""Seconds of a save before the first was measured; at most `UNKNOWN_SHARE` of the time that is left at the start."""
UNKNOWN_SHARE = 0.1
END_S = 10.0
"""Seconds before the end that the agents have to end."""
EARLY_S = 90.0
"""By which Slurm's notice may be early: 60 s by its manual."""
KILL_S = 5.0
"""Seconds of Slurm's ``KillWait`` for writing the result; a save has the rest, and at least `LEAST_GRACE_S`."""
LEAST_GRACE_S = 4.0


class Stop(NamedTuple):
    """A decision to save and stop."""

    after: int
    """Once this step is committed; 0: at once."""
    reason: str


class TimeLimit:
    """The end of the job, and the steps and saves of this start."""

    def __init__(self, slurm: SlurmSection, now: float, environ: Mapping[str, str] = os.environ) -> None:
        end = _epoch(environ.get(JOB_END, ""))
        # An end in the past is a leftover or a clock that is wrong.
        self.end_at = end if end is not None and end > now else None
        self._derived, self._notice_s = slurm.notice_s == 0.0, notice_s(slurm)
        kill_wait = environ.get(KILL_WAIT, "")
        self.grace_s = max(LEAST_GRACE_S, (slurm.grace_s or float(kill_wait if kill_wait.isdecimal() else 0)) - KILL_S)
        """How long a save may take after SIGTERM."""
        left = 0.0 if self.end_at is None else self.end_at - now
        self.save_s = min(UNKNOWN_SAVE_S, UNKNOWN_SHARE * left)
        self._saved = False
        self.saving_since: float | None = None
        """When the write of a checkpoint began that has not ended."""
        self._steps: deque[float] = deque(maxlen=STEPS)
        self._start_s: float | None = None
        """The first step's time, with the start of the engines in it."""

    def on_step(self, seconds: float) -> None:
        if self._start_s is None:
            self._start_s = seconds
        else:
            self._steps.append(seconds)

    def on_saves(self, saving: bool, save_s: float, now: float) -> None:
        """Whether a checkpoint is being written, and the seconds of the newest complete one; 0: there is none."""
        self.saving_since = (now if self.saving_since is None else self.saving_since) if saving else None
        if save_s:
            self.save_s = max(self.save_s, save_s) if self._saved else save_s
            self._saved = True

    def heeds_notice(self, now: float) -> bool:
        """Whether Slurm's notice stops the run; otherwise `stop` does, later."""
        if self.end_at is None or self._start_s is None or not self._derived:
            return True
        return self.end_at - now > self._notice_s + EARLY_S

    def left_s(self, now: float) -> float:
        """How long a save may take after a notice."""
        return max(LEAST_GRACE_S, (self._notice_s if self.end_at is None else self.end_at - now) - END_S)

    def stop(self, step: int, stepped_at: float, now: float) -> Stop | None:
        """Whether to stop now; ``step`` was committed at ``stepped_at``."""
        step_s = max(self._steps, default=self._start_s)
        if self.end_at is None or step_s is None or not self._derived:
            return None
        left, save_s = self.end_at - now, self._last_save_s(now)
        if left - FACTOR * save_s < MARGIN_S:
            return Stop(0, f"time limit in {left:.0f} s; a save takes {save_s:.0f} s")
        next_at = max(now, stepped_at + step_s)
        save_s = self._last_save_s(next_at + step_s)
        if self.end_at - next_at - FACTOR * (step_s + save_s) < MARGIN_S:
            return Stop(step + 1, f"time limit in {left:.0f} s; a step takes {step_s:.0f} s and a save {save_s:.0f} s")
        return None

    def _last_save_s(self, at: float) -> float:
        """Return the seconds of a save asked for at ``at``, with the rest of the write that is in flight now."""
        since = self.saving_since
        return self.save_s + (0.0 if since is None else max(0.0, since + self.save_s - at))


def _epoch(text: str) -> float | None:
    """Seconds since the epoch, or local time as ``squeue`` writes it."""
    try:
        return float(text) if text.isdecimal() else datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None
