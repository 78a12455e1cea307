"""What follows when nothing in a run progresses: pure, times are epoch seconds.

Every part has deadlines of its own, which end a process that hangs.  This is for what they do not see, or do not cure.

1. No step for half a limit -> the status names what is waited for (`waits_for`).
2. No progress for the row ``drop`` of `TABLE` -> the nodes that have been silent for a limit, else those with the
   oldest weights, else all replicas, are dropped, once a step, and begin as new ones.
3. For the row ``restart`` -> all ranks restart from the newest state.
4. All of ``slurm.restarts`` are used -> the run fails with the sentence (`libra_hpc.owner.decision`).

Progress is a step, a generated or computed token, or a node that changes its state; a state that comes back counts
`RETURNS` times a step.  The limit is that of a step; it is longer while a node starts or a tool runs (``first_s``), or
a state is written, or only the last one is missing (``storage_s``).  A step with a stall counts if that before it had
one, too.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from typing import Literal, NamedTuple

from libra_hpc.policies.pool import states
from libra_hpc.process.progress import DROP, LATE_SHARE, RESTART, TABLE, WINDOW, DeadlineLimits, learnt
from libra_hpc.protocol.agents import RolloutReport

RETURNS = 4
"""The limit of a part doubles each time it hangs.  Half: what needs more time is ended; double: 16 times as long."""


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
    states: Hashable
    """States of all nodes."""
    excused: bool
    """Another limit counts at the moment."""
    step: int
    step_s: float
    """Seconds of the last step; 0: the engines' start was in it, or there was none."""
    versions: Mapping[int, int]
    """Step of the weights of each node that may be dropped."""
    silent_s: Mapping[int, float] = {}
    """Since the last message of each node that may be dropped."""
    replicas: frozenset[int] = frozenset()
    """Nodes that train with the core."""
    starting: frozenset[int] = frozenset()
    """Nodes that start or move."""
    least_s: float = 0.0
    """No limit is shorter at the moment."""
    waits_for: str = ""


class Ladder:
    def __init__(self, settings: DeadlineLimits, now: float) -> None:
        self._settings = settings
        self._mark: Hashable = None
        self._since = now
        self._states: Hashable = None
        self._seen: Counter[Hashable] = Counter()
        """States, since the last step."""
        self._step = -1
        self._dropped: frozenset[int] = frozenset()
        """Since that step."""
        self._steps = deque[float](maxlen=WINDOW)
        """What the last steps count for, in seconds."""
        self._stalled = self._was_stalled = False
        """Whether nothing progressed for a limit, since that step and before it."""

    def discount(self, seconds: float, now: float) -> None:
        """This process was stopped; what came meanwhile may have been read first."""
        self._since = min(now, self._since + seconds)

    def late(self, run: Movement, waited_s: float) -> str:
        """A sentence once no step was committed for too long, ``waited_s``; else empty."""
        limit = self._limit(run._replace(starting=frozenset(), least_s=0.0))
        # Who follows the run prints each sentence once: another one comes by the minute.
        least_s = waited_s // 60 * 60 or waited_s // 10 * 10
        return f"no step for {least_s:.0f} s: {run.waits_for}" if waited_s > LATE_SHARE * limit else ""

    def evaluate(self, run: Movement, now: float) -> Rung | None:
        """What to do now; None: nothing."""
        if run.step != self._step:
            if run.step_s and self._stalled <= self._was_stalled:
                self._steps.append(learnt(run.step_s, self._measured(), self._settings))
            self._stalled, self._was_stalled = False, self._stalled
            self._step, self._dropped, self._seen = run.step, frozenset(), Counter()
        changed = run.states != self._states
        if changed:
            self._states = run.states
            self._seen[run.states] += 1
        if run.excused or run.mark != self._mark or (changed and self._seen[run.states] <= RETURNS):
            self._mark, self._since = run.mark, now
            return None
        waited_s, limit = now - self._since, self._limit(run)
        self._stalled |= waited_s > limit
        nothing = f"nothing progressed for {waited_s:.0f} s (limit {limit:.0f} s): {run.waits_for}"
        if waited_s > TABLE[DROP].times * limit and not self._dropped:
            self._dropped, why = _holding_up(run, limit)
            if self._dropped:
                return Rung("drop", tuple(sorted(self._dropped)), f"{nothing}; {why}")
        if waited_s > TABLE[RESTART].times * limit:
            self._since = now
            return Rung("restart", (), nothing)
        return None

    def _limit(self, run: Movement) -> float:
        # A dropped node that does not start holds nobody up.
        starting = self._settings.first_s if run.starting - self._dropped else 0.0
        return max(self._measured(), starting, run.least_s)

    def _measured(self) -> float:
        settings = self._settings
        return max(settings.floor_s, settings.factor * max(self._steps) if self._steps else settings.first_s)


def _holding_up(run: Movement, limit_s: float) -> tuple[frozenset[int], str]:
    """The nodes that the others wait for, and why they are to blame."""
    silent = {rank: seconds for rank, seconds in run.silent_s.items() if seconds > limit_s}
    if silent:
        return frozenset(silent), f"it has been silent for {max(silent.values()):.0f} s"
    oldest = min(run.versions.values(), default=run.step)
    if ranks := frozenset(rank for rank, version in run.versions.items() if version == oldest < run.step):
        return ranks, f"its weights are of step {oldest}, not {run.step}"
    return run.replicas, "the core may wait for it"


def waits_for(pool: states.Pool, report: RolloutReport | None, notices: Sequence[str]) -> str:
    """What a step that does not come waits for: what the newest notice names, else the trainers or the rollout."""
    if notices:
        return notices[0]
    if not (states.trainers(pool) or states.core_rolls_out(pool)):
        return _nodes(pool, "train") or "no training replica is ready"
    if not states.rollout_nodes(pool):
        return _nodes(pool, "rollout") or "no rollout engine is ready"
    if report is None:
        return "the rollout leader has not reported"
    if report.waiting_turns and not report.inflight:
        return f"{report.waiting_turns} turns wait for an engine"
    if report.tools_running and not report.inflight:
        return f"{report.tools_running} of {report.open_trajectories} trajectories are in tools"
    if report.inflight:
        return f"{report.inflight} turns run at engines, {report.open_trajectories} trajectories are open"
    return "the trainers work on a step" if report.ready_groups else "no trajectory is open"


def _nodes(pool: states.Pool, role: str) -> str:
    waiting = [
        f"node {node.rank} is {node.state.replace('_', ' ')}" for node in pool.nodes.values() if node.role == role
    ]
    return ", ".join(waiting[:3])
