"""Which weight version was requested from the core, and which is written.

Pure: times are seconds of any monotonic clock.
"""

from __future__ import annotations

from libra_hpc.state.retry import Retry


class Exports:
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
