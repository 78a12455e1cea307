"""When an operation that cannot be done now is tried again: storage, processes or a network may be back in minutes.

- Failure -> the next attempt waits for a pause, which doubles with every failure in a row up to a longest one.
- Success -> the pause is the first one again.
- A part that ended is started again, as often as a `RestartBudget` allows.
- Whoever waits has a bound -> pauses as above, until their sum reaches it (`Patience`, `patiently`).

Times are seconds of any monotonic clock; `patiently` alone has one.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from libra_hpc.errors import SlurmUnreachable, error_text

READ_S = 600.0
"""Longest wait for a file that a trainer loads."""
ABSENT = (FileNotFoundError, NotADirectoryError)
"""A reader that looks for something takes them for an answer."""
CANNOT_NOW = (OSError, MemoryError, SlurmUnreachable)
"""They prove nothing about the run: what cannot be done now may be possible in a minute."""

RESTARTS = 5
WINDOW_S = 300.0
"""Five ends in five minutes (``deadlines.restarts``).

Single accidents are hours apart; a broken configuration ends a process every few seconds.
"""

log = logging.getLogger("libra_hpc.retry")
Result = TypeVar("Result")


class Retry:
    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self._not_before = float("-inf")
        self.failures = 0

    def failed(self, now: float) -> None:
        # Beyond 1,000 doublings a float overflows.
        self._not_before = now + min(self._first_s * 2.0 ** min(self.failures, 100), self._longest_s)
        self.failures += 1

    def succeeded(self) -> None:
        self._not_before, self.failures = float("-inf"), 0

    def due(self, now: float) -> bool:
        return now >= self._not_before

    def wait_s(self, now: float) -> float:
        return max(0.0, self._not_before - now)


class RestartBudget:
    """At most ``restarts`` in any ``window_s`` seconds: a part that works for a second and ends is given up."""

    def __init__(self, restarts: int = RESTARTS, window_s: float = WINDOW_S) -> None:
        self._restarts, self.window_s = restarts, window_s
        self._at: deque[float] = deque()

    def spend(self, now: float) -> bool:
        """Note one restart; False when that is one too many."""
        self._at.append(now)
        while self._at and now - self._at[0] > self.window_s:
            self._at.popleft()
        return len(self._at) <= self._restarts

    @property
    def spent(self) -> int:
        return len(self._at)


class Patience:
    """Pauses while something cannot be done: growing, and ``total_s`` together from ``now`` on."""

    FIRST_S, LONGEST_S = 0.5, 30.0
    """Half: more calls to a server that is restarted. Double: the start waits a minute too long."""

    def __init__(self, total_s: float, now: float) -> None:
        self._until = now + total_s
        self._retry = Retry(self.FIRST_S, self.LONGEST_S)

    def failed(self, now: float) -> float | None:
        """Seconds until the next try; None: no more."""
        self._retry.failed(now)
        left = self._until - now
        return min(self._retry.wait_s(now), left) if left > 0.0 else None


def cannot(error: Exception, operation: str = "read") -> str:
    """Which file cannot be read, or written, and why."""
    if not isinstance(error, OSError):
        return reason_of(error)
    return f"{_file(error) or 'a file'} cannot be {operation}: {error_text(error)}"


def reason_of(error: Exception) -> str:
    """Why something cannot be done, and with which file."""
    file = _file(error)
    return (error_text(error) or type(error).__name__) + (f" ({file})" if file else "")


def _file(error: Exception) -> object:
    return error.filename if isinstance(error, OSError) else None


def patiently(
    work: Callable[[], Result],
    longest_s: float = READ_S,
    note: Callable[[str], object] = log.warning,
    *,
    words: Callable[[Exception], str] = cannot,
    answers: tuple[type[Exception], ...] = ABSENT,
    pause: Callable[[float], object] | None = None,
) -> Result:
    """Call ``work`` until it raises none of `CANNOT_NOW`, for ``longest_s``; then that is raised.

    For ``answers`` nobody waits. ``note`` gets a sentence before each pause, in ``words``. ``pause`` sleeps,
    and may raise.
    """
    patience = Patience(longest_s, time.monotonic())
    while True:
        try:
            return work()
        except answers:
            raise
        except CANNOT_NOW as error:
            pause_s = patience.failed(time.monotonic())
            if pause_s is None:
                raise
            note(f"{words(error)}; it is tried again for {longest_s:.0f} s")
            (pause or time.sleep)(pause_s)
