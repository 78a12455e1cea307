"""A budget of bandwidth: `TokenBucket` is pure, with time as an argument; `BandwidthPace` waits by it."""

from __future__ import annotations

import math
import threading
import time

PIECES = 32
"""A second. Half: eight threads that wait for each other look stopped to their peers; double: more system calls."""
BURST_S = 0.2
"""Seconds of unused budget that may be spent at once. Half: pauses of the caller cost bandwidth; double: longer
bursts."""


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


class BandwidthPace:
    """One budget of several threads."""

    def __init__(self, bytes_per_s: float) -> None:
        """0: no limit."""
        self.most = int(bytes_per_s / PIECES) or math.inf
        """Bytes to move at once."""
        self._bucket = TokenBucket(bytes_per_s) if bytes_per_s else None
        self._spending = threading.Lock()

    def wait(self, count: int) -> None:
        """Until ``count`` bytes may be moved."""
        if self._bucket is not None:
            with self._spending:
                delay_s = self._bucket.delay_s(count, time.monotonic())
            time.sleep(delay_s)
