"""`tp_sticky`: a first turn goes to the engine with the least (load + 1) / TP; later turns stay there.

The simplest rule that knows that an engine of eight GPUs serves more than one of a single GPU.

- Load: trajectories that live at the engine, tool time included; with ``live=False`` turns in flight.
- Ties -> the first to join.  The engine of the last turn is full -> the least loaded one, as at the start.
"""

from __future__ import annotations

from libra_hpc.policies.scheduling.board import Board
from libra_hpc.policies.scheduling.protocol import Decision, TurnView
from libra_hpc.policies.scheduling.rules import LiveTrajectories, Rule, eligible, last_engine, wait


class TpSticky(Rule):
    """Least load per GPU, then sticky."""

    name = "tp_sticky"

    def __init__(self, live: bool = True) -> None:
        self._by_trajectories = live
        self._live = LiveTrajectories()

    def route(self, turn: TurnView, board: Board, now: float) -> Decision:
        free = eligible(turn, board)
        chosen = last_engine(turn, free)
        reason = "{engine} ran the last turn"
        if chosen is None and free:
            self._live.drop(turn.trajectory)
            load = self._live.count if self._by_trajectories else (lambda e: e.inflight)
            chosen = min(free, key=lambda e: (load(e) + 1) / e.tp)
            reason = "{engine} has the least load per GPU"
        if chosen is None:
            return wait(board)
        self._live.put(turn.trajectory, chosen.engine)
        numbers: dict[str, float | str] = {"engine": chosen.engine, "inflight": float(chosen.inflight)}
        return Decision(engine=chosen.engine, priority=0, level=chosen.level, template=reason, numbers=numbers)

    def forget(self, trajectory: str) -> None:
        self._live.drop(trajectory)
