"""A budget of bandwidth as a token bucket: pure, with time as an argument."""

from __future__ import annotations

BURST_S = 0.2
"""Of unused budget that may be spent at once. Half: pauses of the caller cost bandwidth; double: longer bursts."""


class TokenBucket:
    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._spent_until = float("-inf")
        """When the budget will have made up for what was sent."""

    def delay_s(self, count: int, now: float) -> float:
        """Take ``count`` bytes from the budget; returns after how many seconds they may be sent."""
        begin = max(self._spent_until, now - BURST_S)
        self._spent_until = begin + count / self._rate
        return max(0.0, begin - now)
