"""Which nodes are lost: pure, from what rank 0 has got and from what the run's owner saw.

- The owner saw the agent's process end -> lost at once.
- A connection between two live nodes broke -> the one whose loss restarts nobody is lost, never rank 0; of two alike
  the one with more broken connections.
- No message for `HEARTBEAT_LOST_S`, from a leader `LEADER_LOST_S` -> lost.
- Rank 0 itself was stopped -> the stall is discounted: messages that arrived meanwhile are read first.
- A lost node sends again -> `Readmission` decides; it is readmitted with fresh engines (`NodePool.request_reset`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import NamedTuple

from libra_hpc.process.progress import stall_of
from libra_hpc.protocol.agents import Heartbeat

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
        self.seen = now
        """When its last message came."""
        self.since = now
        """When it took its present state."""


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
