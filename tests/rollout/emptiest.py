"""A policy of a few lines."""

from __future__ import annotations

from libra_hpc.policies.scheduling.board import Board
from libra_hpc.policies.scheduling.protocol import Decision, Finished, TurnView


class Emptiest:
    """First come, first served, to the engine with the fewest tokens in flight."""

    name = "emptiest"

    def __init__(self) -> None:
        self.learned: list[Finished] = []
        self.given_up: list[str] = []

    def key(self, turn: TurnView, now: float) -> float:
        return turn.ready_at

    def route(self, turn: TurnView, board: Board, now: float) -> Decision:
        free = [engine for engine in board.engines.values() if engine.free]
        if not free:
            return Decision(engine="", priority=0, level=0, template="all full", numbers={})
        best = min(free, key=lambda engine: engine.inflight_tokens)
        return Decision(
            engine=best.engine,
            priority=3,
            level=best.level,
            template="{tokens:.0f} tokens at {engine}",
            numbers={"tokens": best.inflight_tokens, "engine": best.engine},
        )

    def finished(self, record: Finished, now: float) -> None:
        self.learned.append(record)

    def forget(self, trajectory: str) -> None:
        self.given_up.append(trajectory)
