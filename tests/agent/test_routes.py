"""Routes: every message of the mesh reaches the part that it is for, and no other."""

from __future__ import annotations

from typing import Any, cast, get_args

import pytest

from libra_hpc.agent.hosting.rollout_service import RolloutService
from libra_hpc.agent.node import Routes, add_engines, add_rollout_service, add_train_leader
from libra_hpc.agent.node_carrier import NodeCarrier
from libra_hpc.agent.rollout_node import RolloutNode
from libra_hpc.agent.train_node import TrainNode
from libra_hpc.protocol import agents as wire
from libra_hpc.protocol.carriers import Peer, Publish
from libra_hpc.protocol.layout import LayoutChange
from libra_hpc.protocol.trainer import OfferWeights, StepDone
from libra_hpc.train_leader.train_leader import TrainLeader

from .test_layout import Part


class Scene:
    """The tables of the train leader and of the rollout leader, with every part in them."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        node, train, service = (
            cast(RolloutNode, self.part("node")),
            cast(TrainNode, self.part("train")),
            cast(RolloutService, self.part("service")),
        )
        self.routes = [Routes(), Routes()]
        add_engines(self.routes[0], node, train, cast(NodeCarrier, self.part("carrier")))
        add_train_leader(self.routes[0], cast(TrainLeader, self.part("leader")))
        add_rollout_service(self.routes[1], service)

    def part(self, name: str) -> Part:
        return Part(name, self.calls)

    def deliver(self, message: wire.MeshMessage) -> list[tuple[Any, ...]]:
        self.calls.clear()
        found = [routes.deliver(message) for routes in self.routes]
        assert any(found)
        return list(self.calls)


WANTED = wire.WeightsWanted(3, 7)
PUBLISH = Publish(1, 0, (), ())
HERE = wire.WeightsHere(3, 7, 4, 0.5)
OFFER = OfferWeights("/w", 4, 3)
PART = wire.SnapshotPart(1, "s", Peer(2, ("127.0.0.1",), 7))
TURNS = wire.Turns(())
DONE = wire.TurnsDone(())
BEAT = wire.Heartbeat(4, "rollout", {}, 0)


@pytest.mark.parametrize(
    ("message", "calls"),
    [
        (TURNS, [("node.on_turns", TURNS)]),
        (PART, [("train.keeper.on_part", PART)]),
        (PUBLISH, [("carrier.publish", PUBLISH)]),
        (WANTED, [("leader.weights.on_wanted", WANTED)]),
        (HERE, [("leader.weights.on_here", HERE)]),
        (wire.ToReplica(OFFER), [("train.on_message", OFFER)]),
        (BEAT, [("leader.on_engines", 4, {}), ("service.on_message", BEAT)]),
        (DONE, [("service.on_message", DONE)]),
    ],
)
def test_a_message_reaches_its_part(message: wire.MeshMessage, calls: list[tuple[Any, ...]]) -> None:
    assert Scene().deliver(message) == calls


def test_an_answer_of_a_replica_comes_with_its_rank() -> None:
    answer = cast(StepDone, object())
    assert Scene().deliver(wire.FromReplica(2, answer)) == [("leader.on_reply", 2, answer)]


def test_a_part_that_is_not_there_gets_nothing() -> None:
    assert not Routes().deliver(TURNS)


def test_every_message_is_for_somebody() -> None:
    """A new message type must be given to a part, or be added to what the agent or the coordinator takes itself."""
    agents = {LayoutChange, wire.StopAgent, wire.MpiStart, wire.MpiBarrier, wire.ToEnvHost}
    coordinators = {wire.Log, wire.Fatal, wire.StepReport, wire.RolloutReport}
    rows = {kind for routes in Scene().routes for kind in routes._rows}
    assert rows | agents | coordinators == set(get_args(wire.MeshMessage))
    assert not rows & agents
