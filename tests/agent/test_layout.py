"""How an agent makes its row of the Layout true, and what it passes on to the leaders of its node."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from libra_hpc.agent.agent import Agent
from libra_hpc.protocol.layout import Layout, LayoutChange, Row
from libra_hpc.protocol.layout_changes import digest


class Part:
    """Any part of the agent: notes its calls."""

    def __init__(self, name: str, calls: list[tuple[Any, ...]]) -> None:
        self._name, self._calls, self.alive, self.kind = name, calls, True, name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return Part(f"{self._name}.{name}", self._calls)

    def __call__(self, *arguments: Any) -> Any:
        self._calls.append((self._name, *arguments))
        return self._later() if self._name.endswith((".start", ".reset")) else None

    async def _later(self) -> None:
        pass


class Scene:
    """The agent of node 2, with every part."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        agent = Agent.__new__(Agent)
        agent.rank, agent._newest, agent._observed, agent._life = 2, Layout(), Row(), 0
        agent._by_mpi = False
        agent.context: Any = SimpleNamespace(receivers=(), good_step=-1)
        for name in ("mesh", "train_leader", "rollout_service"):
            setattr(agent, name, Part(name, self.calls))
        agent.engines = [Part(name, self.calls) for name in ("rollout", "train", "carrier")]  # type: ignore[misc]
        agent._spawn = lambda work: self.work.append(work)  # type: ignore[method-assign]
        agent._beat = lambda: self.calls.append(("beat", agent._life))  # type: ignore[method-assign]
        agent._beat_if_changed = lambda: None  # type: ignore[method-assign]
        self.agent, self.work = agent, list[Any]()

    def takes(self, number: int, rows: dict[int, Row], by_mpi: bool = False, **fields: Any) -> list[tuple[Any, ...]]:
        """What follows the whole Layout, less what the train leader gets and the echo."""
        self.calls.clear()
        was, change = (
            self.agent._newest,
            LayoutChange(number, 0, digest(Layout(number, rows, **fields)), rows, head=fields),
        )
        self.agent._on_change(change, by_mpi)
        for work in self.work:
            asyncio.run(work)
        self.work.clear()
        echoes = number > was.number and rows.get(2) != was.rows.get(2)
        assert (("beat", self.agent._life) in self.calls) is echoes, "at once for its own row alone"
        return [call for call in self.calls if call[0] not in ("train_leader.on_layout", "beat")]


WORKS = Row("rollout", "rollout", starts=1)


def test_a_node_moves_once_and_frames_that_are_out_of_date_change_nothing() -> None:
    scene = Scene()
    assert scene.takes(1, {2: WORKS}) == [("train_leader.weights.catch_up", 2), ("rollout.start", 1, 0)]
    drains = Row("to_train", "rollout", starts=1, drain="wait")
    assert scene.takes(2, {2: drains}, good_step=4) == [("rollout_service.leader.on_drain", 2, 1, False)]
    assert scene.agent.context.good_step == 4
    assert scene.takes(3, {2: drains}, recorded=7) == [], "once"
    moved = Row("to_train", "train", starts=2)
    assert scene.takes(4, {2: moved}) == [("rollout.standby",), ("train.start", 2, 0)]
    assert scene.takes(4, {2: moved}) == scene.takes(1, {2: WORKS}) == scene.calls == []
    assert not scene.agent._by_mpi
    scene.takes(4, {2: moved}, by_mpi=True)
    assert scene.agent._by_mpi, "rank 0 sees that MPI brings it again"
    again = Row("starting", "train", starts=3, world=1)
    assert scene.takes(5, {2: again}) == [("train.reset",), ("train.start", 3, 1)]


def test_a_node_that_was_lost_ends_all_and_its_heartbeat_shows_that() -> None:
    scene = Scene()
    scene.takes(1, {2: WORKS, 3: WORKS})
    calls = scene.takes(5, {2: Row("lost", starts=1, life=1), 3: WORKS})
    assert {("rollout.reset",), ("train.reset",), ("carrier.reset",)} <= set(calls)
    assert calls[-2:] == [("mesh.remember", 0), ("mesh.remember", 3)]
    assert scene.calls[-1] == ("beat", 1)
    assert scene.takes(6, {2: Row("starting", "rollout", starts=2, life=1)})[-1] == ("rollout.start", 2, 0)


@pytest.mark.parametrize("missed", [False, True])
def test_a_lost_node_is_dropped_and_taken_back_also_where_its_loss_was_missed(missed: bool) -> None:
    scene = Scene()
    scene.takes(1, {2: WORKS, 3: WORKS})
    lost = [
        ("mesh.drop", 3),
        ("train_leader.on_replica_down", 3, "node lost"),
        ("train_leader.weights.lost", 3),
        ("rollout_service.leader.on_rank_lost", 3),
    ]
    if not missed:
        assert scene.takes(2, {2: WORKS, 3: Row("lost", starts=1, life=1)}) == lost
        lost = []
    back = scene.takes(3, {2: WORKS, 3: Row("starting", "rollout", starts=2, life=1)})
    assert back == [*lost, ("mesh.remember", 3)]


def test_a_guest_is_found_by_its_row_and_dropped_without_it(tmp_path: Path) -> None:
    scene = Scene()
    guest = Row("starting", "rollout", guest=("g", ("10.0.0.9",), 7))
    ((call, rank, endpoint),) = scene.takes(1, {10_000: guest})
    assert (call, rank, endpoint.host, endpoint.port) == ("mesh.add_guest", 10_000, "g", 7)
    assert scene.takes(2, {})[0] == ("mesh.drop", 10_000)
