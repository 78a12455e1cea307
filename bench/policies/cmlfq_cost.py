"""`cmlfq_cost`: the cost rule of Libra's later code (arXiv 2606.03077, version 3), on `prefix_tree`.

- The last samples at the tree node of the path -> bins of remaining tokens, cut at `THRESHOLDS`, with their shares.
- Every turn -> the engine with the least sum over bins of share * decode seconds, plus the seconds of the move.
- Decode seconds of n tokens: n steps of one sequence, at the context that it has half-way.  Load does not enter.
- The move: nothing at the engine of the last turn, elsewhere a prefill of the context.
- Ties -> the engine of the last turn, then fewer live trajectories, then the first to join.
- Only engines with fewer than ``max_queue_length`` live trajectories, while there is one; else the fewest.
- No sample yet -> the smallest TP, least live trajectories; later turns stay.

The original has measured tables of decode steps and moves; here the step costs of the board stand for them.
"""

from __future__ import annotations

from bisect import bisect_left

from libra_hpc.policies.scheduling.board import Board, EngineView
from libra_hpc.policies.scheduling.protocol import Decision, Finished, TurnView
from libra_hpc.policies.scheduling.rules.length_buckets import MAX_QUEUE_LENGTH, THRESHOLDS
from libra_hpc.policies.scheduling.rules.prefix_tree import PrefixNode, PrefixTree
from libra_hpc.policies.scheduling.rules.rule import LiveTrajectories, Rule, eligible, first_of_tps, last_engine, wait

Bins = list[tuple[float, float]]
"""(share of the samples, their mean remaining tokens)."""


class CmlfqCost(Rule):
    """The engine of the least expected decode and move seconds; ``max_queue_length`` <= 0 means no limit."""

    name = "cmlfq_cost"

    def __init__(self, thresholds: tuple[int, ...] = THRESHOLDS, max_queue_length: int = MAX_QUEUE_LENGTH) -> None:
        self.tree = PrefixTree()
        self._thresholds = thresholds
        self._limit = max_queue_length
        self._live = LiveTrajectories()

    def route(self, turn: TurnView, board: Board, now: float) -> Decision:
        free = eligible(turn, board)
        if not free:
            return wait(board)
        # The trajectory itself does not count as load.
        self._live.drop(turn.trajectory)
        below = [e for e in free if self._live.count(e) < self._limit] if self._limit > 0 else free
        last = last_engine(turn, free)
        node = self.tree.look_up(turn.prompt_id, turn.signals)
        numbers: dict[str, float | str] = {"seen": float(node.count)}
        if not node.count:
            chosen = last or first_of_tps((c.tp for c in board.classes), below, self._live.count)
            reason = "nothing is known: {engine}"
        else:
            bins = self.bins(node)
            costs = {e.engine: self._seconds(turn, e, bins) for e in below}
            chosen = min(below, key=lambda e: (costs[e.engine], e is not last, self._live.count(e)), default=None)
            numbers["seconds"] = costs[chosen.engine] if chosen is not None else 0.0
            reason = "{engine} decodes the rest in {seconds:.1f} s, after {seen:.0f} samples"
        if chosen is None:
            chosen, reason = min(free, key=self._live.count), "all engines are at the limit: {engine}"
        self._live.put(turn.trajectory, chosen.engine)
        numbers["engine"] = chosen.engine
        return Decision(engine=chosen.engine, priority=0, level=chosen.level, template=reason, numbers=numbers)

    def bins(self, node: PrefixNode) -> Bins:
        """The samples of a node by bin; empty bins are left out."""
        found: list[list[float]] = [[] for _ in range(len(self._thresholds) + 1)]
        samples = node.recent
        for value in samples:
            found[bisect_left(self._thresholds, value)].append(value)
        return [(len(values) / len(samples), sum(values) / len(values)) for values in found if values]

    def finished(self, record: Finished, now: float) -> None:
        self.tree.insert(record)
        super().finished(record, now)

    def forget(self, trajectory: str) -> None:
        self._live.drop(trajectory)

    @staticmethod
    def _seconds(turn: TurnView, engine: EngineView, bins: Bins) -> float:
        costs, context = engine.tp_class, turn.context_tokens
        seconds = sum(share * left * (costs.base_s + costs.slope_s * (context + left / 2)) for share, left in bins)
        return seconds if engine.engine == turn.engine else seconds + costs.prefill_s * context
