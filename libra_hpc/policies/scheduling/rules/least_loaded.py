"""Two rules that ignore lengths and prompts: every turn goes to the engine with the least load.

- `least_loaded`: KV tokens of turns in flight.  Ties: fewer turns, then the engine of the last turn, then the first to
  join.  A trajectory in a tool call counts nothing.
- `sticky`: the engine of the last turn while it is eligible, else the fewest turns in flight, ties rotating; verl's
  ``GlobalRequestLoadBalancer``.
"""

from __future__ import annotations

from libra_hpc.policies.scheduling.board import Board, EngineView
from libra_hpc.policies.scheduling.protocol import Decision, TurnView

from .rule import Rule, eligible, last_engine, wait


class LeastLoaded(Rule):
    """Fewest KV tokens in flight."""

    name = "least_loaded"

    def route(self, turn: TurnView, board: Board, now: float) -> Decision:
        """See `Policy.route`."""
        free = eligible(turn, board)
        if not free:
            return wait(board)
        best = min(free, key=lambda e: (e.inflight_tokens, e.inflight, e.engine != turn.engine))
        numbers = {**_numbers(best), "inflight_tokens": float(best.inflight_tokens)}
        reason = "{engine} has the fewest KV tokens in flight: {inflight_tokens:.0f}"
        return Decision(engine=best.engine, priority=0, level=best.level, template=reason, numbers=numbers)


class Sticky(Rule):
    """The engine of the last turn, else the fewest turns in flight."""

    name = "sticky"

    def __init__(self) -> None:
        self._used: dict[str, int] = {}
        self._count = 0

    def route(self, turn: TurnView, board: Board, now: float) -> Decision:
        """See `Policy.route`."""
        free = eligible(turn, board)
        if not free:
            return wait(board)
        best, reason = last_engine(turn, free), "{engine} ran the last turn"
        if best is None:
            best = min(free, key=lambda e: (e.inflight, self._used.get(e.engine, 0)))
            self._count += 1
            self._used[best.engine] = self._count
            reason = "{engine} has the fewest turns in flight: {inflight:.0f}"
        return Decision(engine=best.engine, priority=0, level=best.level, template=reason, numbers=_numbers(best))


def _numbers(engine: EngineView) -> dict[str, float | str]:
    return {"engine": engine.engine, "inflight": float(engine.inflight)}
