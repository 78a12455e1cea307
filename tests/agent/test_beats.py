"""Heartbeats: what has changed goes at once to rank 0 and the leaders, and the rest of the time to rank 0 alone."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from libra_hpc.agent import node
from libra_hpc.agent.node import NodeAgent, Routes
from libra_hpc.mesh.mesh import Mesh
from libra_hpc.protocol.agents import Heartbeat
from libra_hpc.protocol.engine_state import ObservedEngine
from tests.stage.node_parts import Outbox
from tests.stage.waiting import until

LEADERS = {1, 3}


class Node(Outbox, NodeAgent):
    """Node 2, whose engines a test changes."""

    rank, hosts, weights = 2, ["127.0.0.1"], 0

    def __init__(self) -> None:
        Outbox.__init__(self)
        NodeAgent.__init__(self, cast(Mesh, self), "rollout", Routes(), {0, *LEADERS})
        self.observed = {name: ObservedEngine("rollout", "loading") for name in ("r2.0", "r2.1")}
        self.engines.append(cast(Any, self))

    def turns(self, name: str, **changes: Any) -> None:
        self.observed = {**self.observed, name: ObservedEngine("rollout", **changes)}
        self.changed()

    def beats(self, rank: int) -> list[dict[str, ObservedEngine]]:
        return [beat.engines for to, beat in self.sent if to == rank and isinstance(beat, Heartbeat)]

    def defect(self, reason: str, error: BaseException) -> None:
        raise AssertionError(reason)


async def test_a_change_is_sent_at_once_but_not_more_often_than_the_leaders_can_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node, "LEAST_S", 0.2)
    made = Node()
    made._beat()
    for version in range(10):
        made.turns("r2.0", state="ready", version=version)
        await asyncio.sleep(0.005)
    assert len(made.beats(0)) == 1
    await until(lambda: len(made.beats(0)) == 2)
    newest = {"r2.0": ObservedEngine("rollout", "ready", 9)}
    assert [made.beats(rank)[-1] for rank in (0, *LEADERS)] == [newest] * 3, "not the engine that is as it was"
    made.changed()
    await asyncio.sleep(0.3)
    assert len(made.beats(0)) == 2, "nothing has changed"


async def test_leaders_get_no_heartbeat_without_a_change_but_all_engines_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node, "LIVE_S", 0.01)
    made = Node()
    beats = asyncio.create_task(made._beats())
    await until(lambda: len(made.beats(1)) == 3)
    beats.cancel()
    assert made.beats(1) == [made.observed] * 3
    assert len(made.beats(0)) >= 2 * node.WHOLE + 1
