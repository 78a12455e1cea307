"""The event queue of a simulation, deterministic.

Events at one moment are handled in this order, first come, first served among equals:

1. arrivals, answers and returns of tools
2. one routing pass for all of them
3. steps of the engines, by engine number
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any

ARRIVAL, ROUTING, STEP = 0, 1, 2
"""Ranks: the order of events at one moment."""


class Events:
    """A heap of events; `now` is the time of the event in progress, seconds from the start."""

    def __init__(self) -> None:
        self.now = 0.0
        self.count = 0
        self._heap: list[tuple[float, int, int, int, Callable[[Any], None], Any]] = []

    def at(self, at: float, act: Callable[[Any], None], argument: Any, rank: int = ARRIVAL, number: int = 0) -> None:
        """Call ``act(argument)`` at time ``at`` >= `now`."""
        self.count += 1
        heappush(self._heap, (at, rank, number, self.count, act, argument))

    def drop(self, *acts: Callable[[Any], None], argument: Any = None) -> None:
        """Drop the events that would call one of ``acts``, all of them or those with this argument."""
        self._heap = [e for e in self._heap if e[4] not in acts or (argument is not None and e[5] is not argument)]
        heapify(self._heap)

    def next(self) -> bool:
        """Handle the next event; False when there is none."""
        if not self._heap:
            return False
        self.now, _, _, _, act, argument = heappop(self._heap)
        act(argument)
        return True
