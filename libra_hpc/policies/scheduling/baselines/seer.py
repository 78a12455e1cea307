"""`seer`: probe first, then approximately longest first (Seer, arXiv 2511.14617, context-aware scheduling).

- First sample of a prompt -> its probe.  Probes go before all others; among them the fewest generated tokens first.
- Estimate of a group -> its longest finished trajectory; without one, as long as can be.
- The other samples -> by descending estimate; first come, first served among equals.
- The engine -> that of the last turn while it is eligible, else the fewest KV tokens in flight.  The published system
  has a shared KV pool and always takes the fewest (``pooled=True``).
"""

from __future__ import annotations

from libra_hpc.policies.scheduling.board import Board
from libra_hpc.policies.scheduling.protocol import Decision, Finished, TurnView

from .common import Baseline, Probes, eligible, last_engine, wait

LONGEST = 1 << 24
"""Tokens, above any context: estimate of a group without finished trajectories."""

PROBES = -(1 << 26)
"""Key of a probe without generated tokens: before any estimate."""


class Seer(Baseline):
    """Probes first, then the groups of the longest estimate."""

    name = "seer"

    def __init__(self, pooled: bool = False) -> None:
        self._pooled = pooled
        self._probes = Probes()
        self._longest: dict[str, int] = {}

    def key(self, turn: TurnView, now: float) -> float:
        """See `Policy.key`: probes by attained tokens, the others by descending estimate."""
        return float(self._place(turn))

    def route(self, turn: TurnView, board: Board, now: float) -> Decision:
        """See `Policy.route`."""
        place = self._place(turn)
        free = eligible(turn, board)
        if not free:
            return wait(board, priority=place)
        last = None if self._pooled else last_engine(turn, free)
        chosen = last or min(free, key=lambda e: (e.inflight_tokens, e.inflight))
        known = self._longest.get(turn.prompt_id)
        who = (
            "probe"
            if self._probes.of(turn.prompt_id) == turn.trajectory
            else "group of unknown length"
            if known is None
            else "group of {length:.0f} tokens"
        )
        where = "stays on {engine}" if last else "{engine} has the fewest KV tokens in flight"
        numbers: dict[str, float | str] = {
            "length": float(known or 0),
            "engine": chosen.engine,
            "inflight_tokens": float(chosen.inflight_tokens),
        }
        return Decision(
            engine=chosen.engine, priority=place, level=chosen.level, template=f"{who}: {where}", numbers=numbers
        )

    def finished(self, record: Finished, now: float) -> None:
        """See `Policy.finished`."""
        self._longest[record.prompt_id] = max(record.generated_tokens, self._longest.get(record.prompt_id, 0))
        super().finished(record, now)

    def forget(self, trajectory: str) -> None:
        """See `Policy.forget`: the prompt of an aborted probe gets a new one."""
        self._probes.drop(trajectory)

    def _place(self, turn: TurnView) -> int:
        known = self._longest.get(turn.prompt_id)
        if (self._probes.claim(turn) if known is None else self._probes.of(turn.prompt_id)) == turn.trajectory:
            return PROBES + turn.attained_tokens
        return -(LONGEST if known is None else known)
