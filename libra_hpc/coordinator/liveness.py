"""Which nodes are lost, and what follows when nothing progresses: pure; the times of `Ladder` are epoch seconds.

- The owner saw the agent's process end -> lost at once.  A connection between two live nodes broke -> the one whose
  loss restarts nobody, never rank 0; of two alike the one with more broken connections.
- No message for `HEARTBEAT_LOST_S`, from a leader `LEADER_LOST_S` -> lost.  Rank 0 itself was stopped -> discounted.
- Slurm has set a lost node down, or it is silent for ``planner.fewer_after_s`` -> the status names it (`going_on`).
- A lost node sends again -> `Readmission` decides; it is readmitted with fresh engines (`NodePool.request_reset`).
- No step for half a limit -> the status names what is waited for (`waits_for`).
- No progress for the row ``drop`` of `TABLE` -> nodes silent for a limit, else those with the oldest weights, else all
  replicas begin as new ones, once a step.  For ``restart`` -> all ranks restart from the newest state.

Progress is a step, a token, or a node that changes its state; a state that comes back counts `RETURNS` times a step.
The limit is that of a step; longer while a node starts or a tool runs (``first_s``), or a state is written
(``storage_s``).  A step with a stall counts if that before it had one, too.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Literal, NamedTuple

from libra_hpc.policies.pool import states
from libra_hpc.process.progress import DROP, LATE_SHARE, RESTART, TABLE, WINDOW, DeadlineLimits, learnt, stall_of
from libra_hpc.protocol.agents import Heartbeat, RolloutReport
from libra_hpc.protocol.engine_state import ObservedEngine

HEARTBEAT_LOST_S = 10.0
"""A heartbeat comes every second.  Half: a paused network loses nodes; double: a stopped one costs the run 20 s."""
LEADER_LOST_S = 45.0
"""Losing a leader restarts all ranks, which costs about a minute; losing another node costs seconds."""


BROKEN_S = 5.0
"""After a node took its state, until a broken connection to it counts.

By then the owner has reported the end of its process, the better reason, and others report the old connection no more.
Double: turns wait longer.
"""


class NodeContact:
    """What rank 0 has got from one node; times are epoch seconds."""

    def __init__(self, now: float) -> None:
        self.host = ""
        """Empty until its agent's first heartbeat."""
        self.pid = 0
        """Process id of its agent; 0 until then."""
        self.beat: Heartbeat | None = None
        self.engines: dict[str, ObservedEngine] = {}
        """What its heartbeats had of each."""
        self.seen = now
        """When its last message came."""
        self.since = now
        """When it took its present state."""

    def take(self, beat: Heartbeat) -> dict[str, ObservedEngine]:
        """Note a heartbeat; returns the engines as they were before."""
        before, self.beat = self.engines, beat
        self.engines = before | beat.engines
        return before


class LostNode(NamedTuple):
    rank: int
    reason: str
    silent_s: float
    down: bool = False
    """Slurm has taken the node from the job."""


def lost_nodes(
    nodes: Mapping[int, NodeContact], own: int, leaders: Collection[int], gone: Mapping[int, str], now: float
) -> list[LostNode]:
    """Nodes lost at epoch time ``now``; ``gone`` as in `OwnerLink.lost`."""
    found = []
    for rank, node in nodes.items():
        if rank == own or not node.pid:
            continue
        silent_s = now - node.seen
        if (why := gone.get(rank)) is not None:
            found.append(LostNode(rank, why or "its agent's process ended", silent_s, down=bool(why)))
        elif silent_s >= (LEADER_LOST_S if rank in leaders else HEARTBEAT_LOST_S):
            found.append(LostNode(rank, f"no heartbeat for {silent_s:.0f} s", silent_s))
    lost = {node.rank for node in found}
    return [*found, *_cut_off(nodes, own, leaders, lost=lost, now=now)]


def _cut_off(
    nodes: Mapping[int, NodeContact], own: int, leaders: Collection[int], lost: Collection[int], now: float
) -> list[LostNode]:
    """The nodes to give up for connections that broke between two that live."""
    broken = [
        (peer, rank)
        for rank, node in nodes.items()
        # What a node sent before it fell silent is out of date.
        if node.beat is not None and rank not in lost and now - node.seen < BROKEN_S
        for peer in node.beat.unreachable
        if peer in nodes and peer not in lost  # no guest
    ]
    count = Counter(rank for ends in set(map(frozenset, broken)) for rank in ends)
    found = dict[int, LostNode]()
    for ends in broken:
        # Of two alike the one that the other reports.
        victim, other = sorted(ends, key=lambda rank: (rank == own, rank in leaders, -count[rank]))
        if nodes[victim].pid and now - nodes[victim].since >= BROKEN_S:
            found[victim] = LostNode(victim, f"its connection to node {other} broke", now - nodes[victim].seen)
    return list(found.values())


def discount(nodes: Mapping[int, NodeContact], slept_s: float, planned_s: float, now: float) -> float:
    """Move what was seen forward by a stall of this process, and return the stall in seconds."""
    stall = stall_of(slept_s, planned_s)
    for node in nodes.values() if stall else ():
        node.seen = min(now, node.seen + stall)
    return stall


RETURNS = 4
"""The limit of a part doubles each time it hangs.  Half: what needs more time is ended; double: 16 times as long."""


class Rung(NamedTuple):
    """What rank 0 does about a run that does not progress."""

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
        return _nodes(pool, "rollout") or "the trainers work on a step"
    if report is None:
        return "the rollout leader has not reported"
    if report.waiting_turns and not report.inflight:
        return f"{report.waiting_turns} turns wait for an engine"
    if report.tools_running and not report.inflight:
        return f"{report.tools_running} of {report.open_trajectories} trajectories are in tools"
    if report.inflight:
        return f"{report.inflight} turns run at engines, {report.open_trajectories} trajectories are open"
    return "the trainers work on a step" if report.ready_groups else "no trajectory is open"


def going_on(pool: states.Pool, nodes: Mapping[int, NodeContact], gone: Mapping[int, str], settled: float) -> str:
    """Without which nodes the run goes on; empty: without none.

    ``gone`` as in `lost_nodes`; one that is silent counts if it was lost before the epoch time ``settled``.
    """
    lost = {rank: nodes[rank] for rank, node in pool.nodes.items() if node.state is states.NodeState.LOST}
    names = [node.host for rank, node in lost.items() if gone.get(rank) or node.since < settled]
    have, who = len(pool.nodes), ", ".join(names)
    return f"node {who} is lost: going on with {have - len(names)} of {have} nodes" if names else ""


def _nodes(pool: states.Pool, role: str) -> str:
    waiting = [
        f"node {node.rank} is {node.state.replace('_', ' ')}" for node in pool.nodes.values() if node.role == role
    ]
    return ", ".join(waiting[:3])
