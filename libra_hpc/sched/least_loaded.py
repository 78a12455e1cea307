"""`least_loaded`: every turn to the engine with the fewest KV tokens in flight.

The baseline a causal scheduler has to beat.  It knows no lengths and no prompts.  Load is counted in KV tokens of turns in flight, not in
requests: one 32k-token turn weighs more than ten short ones, and a trajectory whose tool runs holds nothing.  Ties go to the engine with fewer
turns, then to the one that ran the last turn (its prefix may still be cached), then to the name.  A turn waits when every engine is at its
limit; waiting turns go first come, first served, so none starves.
"""

from __future__ import annotations

from collections.abc import Sequence

from libra_hpc.sched.buckets import tp_classes
from libra_hpc.sched.protocol import Decision, EngineView, Finished, TurnView


class LeastLoaded:
    """See the module."""

    name = "least_loaded"

    def route(self, turn: TurnView, engines: Sequence[EngineView], now: float) -> Decision:
        """Choose the engine with the fewest KV tokens in flight, or wait."""
        free = [e for e in engines if e.inflight < e.max_inflight]
        if not free:
            return Decision("", 0, 0, f"wait: all {len(engines)} engines are at their limit", {"engines": float(len(engines))})
        best = min(free, key=lambda e: (e.inflight_tokens, e.inflight, e.engine != turn.engine, e.engine))
        numbers = {"inflight_tokens": float(best.inflight_tokens), "inflight": float(best.inflight)}
        reason = f"{best.engine} has the fewest KV tokens in flight: {best.inflight_tokens}"
        return Decision(best.engine, 0, tp_classes(engines).index(best.tp), reason, numbers)

    def order(self, turns: Sequence[TurnView], now: float) -> list[int]:
        """Longest wait first."""
        return sorted(range(len(turns)), key=lambda i: -turns[i].waited_s)

    def finished(self, record: Finished, now: float) -> None:
        """Nothing to learn: this policy predicts nothing."""
