"""The attempts of trajectories that failed: who waits for the next one, who may begin, and what the event log gets to
see of it.

Events: ``trajectory_failed`` (at most `EVENTS` in a minute; the next one after that has the number of those
``unsaid``), ``admission_paused``, ``admission_resumed``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from .failures import Failure, FailureBook
from .trajectory import Trajectory

EVENTS, EVENTS_S = 20, 60.0
"""Failures that get an event of their own: enough to see a pattern, and a broken environment does not fill the disk."""

ERROR_CHARS = 500
"""Of an error in an event: an engine's may be a whole traceback."""


class Attempts:
    """``log`` writes an event, ``fail`` ends the run with a sentence."""

    def __init__(self, book: FailureBook, log: Callable[..., None], fail: Callable[[str], None]) -> None:
        self.book, self._log, self._fail = book, log, fail
        self._waiting: dict[tuple[int, int], tuple[float, Trajectory]] = {}
        self._said: deque[float] = deque()
        self._unsaid = 0

    def __len__(self) -> int:
        """Trajectories that wait for their next attempt."""
        return len(self._waiting)

    def failed(self, trajectory: Trajectory, failure: Failure, now: float) -> bool:
        """Have it tried again later; False when it is given up."""
        key = (trajectory.index, trajectory.sample)
        delay = self.book.failed(key, failure, now)
        self._say(trajectory, failure, delay is None, now)
        if delay is not None:
            self._waiting[key] = (now + delay, Trajectory(*key, trajectory.attempt + 1))
        return delay is not None

    def hold(self, trajectory: Trajectory, now: float) -> None:
        """A first attempt that begins when it may."""
        self._waiting[trajectory.index, trajectory.sample] = (now, trajectory)

    def begin(self, now: float) -> list[Trajectory]:
        """Attempts that begin now: all that are due, or during a pause one as a probe, of the prompt that failed
        least."""
        if self.book.paused:
            if not self._waiting or not self.book.may_probe(now):
                return []
            key = min(self._waiting, key=lambda key: (self.book.probed(key), self._waiting[key][0]))
            self.book.probing(key)
            return [self._waiting.pop(key)[1]]
        due = [key for key, (at, _) in self._waiting.items() if at <= now]
        return [self._waiting.pop(key)[1] for key in due]

    def evaluate(self, running: int, now: float) -> int | None:
        """Carry out what the failures call for; how many groups may be admitted now, None for as many as the
        staleness bound allows."""
        decision = self.book.evaluate(running, len(self._waiting), now)
        if decision is not None and decision.action == "fail":
            self._fail(decision.reason)
        elif decision is not None:
            self._log(f"admission_{decision.action.removesuffix('e')}ed", reason=decision.reason)
        if not self.book.paused:
            return None
        # Something has to be probed with.
        return 0 if self._waiting or running or not self.book.may_probe(now) else 1

    def _say(self, trajectory: Trajectory, failure: Failure, given_up: bool, now: float) -> None:
        while self._said and now - self._said[0] > EVENTS_S:
            self._said.popleft()
        if len(self._said) >= EVENTS:
            self._unsaid += 1
            return
        self._said.append(now)
        self._log(
            "trajectory_failed",
            trajectory=trajectory.episode,
            task=failure.task,
            prompt=failure.prompt,
            failure=failure.kind,
            error=failure.error[:ERROR_CHARS],
            given_up=given_up,
            unsaid=self._unsaid,
        )
        self._unsaid = 0
