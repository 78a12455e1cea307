"""`length_aware`: the prompt decides the TP degree, as in the ``length_aware`` scheduler of Libra's code (arXiv
2606.03077).

Prompt tokens at admission, not the length of what will be generated, choose a list of preferred TP degrees for the
whole trajectory:

    <= 5,000: 1, 2      <= 10,000: 2, 4      <= 15,000: 4, 8      longer: 8, 4

The first degree in the list that has an eligible engine is used, then any other in ascending order; within it the
engine with the fewest live trajectories (tool time included).  Each turn is routed anew by that rule, so the engine of
the last turn is not preferred.
"""

from __future__ import annotations

from bisect import bisect_left

from libra_hpc.sched.baselines.common import Baseline, LiveTrajectories, eligible, first_of_tps, wait
from libra_hpc.sched.board import Board
from libra_hpc.sched.protocol import Decision, TurnView

THRESHOLDS = (5_000, 10_000, 15_000)
"""Prompt tokens: upper boundaries of all lists but the last."""

PREFERRED = ((1, 2), (2, 4), (4, 8), (8, 4))
"""TP degrees of each list, in order of preference."""


class LengthAware(Baseline):
    """See the module.  ``preferred`` has one entry more than ``thresholds``."""

    name = "length_aware"

    def __init__(
        self, thresholds: tuple[int, ...] = THRESHOLDS, preferred: tuple[tuple[int, ...], ...] = PREFERRED
    ) -> None:
        self._thresholds, self._preferred = thresholds, preferred
        self._prompt: dict[str, int] = {}
        self._live = LiveTrajectories()

    def route(self, turn: TurnView, board: Board, now: float) -> Decision:
        """See `Policy.route`."""
        prompt = self._prompt.setdefault(turn.trajectory, turn.context_tokens)
        tps = self._preferred[bisect_left(self._thresholds, prompt)]
        # The trajectory's own place does not count against the engine that has it.
        self._live.drop(turn.trajectory)
        chosen = first_of_tps((*tps, *(c.tp for c in board.classes)), eligible(turn, board), self._live.count)
        if chosen is None:
            return wait(board)
        self._live.put(turn.trajectory, chosen.engine)
        numbers: dict[str, float | str] = {"prompt": float(prompt), "tp": float(tps[0]), "engine": chosen.engine}
        return Decision(
            chosen.engine, 0, chosen.level, "a prompt of {prompt:.0f} tokens prefers TP {tp:.0f}: {engine}", numbers
        )

    def forget(self, trajectory: str) -> None:
        """See `Policy.forget`."""
        self._prompt.pop(trajectory, None)
        self._live.drop(trajectory)
