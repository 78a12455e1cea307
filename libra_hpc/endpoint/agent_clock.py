"""The clock of an agent's limit of time, which stands while the agent waits for a turn; pure: times are arguments."""

from __future__ import annotations

WAITS = 10.0
"""Most time that it stands, as a multiple of the limit. Half: a long queue ends agents that did nothing; double: one
that always has a request in line keeps its box twice as long."""


class AgentClock:
    """``limit_s``: seconds of the agent's own; ``now``: any monotonic clock's."""

    def __init__(self, limit_s: float, now: float) -> None:
        self._own_s, self._wait_s = limit_s, WAITS * limit_s
        self._since, self._waits = now, False

    def left(self, now: float, waits: bool) -> float:
        """Seconds until the limit if nothing changes; ``waits``: whether the agent waits from now on."""
        passed = now - self._since
        stood = min(passed, self._wait_s) if self._waits else 0.0
        self._wait_s -= stood
        self._own_s -= passed - stood
        self._since, self._waits = now, waits
        return self._own_s + (self._wait_s if waits else 0.0)
