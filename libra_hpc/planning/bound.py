"""Seconds that no fleet is below: its work over full throughput, and the longest trajectory alone.

They put plans in the order in which they are played, and spare those that cannot be the best one.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from libra_hpc.models.step_times.steps import StepTimes
from libra_hpc.protocol.trace import TrajectoryRecord

CHUNK = 8192
"""Prompt tokens of a step that only prefills."""


class Bound:
    """The bound of batches like those of ``size`` trajectories each in ``work``, whose groups compute a prompt once.

    ``slots``: sequences that an engine decodes.
    """

    def __init__(self, work: Sequence[TrajectoryRecord], size: int, slots: int) -> None:
        self._slots, self._batches = slots, len(work) // size
        self._generated = sum(one.generated for one in work)
        prompts = {one.prompt_id: one.prompt_tokens for one in work}
        self._new = sum(prompts.values()) + sum(turn.new_tokens for one in work for turn in one.turns)
        # A token's mean context is half of the last one's, weighted by generated tokens.
        self._context = sum(one.generated * (one.prompt_tokens + one.context) / 2 for one in work) / self._generated
        self._alone = [[alone(one) for one in work[at : at + size]] for at in range(0, len(work), size)]
        self._known: dict[str, tuple[float, float]] = {}

    def rollout_s(self, fleet: Sequence[tuple[StepTimes, int]]) -> tuple[float, float]:
        """Seconds of a batch's work, and of the longest trajectory alone, on so many engines of each kind."""
        rates = [(self._of(steps), count) for steps, count in fleet]
        return 1.0 / sum(count / work_s for (work_s, _), count in rates), min(alone_s for (_, alone_s), _ in rates)

    def _of(self, steps: StepTimes) -> tuple[float, float]:
        """Seconds of all work on one engine, and of the longest trajectory."""
        key = f"{steps.source} TP{steps.tp}"
        if key not in self._known:
            full = max(1, min(self._slots, int(steps.kv_capacity / self._context)))
            token_s = min(steps.step_s(n, int(n * self._context)) / n for n in {full, max(1, full // 2)})
            new_s = steps.step_s(0, 0, CHUNK, 0) / CHUNK
            longest = fmean(max(one.seconds(steps, new_s) for one in batch) for batch in self._alone)
            self._known[key] = (self._generated * token_s + self._new * new_s) / self._batches, longest
        return self._known[key]


class _Alone(NamedTuple):
    """Where the seconds of a trajectory go when nothing runs beside it."""

    generated: int
    context: int
    new: int
    tool_s: float

    def seconds(self, steps: StepTimes, new_s: float) -> float:
        return self.generated * steps.step_s(1, self.context) + self.new * new_s + self.tool_s


def alone(one: TrajectoryRecord) -> _Alone:
    """The parts of a trajectory."""
    new = one.prompt_tokens + sum(turn.new_tokens for turn in one.turns)
    tool_s = sum(turn.tool_s for turn in one.turns)
    return _Alone(one.generated, (one.prompt_tokens + one.context) // 2, new, tool_s)
