"""A budget of restarts per time: a part that ends now and then is always rebuilt, one that keeps ending is not.

The budget does not reset when the part answers: one that works for a second and ends would be rebuilt without end.

Pure: times are seconds of any monotonic clock.
"""

from __future__ import annotations

from collections import deque

RESTARTS = 5
WINDOW_S = 300.0
"""Five ends in five minutes (``deadlines.restarts``).

Single accidents are hours apart; a broken configuration ends a process every few seconds.
"""


class RestartBudget:
    """At most ``restarts`` in any ``window_s`` seconds."""

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
