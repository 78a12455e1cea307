"""Seats: the work each engine still has in front of it, as far as the trajectories placed there are known.

A trajectory *sits* at the engine of its last turn, through its tool gaps too, because that is where it will want to go
on.  With l_j the tokens trajectory j is expected to generate, c_j its mean context while it does, p_j the tokens it
will have prefilled, an engine of class costs (base, slope, prefill) ends its residents' work after

    finish = base * max((sum_j u_j ** 4) ** (1/4), sum_j l_j c_j / capacity) + slope * sum_j l_j c_j + prefill * sum_j
    p_j:

every step costs ``base`` once for the whole batch, and there are as many steps as the longest resident has tokens, or
as many as it takes when only ``capacity`` KV tokens fit at once; every token costs ``slope`` per KV token of its
context.  Which resident will be the longest is not known, l_j being but an expectation.  The fourth root of the sum of
fourth powers of the *reach* u_j stands for the expected longest: close to the longest when one stands out, and growing
with the number of those that may yet become it.  All terms are sums, so a turn changes them in constant time.

`EngineLoads.lightest` finds the engine of a class that finishes first through a heap of lower bounds, repaired when an
entry surfaces; an entry may be up to `SLACK` = 0.2 % too high, which saves many pushes.  (5 % are too many: with a
hundred trajectories at each engine, five more or less would go unnoticed.)
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from math import sqrt
from typing import Final

from .board import Board, EngineView, TpClass

ENTRY_SLACK: Final = 0.998


class Resident:
    """What one trajectory adds to its load."""

    __slots__ = ("prefill", "reach", "load", "work")

    def __init__(self) -> None:
        self.load: EngineLoad | None = None
        self.reach = self.work = self.prefill = 0.0
        """Tokens it may have to generate; those it is expected to, times the mean context; tokens to prefill."""


class EngineLoad:
    """One engine; see the module."""

    __slots__ = ("entry", "finish", "heap", "tp_class", "kv_capacity", "prefill", "reach4", "residents", "view", "work")

    def __init__(self, view: EngineView) -> None:
        self.view = view
        self.tp_class: TpClass = view.tp_class
        self.kv_capacity = float(max(1, view.kv_capacity))
        self.reach4 = self.work = self.prefill = 0.0
        """Sums over residents: fourth powers of the reach, work, tokens to prefill."""
        self.residents = 0
        self.finish = 0.0
        """Seconds, see the module."""
        self.entry = 0.0
        """Its value in the heap."""
        self.heap: list[tuple[float, int, EngineLoad]] = []
        """That of its class, as of the last `EngineLoads.follow`."""

    def finish_with(self, reach: float, work: float, prefill: float) -> float:
        """Seconds until everything is done when one more trajectory sits here."""
        tp_class = self.tp_class
        work += self.work
        reach *= reach
        steps = sqrt(sqrt(self.reach4 + reach * reach))
        if work > steps * self.kv_capacity:
            steps = work / self.kv_capacity
        return tp_class.base_s * steps + tp_class.slope_s * work + tp_class.prefill_s * (self.prefill + prefill)

    def add(self, resident: Resident, reach: float, work: float, prefill: float, finish: float) -> None:
        """A trajectory sits down; ``finish`` as `finish_with` gave it."""
        resident.reach, resident.work, resident.prefill, resident.load = reach, work, prefill, self
        reach *= reach
        self.reach4 += reach * reach
        self.work += work
        self.prefill += prefill
        self.residents += 1
        self.finish = finish

    def remove(self, resident: Resident) -> None:
        """A resident stands up."""
        resident.load = None
        self.residents -= 1
        if self.residents:
            self.work -= resident.work
            self.prefill -= resident.prefill
            reach = resident.reach * resident.reach
            self.reach4 = max(0.0, self.reach4 - reach * reach)
        else:
            # Sums of floats are exact again once the engine is empty.
            self.reach4 = self.work = self.prefill = 0.0
        self.finish = self.finish_with(0.0, 0.0, 0.0)


class EngineLoads:
    """The loads of all engines of a board."""

    def __init__(self) -> None:
        self.generation = -1
        """Of the board, when it was last followed."""
        self._loads: dict[str, EngineLoad] = {}
        self._heaps: list[list[tuple[float, int, EngineLoad]]] = []
        self._count = 0

    def get(self, engine: str) -> EngineLoad | None:
        """The load of an engine."""
        return self._loads.get(engine)

    def sync(self, board: Board) -> None:
        """Take over which engines there are and what their steps cost, if that has changed."""
        if board.generation == self.generation:
            return
        self.generation = board.generation
        before = self._loads
        self._loads = {}
        for name, view in board.engines.items():
            load = before.get(name)
            self._loads[name] = load if load is not None and load.view is view else EngineLoad(view)
        self._heaps = []
        for tp_class in board.classes:
            heap: list[tuple[float, int, EngineLoad]] = []
            for view in tp_class.members:
                load = self._loads[view.engine]
                load.entry = load.finish = load.finish_with(0.0, 0.0, 0.0)
                load.heap = heap
                self._count += 1
                heap.append((load.entry, self._count, load))
            heapify(heap)
            self._heaps.append(heap)

    def first_to_finish(self, tp_class: TpClass) -> EngineLoad | None:
        """The engine of a class with a free slot that finishes first; the one with the fewest tokens in flight when
        that one is full; None when all are."""
        heap = self._heaps[tp_class.level]
        while True:
            value, count, load = heap[0]
            if value != load.entry:
                heappop(heap)
            elif load.finish * ENTRY_SLACK > value:
                load.entry = load.finish
                heapreplace(heap, (load.finish, count, load))
            else:
                break
        view = load.view
        if view.open and view.inflight < view.cap:
            return load
        least = tp_class.least()
        return self._loads[least.engine] if least is not None else None

    def update_entry(self, load: EngineLoad) -> None:
        """A load may finish earlier than its entry says."""
        if load.finish < ENTRY_SLACK * load.entry:
            load.entry = load.finish
            self._count += 1
            # Engines may have come or gone since the heaps were made: those in use next are made anew then.
            heap = load.heap
            heappush(heap, (load.finish, self._count, load))
            if len(heap) > 64 + 8 * len(load.tp_class.members):
                heap[:] = [item for item in heap if item[0] == item[2].entry]
                heapify(heap)
