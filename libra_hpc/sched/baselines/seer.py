"""`seer`: probe first, then approximately longest first (Seer, arXiv 2511.14617, the context-aware scheduling of its
section on rollout).

* The first sample of each prompt is its probe.  Probes go before everything else, among themselves the one that has
  generated least first, so that every group gets an estimate soon.
* A group's estimate is the longest finished trajectory of its prompt; a group without one is taken to be as long as can
  be.  The other samples go by descending estimate, first come, first served among equals.
* Any engine may run the next chunk: the one with the fewest KV tokens in flight.  In the published system a shared KV
  pool makes that free.  Without a pool the context would be computed again at every turn, so here a trajectory stays on
  the engine of its last turn while that is eligible; ``pooled=True`` restores the published choice.
"""

from __future__ import annotations

from libra_hpc.sched.baselines.common import Baseline, Probes, eligible, last_engine, wait
from libra_hpc.sched.board import Board
from libra_hpc.sched.protocol import Decision, Finished, TurnView

LONGEST = 1 << 24
"""Estimate of a group nothing is known of, tokens: above any context."""

PROBES = -(1 << 26)
"""Key of a probe that has generated nothing: before any estimate."""


class Seer(Baseline):
    """See the module."""

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
        return Decision(chosen.engine, place, chosen.level, f"{who}: {where}", numbers)

    def finished(self, record: Finished, now: float) -> None:
        """See `Policy.finished`."""
        self._longest[record.prompt_id] = max(record.generated_tokens, self._longest.get(record.prompt_id, 0))
        super().finished(record, now)

    def forget(self, trajectory: str) -> None:
        """See `Policy.forget`: a prompt whose probe is lost gets a new one."""
        self._probes.drop(trajectory)

    def _place(self, turn: TurnView) -> int:
        known = self._longest.get(turn.prompt_id)
        if (self._probes.claim(turn) if known is None else self._probes.of(turn.prompt_id)) == turn.trajectory:
            return PROBES + turn.attained_tokens
        return -(LONGEST if known is None else known)
