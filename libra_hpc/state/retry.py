"""When an operation that failed because of storage is tried again.

- Failure -> the next attempt waits for a pause, which doubles with every failure in a row up to a longest one.
- Success -> the pause is the first one again.
- A saved state cannot be read -> pauses as above, until their sum reaches a bound (`Patience`).

Pure: times are seconds of any monotonic clock.
"""

from __future__ import annotations


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


class Patience:
    """Pauses while a file system cannot be read: growing, and ``total_s`` together from ``now`` on."""

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
