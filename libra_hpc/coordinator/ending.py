"""How rank 0 ends all ranks: pure, from what happened, with time as an argument.

- Training has saved the last step -> completed.
- The time limit is near, SIGTERM or a request to stop came, a guard of learning acts, the run directory takes no
  writes, or the run has no owner any more -> save and stop in the time that is left.
- A repartition or the loss of a leader -> the ranks end with the step saved for it, or with the newest checkpoint.
- An agent has a defect, or anything else happens that the run cannot go on with -> the ranks end at once.

A stop wins over a restart: nobody who cancels a job wants it to begin again.  What follows decides the run's owner.
"""

from __future__ import annotations

from libra_hpc.protocol.ranks_stop import STATES, Why

ENDS: tuple[Why, ...] = ("lost", "time_limit", "cancelled", "paused", "broken", "storage", "orphaned")
"""Ends that training saves for; of two reasons the later one in this list decides."""
UNFIT: tuple[Why, ...] = ("paused", "broken", "storage")
"""Reasons out of these that keep a run which has saved its last step from ending as completed."""
SAVE_S = 60.0
"""How long the train leader may take to save before the ranks restart from an older checkpoint."""


class RunEnding:
    """The state of a run and how it ends.  The first end stands; times are epoch seconds."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self.state, self.message = "starting", "waiting for the nodes"
        self.why: Why | None = None
        """Why the ranks end; None: they do not."""
        self.saving_for: Why | None = None
        """Why they will once training has saved."""
        self.reason = ""
        """The same as a sentence."""
        self._deadline = 0.0

    @property
    def over(self) -> bool:
        return self.why is not None

    @property
    def stopping(self) -> bool:
        return self.saving_for not in (None, "lost")

    def end(self, why: Why, message: str) -> None:
        if not self.over:
            self.why, self.state, self.message = why, STATES[why], message

    def stop(self, reason: str, patience_s: float, now: float, why: Why = "cancelled") -> None:
        """Save and stop; a second reason can only shorten the time that is left."""
        self._deadline = min(self._deadline, now + patience_s) if self.stopping else now + patience_s
        if self.saving_for is None or ENDS.index(why) > ENDS.index(self.saving_for):
            self.saving_for, self.reason = why, reason
        self.message = f"{reason}: saving and stopping"

    def _stopped(self, sentence: str) -> None:
        assert self.saving_for is not None
        prefix = "" if self.saving_for in ("cancelled", "lost") else f"{self.reason}; "
        further = "; continue with --resume" if self.saving_for == "orphaned" else ""
        self.end(self.saving_for, self.reason if self.saving_for == "lost" else f"{prefix}{sentence}{further}")

    def finished(self, step: int, repartition: bool) -> None:
        """Training has ended and ``step`` is saved; ``repartition``: one was ordered."""
        saved = f"step {step} is saved"
        if step >= self._steps and self.saving_for not in UNFIT:
            self.end("completed", saved)
        elif self.saving_for is not None:
            self._stopped(saved)
        elif repartition:
            self.end("repartition", saved)
        else:
            # Its leader did not hear rank 0 for so long that it took it for lost.
            self.end("lost", "training stopped without an order to")

    def fatal(self, sentence: str, why: Why) -> None:
        """A part cannot go on; ``why``: ``fatal``, or all ranks may start again."""
        if self.stopping:
            if why == "fatal":
                self.end(why, sentence)
            else:
                self._stopped(f"{sentence}; the last checkpoint stands")
        elif self.saving_for == "lost":
            # A step that could not be saved before a restart loses nothing more: there is an older checkpoint.
            self.end("lost", self.reason)
        else:
            self.end(why, sentence)

    def save_and_restart(self, sentence: str, now: float) -> bool:
        """The ranks end once training has saved; False where they do at once."""
        if self.stopping:
            self.fatal(sentence, "lost")
        elif self.saving_for is None:
            self.saving_for, self.reason, self._deadline = "lost", sentence, now + SAVE_S
            self.message = f"{sentence}; saving, then all ranks restart"
        return not self.over

    def check(self, now: float) -> None:
        if self.saving_for is not None and now > self._deadline:
            self._stopped("stopped before the last step could be saved; the last checkpoint stands")
