"""Libra's buckets (arXiv 2606.03077): lengths are cut at thresholds, each interval belongs to one TP class, and within
it the least connections win.

With k TP classes on the board the first k - 1 thresholds are the boundaries: a length x belongs to the first class
whose threshold is not below x, else to the last.  `THRESHOLDS` are those of the published 48-GPU configuration (TP 1 to
4,000 tokens, TP 2 to 12,000, TP 4 to 30,000).

Choosing an engine for a bucket: its own TP class, then all others in ascending order, among engines with fewer than
``max_queue_length`` live trajectories; if there is none, the engine with the fewest trajectories of all.  A trajectory
counts from its first turn to its end, tool time included, and the engine that joined first wins ties.
`MAX_QUEUE_LENGTH` = 100 is the library's default; the 48-GPU configuration sets 3, with 16 trajectories in flight in
all: with many more, a limit of 3 would turn the rule into plain least connections.
"""

from __future__ import annotations

from bisect import bisect_left

from libra_hpc.sched.baselines.common import LiveTrajectories, eligible, first_of_tps
from libra_hpc.sched.board import Board, EngineView
from libra_hpc.sched.protocol import TurnView

THRESHOLDS = (4_000, 12_000, 30_000)
MAX_QUEUE_LENGTH = 100


class LengthBuckets:
    """See the module.  ``max_queue_length`` <= 0 means no limit."""

    def __init__(self, thresholds: tuple[int, ...] = THRESHOLDS, max_queue_length: int = MAX_QUEUE_LENGTH) -> None:
        self.thresholds = thresholds
        self._limit = max_queue_length
        self.live = LiveTrajectories()

    def level(self, length: float, levels: int) -> int:
        """Bucket of a length in tokens, of ``levels`` buckets."""
        return bisect_left(self.thresholds[: max(0, levels - 1)], length)

    def choose(self, level: int, turn: TurnView, board: Board) -> EngineView | None:
        """Choose an engine for a trajectory of bucket ``level`` and count it there; None (and counted as before)
        when none is eligible."""
        free = eligible(turn, board)
        below = [e for e in free if self.live.count(e) < self._limit] if self._limit > 0 else free
        tps = [c.tp for c in board.classes]
        chosen = first_of_tps((*tps[level : level + 1], *tps), below, self.live.count)
        if chosen is None and free:
            chosen = min(free, key=self.live.count)
        if chosen is not None:
            self.live.put(turn.trajectory, chosen.engine)
        return chosen
