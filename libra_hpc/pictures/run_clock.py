"""The time axis of a run: seconds with nodes, so that hours in the queue between attempts take no room.

A restart inside a job keeps its nodes and therefore its room.  No line crosses a start.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from libra_hpc.facts.starts import RunStart, job_seconds


class RunClock:
    """Epoch seconds -> seconds on the axis."""

    def __init__(self, starts: Sequence[RunStart]) -> None:
        self._starts = starts
        self._begins = [start.start for start in starts]
        self._queued: list[float] = []
        """Seconds in the queue up to each start."""
        for start in starts:
            self._queued.append((self._queued[-1] if self._queued else 0.0) + start.queued_s)
        self.length = job_seconds(starts)

    def at(self, t: float) -> float:
        """Place of a time on the axis; a time in the queue is at the end of the attempt before."""
        index = self.start_of(t)
        if index < 0:
            return 0.0
        following = self._starts[index + 1 : index + 2]
        if following and following[0].queued_s:
            t = min(t, self._starts[index].end)
        return min(t - self._begins[0] - self._queued[index], self.length)

    def start_of(self, t: float) -> int:
        """Index of the start that a time belongs to; -1 before the first."""
        return bisect_right(self._begins, t) - 1

    def line(self, times: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
        """Points of a line, with a NaN between the steps of two starts."""
        xs: list[float] = []
        ys: list[float] = []
        before: int | None = None
        for t, value in zip(times, values, strict=True):
            index = self.start_of(t)
            if before is not None and index != before:
                xs.append(self.at(t))
                ys.append(math.nan)
            xs.append(self.at(t))
            ys.append(value)
            before = index
        return xs, ys
