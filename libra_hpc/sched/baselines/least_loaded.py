"""Three rules without any knowledge of lengths or prompts: every turn to the engine with the least load.

* `least_loaded`: load = KV tokens of turns in flight.  One 32k-token turn weighs more than ten short ones, and a
  trajectory whose tool runs weighs nothing. Ties: fewer turns, then the engine of the last turn (its prefix may still
  be cached), then the first to join.  Not sticky otherwise.
* `least_requests`: load = turns in flight, ties rotating: the "least connections" of Libra's ``load_balance`` scheduler
  and of vLLM's routers.  Not sticky.
* `sticky`: the engine of the last turn while it is eligible, else the one with the fewest turns in flight: verl's
  ``GlobalRequestLoadBalancer`` (verl/workers/rollout/llm_server.py).  The first turn decides for the whole trajectory.
"""

from __future__ import annotations

from libra_hpc.sched.baselines.common import Baseline, eligible, last_engine, wait
from libra_hpc.sched.board import Board, EngineView
from libra_hpc.sched.protocol import Decision, TurnView

_REQUESTS = "{engine} has the fewest turns in flight: {inflight:.0f}"


class LeastLoaded(Baseline):
    """See the module."""

    name = "least_loaded"

    def route(self, turn: TurnView, board: Board, now: float) -> Decision:
        """See `Policy.route`."""
        free = eligible(turn, board)
        if not free:
            return wait(board)
        best = min(free, key=lambda e: (e.inflight_tokens, e.inflight, e.engine != turn.engine))
        numbers = {**_numbers(best), "inflight_tokens": float(best.inflight_tokens)}
        return Decision(
            best.engine, 0, best.level, "{engine} has the fewest KV tokens in flight: {inflight_tokens:.0f}", numbers
        )


class LeastRequests(Baseline):
    """See the module."""

    name = "least_requests"

    def __init__(self) -> None:
        self._used: dict[str, int] = {}
        self._count = 0

    def route(self, turn: TurnView, board: Board, now: float) -> Decision:
        """See `Policy.route`."""
        free = eligible(turn, board)
        if not free:
            return wait(board)
        best = min(free, key=lambda e: (e.inflight, self._used.get(e.engine, 0)))
        self._count += 1
        self._used[best.engine] = self._count
        return Decision(best.engine, 0, best.level, _REQUESTS, _numbers(best))


class Sticky(LeastRequests):
    """See the module."""

    name = "sticky"

    def route(self, turn: TurnView, board: Board, now: float) -> Decision:
        """See `Policy.route`."""
        last = last_engine(turn, eligible(turn, board))
        if last is not None:
            return Decision(last.engine, 0, last.level, "{engine} ran the last turn", _numbers(last))
        return super().route(turn, board, now)


def _numbers(engine: EngineView) -> dict[str, float | str]:
    return {"engine": engine.engine, "inflight": float(engine.inflight)}
