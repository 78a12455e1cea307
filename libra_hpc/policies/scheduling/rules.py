"""Two rules that ignore lengths and prompts, to measure `cmlfq` against.  More: ``bench/policies``.

- `least_loaded`: the fewest KV tokens in flight.  Ties: fewer turns, then the engine of the last turn, then the first
  to join.  A trajectory in a tool call counts nothing.
- `sticky`: the engine of the last turn while it is eligible, else the fewest turns in flight, ties rotating; verl's
  ``GlobalRequestLoadBalancer``.

A turn waits only if no engine is eligible, first come, first served.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .board import Board, EngineView
from .protocol import Decision, Finished, TurnView


class Rule:
    """First come, first served, without learning, unless a subclass overrides it."""

    name = ""

    def key(self, turn: TurnView, now: float) -> float:
        """See `Policy.key`: the time the turn became ready."""
        return turn.ready_at

    def finished(self, record: Finished, now: float) -> None:
        """See `Policy.finished`."""
        self.forget(record.trajectory)

    def forget(self, trajectory: str) -> None:
        """See `Policy.forget`."""


def eligible(turn: TurnView, board: Board) -> list[EngineView]:
    """Engines with a free slot whose cache can hold the context; any, if no cache can: an engine refuses the turn."""
    engines = list(board.engines.values())
    return [e for e in [e for e in engines if e.kv_capacity >= turn.context_tokens] or engines if e.free]


def last_engine(turn: TurnView, among: Iterable[EngineView]) -> EngineView | None:
    """The engine of the last turn, if it is ``among`` these; its cache may hold the prefix."""
    return next((engine for engine in among if engine.engine == turn.engine), None)


def send(engine: EngineView, template: str, **numbers: float | str) -> Decision:
    """The decision for an engine; ``template`` may name ``engine`` and the ``numbers``."""
    found = {"engine": engine.engine, **numbers}
    return Decision(engine=engine.engine, priority=0, level=engine.level, template=template, numbers=found)


def wait(board: Board, level: int = 0, priority: int = 0) -> Decision:
    """The decision when no engine is eligible."""
    template, numbers = (
        "wait: none of {engines} engines has a free slot that fits",
        {"engines": str(len(board.engines))},
    )
    return Decision(engine="", priority=priority, level=level, template=template, numbers=numbers)


class LiveTrajectories:
    """The engine of each live trajectory, tool time included; not used here, but by rules of ``bench/policies``."""

    def __init__(self) -> None:
        self._at: dict[str, str] = {}
        self._count: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._at)

    def count(self, engine: EngineView) -> int:
        """Number of live trajectories at an engine."""
        return self._count[engine.engine]

    def put(self, trajectory: str, engine: str) -> None:
        """Count a trajectory at ``engine`` only."""
        self.drop(trajectory)
        self._at[trajectory] = engine
        self._count[engine] += 1

    def drop(self, trajectory: str) -> None:
        """A trajectory ended."""
        if engine := self._at.pop(trajectory, ""):
            self._count[engine] -= 1


class LeastLoaded(Rule):
    """Fewest KV tokens in flight."""

    name = "least_loaded"

    def route(self, turn: TurnView, board: Board, now: float) -> Decision:
        """See `Policy.route`."""
        free = eligible(turn, board)
        best = min(free, key=lambda e: (e.inflight_tokens, e.inflight, e.engine != turn.engine), default=None)
        if best is None:
            return wait(board)
        return send(best, "{engine} has the fewest KV tokens in flight: {tokens}", tokens=best.inflight_tokens)


class Sticky(Rule):
    """The engine of the last turn, else the fewest turns in flight."""

    name = "sticky"

    def __init__(self) -> None:
        self._sent: Counter[str] = Counter()
        """First turns by engine."""

    def route(self, turn: TurnView, board: Board, now: float) -> Decision:
        """See `Policy.route`."""
        free = eligible(turn, board)
        if (last := last_engine(turn, free)) is not None:
            return send(last, "{engine} ran the last turn")
        best = min(free, key=lambda e: (e.inflight, self._sent[e.engine]), default=None)
        if best is None:
            return wait(board)
        self._sent[best.engine] += 1
        return send(best, "{engine} has the fewest turns in flight: {turns}", turns=best.inflight)
