"""Simulated time of one process: the wall clock times ``speedup``, hence synchronous in all processes of a machine.

What is not modelled (messages, scheduling, this interpreter) takes its real time, which counts ``speedup`` times.
"""

from __future__ import annotations

import select
import time


class Clock:
    def __init__(self, speedup: float) -> None:
        self.speedup = speedup
        self._begin = time.monotonic()

    def now(self) -> float:
        return (time.monotonic() - self._begin) * self.speedup

    def wall(self, seconds: float) -> float:
        return seconds / self.speedup


def wait(fd: int, seconds: float) -> None:
    """Sleep for wall ``seconds``; raises `EOFError` as soon as the other end of the socket ``fd`` is closed."""
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP)
    if poll.poll(max(0.0, seconds) * 1000.0):
        raise EOFError("the agent closed the socket")
