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

`Seats.lightest` finds the engine of a class that finishes first through a heap of lower bounds, repaired when an entry
surfaces; an entry may be up to `SLACK` = 0.2 % too high, which saves many pushes.  (5 % are too many: with a hundred
trajectories at each engine, five more or less would go unnoticed.)
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from math import sqrt
from typing import Final

from .board import Board, EngineView, TpClass

SLACK: Final = 0.998


class Resident:
    """What one trajectory adds to its seat."""

    __slots__ = ("prefill", "reach", "seat", "work")

    def __init__(self) -> None:
        self.seat: Seat | None = None
        self.reach = self.work = self.prefill = 0.0
        """Tokens it may have to generate; those it is expected to, times the mean context; tokens to prefill."""


class Seat:
    """One engine; see the module."""

    __slots__ = ("entry", "finish", "heap", "home", "kv_capacity", "prefill", "reach4", "residents", "view", "work")

    def __init__(self, view: EngineView) -> None:
        self.view = view
        self.home: TpClass = view.home
        self.kv_capacity = float(max(1, view.kv_capacity))
        self.reach4 = self.work = self.prefill = 0.0
        """Sums over residents: fourth powers of the reach, work, tokens to prefill."""
        self.residents = 0
        self.finish = 0.0
        """Seconds, see the module."""
        self.entry = 0.0
        """Its value in the heap."""
        self.heap: list[tuple[float, int, Seat]] = []
        """That of its class, as of the last `Seats.follow`."""

    def finish_with(self, reach: float, work: float, prefill: float) -> float:
        """Seconds until everything is done when one more trajectory sits here."""
        home = self.home
        work += self.work
        reach *= reach
        steps = sqrt(sqrt(self.reach4 + reach * reach))
        if work > steps * self.kv_capacity:
            steps = work / self.kv_capacity
        return home.base_s * steps + home.slope_s * work + home.prefill_s * (self.prefill + prefill)

    def sit(self, resident: Resident, reach: float, work: float, prefill: float, finish: float) -> None:
        """A trajectory sits down; ``finish`` as `finish_with` gave it."""
        resident.reach, resident.work, resident.prefill, resident.seat = reach, work, prefill, self
        reach *= reach
        self.reach4 += reach * reach
        self.work += work
        self.prefill += prefill
        self.residents += 1
        self.finish = finish

    def leave(self, resident: Resident) -> None:
        """A resident stands up."""
        resident.seat = None
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


class Seats:
    """The seats of all engines of a board."""

    def __init__(self) -> None:
        self.generation = -1
        """Of the board, when it was last followed."""
        self._seats: dict[str, Seat] = {}
        self._heaps: list[list[tuple[float, int, Seat]]] = []
        self._count = 0

    def get(self, engine: str) -> Seat | None:
        """The seat of an engine."""
        return self._seats.get(engine)

    def follow(self, board: Board) -> None:
        """Take over which engines there are and what their steps cost, if that has changed."""
        if board.generation == self.generation:
            return
        self.generation = board.generation
        before = self._seats
        self._seats = {}
        for name, view in board.engines.items():
            seat = before.get(name)
            self._seats[name] = seat if seat is not None and seat.view is view else Seat(view)
        self._heaps = []
        for members in board.classes:
            heap: list[tuple[float, int, Seat]] = []
            for view in members.members:
                seat = self._seats[view.engine]
                seat.entry = seat.finish = seat.finish_with(0.0, 0.0, 0.0)
                seat.heap = heap
                self._count += 1
                heap.append((seat.entry, self._count, seat))
            heapify(heap)
            self._heaps.append(heap)

    def lightest(self, members: TpClass) -> Seat | None:
        """The engine of a class with a free slot that finishes first; the one with the fewest tokens in flight when
        that one is full; None when all are."""
        heap = self._heaps[members.level]
        while True:
            value, count, seat = heap[0]
            if value != seat.entry:
                heappop(heap)
            elif seat.finish * SLACK > value:
                seat.entry = seat.finish
                heapreplace(heap, (seat.finish, count, seat))
            else:
                break
        view = seat.view
        if view.open and view.inflight < view.cap:
            return seat
        least = members.least()
        return self._seats[least.engine] if least is not None else None

    def changed(self, seat: Seat) -> None:
        """A seat may finish earlier than its entry says."""
        if seat.finish < SLACK * seat.entry:
            seat.entry = seat.finish
            self._count += 1
            # Engines may have come or gone since the heaps were made: those in use next are made anew then.
            heap = seat.heap
            heappush(heap, (seat.finish, self._count, seat))
            if len(heap) > 64 + 8 * len(seat.home.members):
                heap[:] = [item for item in heap if item[0] == item[2].entry]
                heapify(heap)
