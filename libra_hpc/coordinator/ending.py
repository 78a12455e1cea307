"""How a run ends: pure, from what happened, with time as an argument.

- Training has saved the last step -> completed.
- The time limit is near -> save and stop in the time that is left; time_limit.
- SIGTERM, or a request to stop -> the same; cancelled.  It wins over the time limit: the job is not queued again.
- A run directory that takes no writes -> the same; failed.
- A repartition or the loss of a leader -> restarting, from the checkpoint saved for it or from the newest one.
- Anything else that the run cannot go on with -> failed.

A stop wins over a restart: nobody who cancels a job wants it to begin again.
"""

from __future__ import annotations

from .recovery import Recovery

STOPS = ("time_limit", "cancelled", "failed")
"""States of a stopped run; of two reasons the later one in this list decides."""


class RunEnding:
    """The state of a run and how it ends.  The first end stands; times are epoch seconds."""

    def __init__(self, steps: int, recovery: Recovery) -> None:
        self._steps, self.recovery = steps, recovery
        self.state, self.message = "starting", "waiting for the nodes"
        self.over = False
        self._deadline: float | None = None
        self._stop_state, self._stop_reason = "cancelled", ""

    @property
    def stopping(self) -> bool:
        return self._deadline is not None

    def end(self, state: str, message: str) -> None:
        if not self.over:
            self.state, self.message, self.over = state, message, True

    def stop(self, reason: str, patience_s: float, now: float, state: str = "cancelled") -> None:
        """Save and stop; the run then ends in ``state``.  A second reason can only shorten the time that is left."""
        deadline = now + patience_s
        if self._deadline is None or STOPS.index(state) > STOPS.index(self._stop_state):
            self._stop_state, self._stop_reason = state, "" if state == "cancelled" else f"{reason}; "
        self._deadline = deadline if self._deadline is None else min(deadline, self._deadline)
        self.message = f"{reason}: saving and stopping"

    def finished(self, step: int, repartition: bool, now: float) -> None:
        """Training has ended and ``step`` is saved; ``repartition``: one was ordered."""
        saved = f"step {step} is saved"
        if step >= self._steps and not (self.stopping and self._stop_state == "failed"):
            self.end("completed", saved)
        elif self.stopping:
            self.end(self._stop_state, f"{self._stop_reason}{saved}")
        elif repartition or self.recovery.reason:
            self.end("restarting", saved)
        else:
            # Its leader did not hear rank 0 for so long that it took it for lost.
            self.restart("training stopped without an order to", now)

    def fatal(self, sentence: str, restart: bool, now: float) -> None:
        """A part cannot go on; ``restart``: all ranks may, from the newest checkpoint."""
        if (restart or self.recovery.reason) and not self.stopping:
            # A step that could not be saved before a restart loses nothing more: there is an older checkpoint.
            self.restart(self.recovery.reason or sentence, now)
        else:
            self.end("failed", sentence)

    def restart(self, sentence: str, now: float) -> None:
        """Restart all ranks from the newest checkpoint, if a restart is left and the run is not stopping anyway."""
        if self.stopping:
            self.end(self._stop_state, f"{sentence}; the last checkpoint stands")
        elif self.recovery.start(sentence, now):
            self.end("restarting", f"{sentence}; all ranks restart from the newest checkpoint")
        else:
            self.end("failed", f"{sentence}, and {self.recovery.exhausted}; continue with --resume")

    def save_and_restart(self, sentence: str, now: float) -> bool:
        """As `restart`, once training has saved; False where there is nothing to wait for."""
        if self.stopping or not self.recovery.start(sentence, now):
            self.restart(sentence, now)
            return False
        self.message = f"{sentence}; saving, then all ranks restart"
        return True

    def check(self, now: float) -> None:
        if self._deadline is not None and now > self._deadline:
            self.end(
                self._stop_state,
                f"{self._stop_reason}stopped before the last step could be saved; the last checkpoint stands",
            )
        elif self.recovery.reason and now > self.recovery.deadline:
            self.end("restarting", f"{self.recovery.reason}; all ranks restart from the newest checkpoint")
