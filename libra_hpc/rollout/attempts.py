"""Failed attempts of trajectories: which trajectory waits for its next attempt, and which attempt begins.

Events: ``trajectory_failed`` (at most `EVENTS` in `EVENTS_S`; the next one has the number left out, ``unsaid``),
``admission_paused``, ``admission_resumed``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from .failures import FailureBook
from .trajectory import Trajectory

EVENTS, EVENTS_S = 20, 60.0
"""Most failures with an event in so many seconds: a pattern shows, and the disk does not fill."""

ERROR_CHARS = 500
"""Characters of an error in an event: an engine's may be a whole traceback."""


class Attempts:
    """``log`` writes an event, ``fail`` ends the run with a sentence."""

    def __init__(self, book: FailureBook, log: Callable[..., None], fail: Callable[[str], None]) -> None:
        self.book, self._log, self._fail = book, log, fail
        self._waiting: dict[tuple[int, int], tuple[float, Trajectory]] = {}
        self._logged_at: deque[float] = deque()
        self._unsaid = 0

    def __len__(self) -> int:
        """Trajectories that wait for their next attempt."""
        return len(self._waiting)

    def failed(self, trajectory: Trajectory, kind: str, now: float) -> bool:
        """Try the trajectory again later; False when it is given up."""
        key = (trajectory.index, trajectory.sample)
        delay = self.book.failed(key, kind, trajectory.error, now)
        self._log_failure(trajectory, kind, delay is None, now)
        if delay is not None:
            self._waiting[key] = (now + delay, trajectory.again())
        return delay is not None

    def hold(self, trajectory: Trajectory, now: float) -> None:
        self._waiting[trajectory.index, trajectory.sample] = (now, trajectory)

    def begin(self, now: float) -> list[Trajectory]:
        """Attempts that begin now: all that are due; during a pause one probe, of a trajectory with fewest attempts."""
        if self.book.paused:
            if not self._waiting or not self.book.may_probe(now):
                return []
            key = min(self._waiting, key=lambda key: (self._waiting[key][1].attempt, self._waiting[key][0]))
            self.book.probe = key
            return [self._waiting.pop(key)[1]]
        due = [key for key, (at, _) in self._waiting.items() if at <= now]
        return [self._waiting.pop(key)[1] for key in due]

    def evaluate(self, running: int, now: float) -> int | None:
        """Pause, resume or fail as `FailureBook` decides, with ``running`` attempts in progress.

        Returns the most groups to admit now; None: as many as the staleness bound allows.
        """
        decision = self.book.evaluate(running, len(self._waiting), now)
        if decision is not None and decision.action == "fail":
            self._fail(decision.reason)
        elif decision is not None:
            self._log(f"admission_{decision.action.removesuffix('e')}ed", reason=decision.reason)
        if not self.book.paused:
            return None
        # A fresh prompt may go well where those that wait fail by their own fault.
        fresh = any(trajectory.attempt == 0 for _, trajectory in self._waiting.values())
        return int(self.book.may_probe(now) and not fresh)

    def _log_failure(self, trajectory: Trajectory, kind: str, given_up: bool, now: float) -> None:
        while self._logged_at and now - self._logged_at[0] > EVENTS_S:
            self._logged_at.popleft()
        if len(self._logged_at) >= EVENTS:
            self._unsaid += 1
            return
        self._logged_at.append(now)
        self._log(
            "trajectory_failed",
            trajectory=trajectory.episode,
            task=trajectory.task,
            prompt=trajectory.named,
            failure=kind,
            error=trajectory.error[:ERROR_CHARS],
            given_up=given_up,
            unsaid=self._unsaid,
        )
        self._unsaid = 0
