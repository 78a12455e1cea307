"""A budget of bandwidth, which several threads spend together."""

from __future__ import annotations

import math
import threading
import time

PIECES = 32
"""A second. Half: eight threads that wait for each other look stopped to their peers; double: more system calls."""
BURST_S = 0.2
"""Seconds of unused budget that may be spent at once. Half: pauses of the caller cost bandwidth; double: longer
bursts."""


class BandwidthPace:
    def __init__(self, bytes_per_s: float) -> None:
        """0: no limit."""
        self._rate = bytes_per_s or math.inf
        self.most = max(1.0, self._rate / PIECES)
        """Bytes to move at once."""
        self._spent_until = -math.inf
        """When the budget will have made up for what was moved."""
        self._spending = threading.Lock()

    def wait(self, count: int) -> None:
        """Until ``count`` bytes may be moved."""
        with self._spending:
            now = time.monotonic()
            begin = max(self._spent_until, now - BURST_S)
            self._spent_until = begin + count / self._rate
        if begin > now:
            time.sleep(begin - now)
