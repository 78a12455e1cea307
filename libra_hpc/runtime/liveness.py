"""Which nodes are lost: pure, from what rank 0 has heard, when, and from what the launcher saw.

- The launcher saw the agent's process end -> lost at once.
- A node's connection to another broke while both live -> the one that leads nothing is lost, never rank 0.
- No message for `HEARTBEAT_LOST_S` -> lost; a node that leads a stage has `LEADER_LOST_S`, because losing it restarts
  every rank.
- Rank 0 itself was stopped -> the stall is discounted: messages that arrived meanwhile are read before anyone is
  judged.
- A lost node is heard again -> it is taken back (`libra_hpc.runtime.coordinator`), with fresh engines.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from libra_hpc.process.deadlines import stall_of

from .screen import NodeFacts

HEARTBEAT_LOST_S = 20.0
"""A heartbeat comes every second from a process that does nothing long.  Half: a paused network loses nodes; double:
their turns wait longer."""
LEADER_LOST_S = 45.0
"""A restart of all ranks costs about a minute, so a silent leader gets longer than a node whose loss costs seconds."""


BROKEN_S = 5.0
"""After a node took its state, until a broken connection to it counts.  The launcher's word that its process ended
comes first and is the better reason; and who takes a node back says for a moment longer that the old connection is
broken.  Double: turns wait longer."""


class Silent(NamedTuple):
    """A node that is lost."""

    rank: int
    reason: str
    silent_s: float


def silent_nodes(
    nodes: Mapping[int, NodeFacts], own: int, leaders: Collection[int], gone: Mapping[int, int], now: float
) -> list[Silent]:
    """Nodes that are lost at epoch time ``now``; ``gone`` has the process ids whose end the launcher saw, by rank."""
    found = []
    for rank, node in nodes.items():
        if rank == own or not node.pid:
            continue
        silent_s = now - node.seen
        if gone.get(rank) == node.pid:
            found.append(Silent(rank, "its agent's process ended", silent_s))
        elif silent_s >= (LEADER_LOST_S if rank in leaders else HEARTBEAT_LOST_S):
            found.append(Silent(rank, f"no heartbeat for {silent_s:.0f} s", silent_s))
    lost = {silent.rank for silent in found}
    return [*found, *_cut_off(nodes, own, leaders, lost, now)]


def _cut_off(
    nodes: Mapping[int, NodeFacts], own: int, leaders: Collection[int], lost: Collection[int], now: float
) -> list[Silent]:
    """The nodes to give up for a connection that broke between two that live; ``lost`` are those that do not."""
    found = {}
    for rank, node in nodes.items():
        # What a node said before it fell silent is no news.
        heard = node.beat is not None and rank not in lost and now - node.seen < BROKEN_S
        for peer in node.beat.unreachable if node.beat is not None and heard else ():
            if peer in lost:
                continue
            keep_peer = peer == own or (peer in leaders and rank not in leaders)
            victim, other = (rank, peer) if keep_peer else (peer, rank)
            if nodes[victim].pid and now - nodes[victim].since >= BROKEN_S:
                found[victim] = Silent(victim, f"its connection to node {other} broke", now - nodes[victim].seen)
    return list(found.values())


def discount(nodes: Mapping[int, NodeFacts], slept_s: float, planned_s: float, now: float) -> float:
    """Move what was heard forward by the time in which nobody listened; returns that time, 0.0 for a loop that woke
    as planned."""
    stall = stall_of(slept_s, planned_s)
    for node in nodes.values() if stall else ():
        node.seen = min(now, node.seen + stall)
    return stall


def read_gone(prefix: Path) -> dict[int, int]:
    """Process ids by rank, from the files the launcher left; empty where they cannot be read."""
    found = {}
    with contextlib.suppress(OSError):
        for path in prefix.parent.glob(f"{prefix.name}*"):
            with contextlib.suppress(OSError):
                number, text = path.name.removeprefix(prefix.name), path.read_text(errors="replace").strip()
                if number.isdecimal() and text.isdecimal():
                    found[int(number)] = int(text)
    return found
