"""What rules share: eligible engines, live trajectories per engine, preferred TP degrees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from libra_hpc.policies.scheduling.board import Board, EngineView
from libra_hpc.policies.scheduling.protocol import Decision, Finished, TurnView


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
    """Open engines with a free slot that can hold the context.

    If no engine on the board can hold it, all free ones: an engine refuses the turn, which would wait for ever.
    """
    context = turn.context_tokens
    free = [e for e in board.engines.values() if e.open and e.inflight < e.cap]
    fitting = [e for e in free if e.kv_capacity >= context]
    if fitting or any(e.kv_capacity >= context for e in board.engines.values()):
        return fitting
    return free


def wait(board: Board, level: int = 0, priority: int = 0) -> Decision:
    """The decision when no engine is eligible."""
    return Decision(
        engine="",
        priority=priority,
        level=level,
        template="wait: none of {engines:.0f} engines has a free slot that fits",
        numbers={"engines": float(len(board.engines))},
    )


def last_engine(turn: TurnView, among: Iterable[EngineView]) -> EngineView | None:
    """The engine of the last turn, if it is ``among`` these; its cache may hold the prefix."""
    return next((e for e in among if e.engine == turn.engine), None) if turn.engine else None


def first_of_tps(
    tps: Iterable[int], among: Sequence[EngineView], load: Callable[[EngineView], float]
) -> EngineView | None:
    """The least loaded engine of the first TP degree in ``tps`` that is ``among`` these; ties: the first to join."""
    for tp in tps:
        members = [e for e in among if e.tp == tp]
        if members:
            return min(members, key=load)
    return None


class LiveTrajectories:
    """The engine of each live trajectory, tool time included: the connections of a least-connections balancer."""

    def __init__(self) -> None:
        self._home: dict[str, str] = {}
        self._count: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._home)

    def count(self, engine: EngineView) -> int:
        """Number of live trajectories at an engine."""
        return self._count[engine.engine]

    def put(self, trajectory: str, engine: str) -> None:
        """Count a trajectory at ``engine`` only."""
        self.drop(trajectory)
        self._home[trajectory] = engine
        self._count[engine] += 1

    def drop(self, trajectory: str) -> None:
        """A trajectory ended."""
        engine = self._home.pop(trajectory, None)
        if engine is not None:
            self._count[engine] -= 1
            if not self._count[engine]:
                del self._count[engine]
