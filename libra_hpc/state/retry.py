"""When an operation that failed for lack of storage is tried again.

- Failure -> the next attempt waits for a pause, which doubles with every failure in a row up to a longest one.
- Success -> the pause is the first one again.

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


class Exports:
    """Which weight version was requested from the core, and which is written."""

    FIRST_S, LONGEST_S = 2.0, 10.0
    """Pauses in seconds; short, because rollout with a staleness bound of 0 waits for the version."""
    FAILURES = 5
    """Failures in a row that end the run: after 24 s without room."""

    def __init__(self, version: int) -> None:
        self._written = self._asked = version
        self._retry = Retry(self.FIRST_S, self.LONGEST_S)
        self.seconds = 0.0
        """Of the last export."""

    def due(self, version: int, now: float) -> bool:
        """Whether this version must be requested now."""
        return self._asked < version and self._retry.due(now)

    def ask(self, version: int, now: float) -> bool:
        """As `due`; the version then counts as requested."""
        if not self.due(version, now):
            return False
        self._asked = version
        return True

    def ask_again(self) -> None:
        """Drop the pending request: its receiver may be gone."""
        self._asked = self._written

    def lost(self, version: int) -> None:
        """The file of a version is not there, or no longer."""
        self._written = min(self._written, version - 1)

    def written(self, version: int, seconds: float) -> None:
        self._written, self.seconds = max(self._written, version), seconds
        self._retry.succeeded()

    def failed(self, now: float) -> bool:
        """An export failed; True at the last permitted failure."""
        self._retry.failed(now)
        self.ask_again()
        return self._retry.failures >= self.FAILURES

    def wait_s(self, now: float) -> float:
        return self._retry.wait_s(now)
