"""What follows when nothing in a run progresses: pure, times are epoch seconds.

Every part has deadlines of its own, which end a process that hangs.  This is for what no part sees.

1. No progress for a while -> the status names what is waited for (`late_steps`).
2. For the limit of a step -> the rollout nodes with the oldest weights are dropped, and begin as new ones.
3. For twice that, or where there is no such node -> all ranks restart from the newest state.
4. All of ``slurm.restarts`` are used -> the run fails with the sentence.

Progress is a step, a generated or computed token, a running tool, or a node that changes its state.  While admission is
paused or the run directory takes no writes, other limits count.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Literal, NamedTuple

from libra_hpc.process.deadlines import DeadlineLimits


class Rung(NamedTuple):
    """What to do now."""

    action: Literal["drop", "restart"]
    ranks: tuple[int, ...]
    """Nodes to drop."""
    reason: str


class Movement(NamedTuple):
    """What shows whether a run progresses."""

    mark: Hashable
    """Differs when something has progressed."""
    excused: bool
    """Another limit counts at the moment."""
    step: int
    step_seconds: Sequence[float]
    """Of the last steps."""
    versions: Mapping[int, int]
    """Step of the weights of each node that may be dropped."""


class Ladder:
    def __init__(self, settings: DeadlineLimits, now: float) -> None:
        self._settings = settings
        self._mark: Hashable = None
        self._since = now
        self._dropped = False

    def discount(self, seconds: float) -> None:
        """This process was stopped."""
        self._since += seconds

    def evaluate(self, run: Movement, now: float) -> Rung | None:
        """What to do now; None: nothing."""
        if run.excused or run.mark != self._mark:
            self._mark, self._since, self._dropped = run.mark, now, False
            return None
        waited_s, limit = now - self._since, self._limit(run.step_seconds)
        if waited_s <= limit:
            return None
        late = sorted(rank for rank, version in run.versions.items() if version < run.step)
        oldest = min((run.versions[rank] for rank in late), default=run.step)
        held = tuple(rank for rank in late if run.versions[rank] == oldest)
        nothing = f"nothing progressed for {waited_s:.0f} s (limit {limit:.0f} s)"
        if held and not self._dropped:
            self._dropped = True
            return Rung("drop", held, f"{nothing}, and its weights are of step {oldest}, not {run.step}")
        if held and waited_s <= 2.0 * limit:
            return None
        self._since = now
        return Rung("restart", (), nothing)

    def _limit(self, step_seconds: Sequence[float]) -> float:
        settings = self._settings
        measured = settings.factor * max(step_seconds) if step_seconds else settings.first_s
        return max(settings.floor_s, measured)
