"""ROSE's five steps for a turn (arXiv 2605.06534), which know neither lengths nor how long a borrowed engine stays.

1. The engine of the last turn, if it has room: `MOST` turns, and KV cache for the context.
2. An own engine with room, the one with the fewest turns in flight.
3. A borrowed engine with room; a paused one is closed, so its users are within their limits.
4. The least loaded engine with a free slot.
5. The turn waits.
"""

from __future__ import annotations

from typing import Final

from libra_hpc.policies.scheduling.board import Board, EngineView
from libra_hpc.policies.scheduling.protocol import Decision, TurnView
from libra_hpc.policies.scheduling.rules.rule import Rule, eligible, last_engine, wait

MOST: Final = 16
"""Turns in flight at an engine with room, as in ROSE for contexts of 32K tokens."""


class AffineFirst(Rule):
    """See the module."""

    name = "affine_first"

    def route(self, turn: TurnView, board: Board, now: float) -> Decision:
        """See `Policy.route`."""
        free = eligible(turn, board)
        if not free:
            return wait(board)
        roomy = [e for e in free if e.inflight < MOST and e.inflight_tokens + turn.context_tokens <= e.kv_capacity]
        best, reason = last_engine(turn, roomy), "{engine} ran the last turn and has room"
        if best is None:
            best = min(roomy or free, key=lambda e: (bool(roomy) and e.borrowed, e.inflight))
            reason = "{engine} has the fewest turns in flight: {inflight:.0f}"
        return _decision(best, reason)


def _decision(engine: EngineView, reason: str) -> Decision:
    numbers: dict[str, float | str] = {"engine": engine.engine, "inflight": float(engine.inflight)}
    return Decision(engine=engine.engine, priority=0, level=engine.level, template=reason, numbers=numbers)
