"""`length_aware`: prompt tokens decide the TP degree, as in ``length_aware`` of Libra's code (arXiv 2606.03077).

- Prompt tokens at admission -> a list of preferred TP degrees for the whole trajectory (`THRESHOLDS`, `PREFERRED`).
- Every turn -> the first degree of the list with an eligible engine, then any other in ascending order.
- Within a degree -> the engine with the fewest live trajectories; the engine of the last turn is not preferred.
"""

from __future__ import annotations

from bisect import bisect_left

from libra_hpc.policies.scheduling.board import Board
from libra_hpc.policies.scheduling.protocol import Decision, TurnView
from libra_hpc.policies.scheduling.rules import LiveTrajectories, Rule, eligible, wait

THRESHOLDS = (5_000, 10_000, 15_000)
"""Prompt tokens: upper bound of each list but the last."""

PREFERRED = ((1, 2), (2, 4), (4, 8), (8, 4))
"""TP degrees of each list, in order of preference."""


class LengthAware(Rule):
    """Routes by prompt tokens; ``preferred`` has one entry more than ``thresholds``."""

    name = "length_aware"

    def __init__(
        self, thresholds: tuple[int, ...] = THRESHOLDS, preferred: tuple[tuple[int, ...], ...] = PREFERRED
    ) -> None:
        self._thresholds, self._preferred = thresholds, preferred
        self._prompt: dict[str, int] = {}
        self._live = LiveTrajectories()

    def route(self, turn: TurnView, board: Board, now: float) -> Decision:
        prompt = self._prompt.setdefault(turn.trajectory, turn.context_tokens)
        tps = self._preferred[bisect_left(self._thresholds, prompt)]
        # The trajectory itself does not count as load.
        self._live.drop(turn.trajectory)
        order = (*tps, *(c.tp for c in board.classes))
        chosen = min(eligible(turn, board), key=lambda e: (order.index(e.tp), self._live.count(e)), default=None)
        if chosen is None:
            return wait(board)
        self._live.put(turn.trajectory, chosen.engine)
        numbers: dict[str, float | str] = {"prompt": float(prompt), "tp": float(tps[0]), "engine": chosen.engine}
        reason = "a prompt of {prompt:.0f} tokens prefers TP {tp:.0f}: {engine}"
        return Decision(engine=chosen.engine, priority=0, level=chosen.level, template=reason, numbers=numbers)

    def forget(self, trajectory: str) -> None:
        self._prompt.pop(trajectory, None)
        self._live.drop(trajectory)
