"""`libra`: the published C-MLFQ rule (arXiv 2606.03077 and its code), on `prefix_tree` and `length_buckets`.

- A new trajectory -> the shortest bucket, whatever its prompt.
- A tool returns -> mean and 90th percentile of the remaining tokens at the tree node of its path.
- Both are in one bucket -> that bucket is the target; they disagree, or there are no samples -> it stays.
- The target is its present bucket -> it stays on its engine.
- Otherwise -> it moves at once, up or down, whatever the prefill costs.
- Turns go first come, first served, in the queue and in the engines.

One addition: if its engine is full, the trajectory gets another engine of its bucket; the original queues there.
"""

from __future__ import annotations

from libra_hpc.policies.scheduling.board import Board
from libra_hpc.policies.scheduling.protocol import Decision, Finished, TurnView

from .length_buckets import MAX_QUEUE_LENGTH, THRESHOLDS, LengthBuckets
from .prefix_tree import PrefixTree
from .rule import Rule, eligible, last_engine, wait


class Libra(Rule):
    """Moves when mean and 90th percentile of the remaining tokens agree."""

    name = "libra"

    def __init__(self, thresholds: tuple[int, ...] = THRESHOLDS, max_queue_length: int = MAX_QUEUE_LENGTH) -> None:
        self.tree = PrefixTree()
        self._buckets = LengthBuckets(thresholds, max_queue_length)
        self._level: dict[str, int] = {}

    def route(self, turn: TurnView, board: Board, now: float) -> Decision:
        """See `Policy.route`."""
        levels = len(board.classes)
        level = min(self._level.get(turn.trajectory, 0), max(0, levels - 1))
        target, reason, numbers = self._target(turn, level, levels)
        if target == level:
            last = last_engine(turn, eligible(turn, board))
            if last is not None:
                numbers["engine"] = last.engine
                return Decision(
                    engine=last.engine,
                    priority=0,
                    level=last.level,
                    template=f"stay on {{engine}}: {reason}",
                    numbers=numbers,
                )
        chosen = self._buckets.choose(target, turn, board)
        if chosen is None:
            return wait(board, target)
        self._level[turn.trajectory] = target
        numbers |= {"engine": chosen.engine, "bucket": float(target)}
        return Decision(
            engine=chosen.engine,
            priority=0,
            level=chosen.level,
            template=f"bucket {{bucket:.0f}}, least connections {{engine}}: {reason}",
            numbers=numbers,
        )

    def finished(self, record: Finished, now: float) -> None:
        """See `Policy.finished`."""
        self.tree.insert(record)
        super().finished(record, now)

    def forget(self, trajectory: str) -> None:
        """See `Policy.forget`."""
        self._level.pop(trajectory, None)
        self._buckets.live.drop(trajectory)

    def _target(self, turn: TurnView, level: int, levels: int) -> tuple[int, str, dict[str, float | str]]:
        if not turn.signals:
            return level, "no tool has returned", {}
        node = self.tree.look_up(turn.prompt_id, turn.signals)
        if not node.count:
            return level, "nothing is known", {}
        mean, p90 = self._buckets.level(node.mean, levels), self._buckets.level(node.p90, levels)
        numbers: dict[str, float | str] = {"mean": node.mean, "p90": node.p90, "seen": float(node.count)}
        if mean != p90:
            return level, "mean {mean:.0f} and p90 {p90:.0f} of the remaining tokens disagree", numbers
        return mean, "mean {mean:.0f} and p90 {p90:.0f} of the remaining tokens agree", numbers
