"""Length buckets of Libra (arXiv 2606.03077): each TP class serves an interval of lengths.

- A length -> the first TP class whose threshold is not below it, else the last; k classes use k - 1 thresholds.
- A bucket -> its own TP class, then all others in ascending order.
- Within a class -> the engine with the fewest live trajectories, below ``max_queue_length``; ties: the first to join.
- No engine is below the limit -> the engine with the fewest live trajectories of all.

A trajectory is live from its first turn to its end, tool time included.
"""

from __future__ import annotations

from bisect import bisect_left

from libra_hpc.policies.scheduling.board import Board, EngineView
from libra_hpc.policies.scheduling.protocol import TurnView

from .rule import LiveTrajectories, eligible, first_of_tps

THRESHOLDS = (4_000, 12_000, 30_000)
"""Tokens: upper bounds of TP 1, 2 and 4 in the published 48-GPU configuration."""
MAX_QUEUE_LENGTH = 100
"""Trajectories; the library's default.  The 48-GPU configuration sets 3 with 16 trajectories in flight; with many more,
3 makes the rule plain least connections."""


class LengthBuckets:
    """Thresholds and live trajectories; ``max_queue_length`` <= 0 means no limit."""

    def __init__(self, thresholds: tuple[int, ...] = THRESHOLDS, max_queue_length: int = MAX_QUEUE_LENGTH) -> None:
        self.thresholds = thresholds
        self._limit = max_queue_length
        self.live = LiveTrajectories()

    def level(self, length: float, levels: int) -> int:
        """Bucket of a length in tokens, out of ``levels``."""
        return bisect_left(self.thresholds[: max(0, levels - 1)], length)

    def choose(self, level: int, turn: TurnView, board: Board) -> EngineView | None:
        """Choose an engine for a trajectory of bucket ``level`` and count it there; None if none is eligible."""
        free = eligible(turn, board)
        below = [e for e in free if self.live.count(e) < self._limit] if self._limit > 0 else free
        tps = [c.tp for c in board.classes]
        chosen = first_of_tps((*tps[level : level + 1], *tps), below, self.live.count)
        if chosen is None and free:
            chosen = min(free, key=self.live.count)
        if chosen is not None:
            self.live.put(turn.trajectory, chosen.engine)
        return chosen
