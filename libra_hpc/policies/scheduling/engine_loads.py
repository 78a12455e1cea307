"""Engine loads: the seconds until each engine finishes the trajectories placed there.

A trajectory counts at the engine of its last turn, through its tool gaps too.  With l_j expected tokens, c_j the mean
context meanwhile, p_j tokens to prefill and u_j the *reach* of trajectory j:

    work = sum_j l_j c_j

    steps = max((sum_j u_j ** 4) ** (1/4), work / KV capacity)

    finish = base * steps + slope * work + prefill * sum_j p_j

The fourth root stands for the expected longest trajectory.  All terms are sums: a turn changes them in constant time.
"""

from __future__ import annotations

from math import exp, sqrt

from .board import Board, EngineView
from .residency import Claim, EngineCache


class Placed:
    """What one trajectory adds to the load of its engine."""

    def __init__(self) -> None:
        self.load: EngineWork | None = None
        self.reach = self.work = self.prefill = 0.0
        """Tokens it may generate; expected tokens times mean context; tokens to prefill."""

    def leave(self) -> None:
        """Count nowhere."""
        if self.load is not None:
            self.load.remove(self)


class EngineWork:
    """Sums over the trajectories placed at one engine."""

    def __init__(self, view: EngineView) -> None:
        self.view = view
        self.reach4 = self.work = self.prefill = 0.0
        """Sums of reach ** 4, of work, and of tokens to prefill."""
        self.cache = EngineCache()
        self.placed = 0
        self.kv_capacity = self.cache.capacity = float(max(1, view.kv_capacity))
        self.finish = 0.0
        """Seconds until all that is placed here is done."""

    def expected(self, elsewhere: EngineWork, *, left: float, context: int, alone: float, moved: float) -> float:
        """What a trajectory adds to the late finish here and elsewhere, if it may have to leave.

        ``left``: its tokens; ``alone``: finish here with all of it; ``moved``: finish elsewhere with all of it.
        """
        leaves = self.view.leaves_per_s * self.view.base_s * left
        if leaves < 1e-6:
            return added(self.finish, alone)
        gone = 1.0 - exp(-leaves)
        here = gone / leaves
        there = (1.0 - here) * (moved - elsewhere.finish) + gone * context * elsewhere.view.prefill_s
        return added(self.finish, self.finish + here * (alone - self.finish)) + added(
            elsewhere.finish, elsewhere.finish + there
        )

    def finish_with(self, reach: float, work: float, prefill: float) -> float:
        """Seconds until all is done with one more trajectory."""
        view = self.view
        work += self.work
        reach *= reach
        steps = sqrt(sqrt(self.reach4 + reach * reach))
        if work > steps * self.kv_capacity:
            steps = work / self.kv_capacity
        return view.base_s * steps + view.slope_s * work + view.prefill_s * (self.prefill + prefill)

    def add(self, placed: Placed, reach: float, work: float, prefill: float) -> None:
        """Place a trajectory."""
        self.finish = self.finish_with(reach, work, prefill)
        placed.reach, placed.work, placed.prefill, placed.load = reach, work, prefill, self
        reach *= reach
        self.reach4 += reach * reach
        self.work += work
        self.prefill += prefill
        self.placed += 1

    def remove(self, placed: Placed) -> None:
        """Remove a trajectory."""
        placed.load = None
        self.placed -= 1
        if self.placed:
            self.work -= placed.work
            self.prefill -= placed.prefill
            reach = placed.reach * placed.reach
            self.reach4 = max(0.0, self.reach4 - reach * reach)
        else:
            # An empty engine clears the rounding errors of the sums.
            self.reach4 = self.work = self.prefill = 0.0
        self.finish = self.finish_with(0.0, 0.0, 0.0)


class EngineLoads:
    """The loads of all engines of a board.

    Of alike engines the one that finishes first adds least.  A slower one may finish first and still add more.
    """

    def __init__(self) -> None:
        self.generation = -1
        """Generation of the board at the last `sync`."""
        self.alike: list[list[EngineWork]] = []
        """Engines of one TP class and one pace; own ones and borrowed ones are apart."""
        self._loads: dict[str, EngineWork] = {}

    def get(self, engine: str) -> EngineWork | None:
        """The load of an engine."""
        return self._loads.get(engine)

    def sync(self, board: Board) -> None:
        """Read the engines and step costs of the board, if they have changed."""
        if board.generation == self.generation:
            return
        self.generation = board.generation
        before, self._loads = self._loads, {}
        alike: dict[tuple[int, float, bool], list[EngineWork]] = {}
        for name, view in board.engines.items():
            load = before.get(name)
            if load is None or load.view is not view:
                load = EngineWork(view)
            load.finish = load.finish_with(0.0, 0.0, 0.0)
            self._loads[name] = load
            alike.setdefault((view.tp, view.pace, view.borrowed), []).append(load)
        self.alike = list(alike.values())

    def elsewhere(self) -> EngineWork | None:
        """The own engine that would take a turn that must leave a borrowed one; None where there is no own engine."""
        own = [load for load in self._loads.values() if not load.view.borrowed]
        return min(own, key=lambda load: load.finish, default=None)

    def first_to_finish(self, alike: list[EngineWork], claim: Claim, context: int) -> EngineWork | None:
        """Return the engine that finishes first among those with a free slot and room for ``context`` tokens."""
        best: EngineWork | None = None
        for load in alike:
            if (best is None or load.finish < best.finish) and load.view.free and load.cache.has_room(claim, context):
                best = load
        return best

    def lack_room(self, claim: Claim, context: int) -> bool:
        """Whether an engine could take the turn if its cache had room."""
        return any(load.view.free and not load.cache.has_room(claim, context) for load in self._loads.values())


def added(before: float, after: float) -> float:
    """How much the late finish grows: after ** 4 - before ** 4."""
    a, b = after * after, before * before
    return a * a - b * b
