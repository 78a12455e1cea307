"""Which part of a node gets which message of the mesh: one table of message type -> handler.

Every part adds its rows when it is built.  A message without a row is for the coordinator; where there is none it is
dropped: it is for a part that this node does not have, or not yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from libra_hpc.agent.hosting.rollout_service import RolloutService
from libra_hpc.protocol import agents as wire
from libra_hpc.protocol.carriers import Publish
from libra_hpc.protocol.engine_state import EngineState
from libra_hpc.train_leader.train_leader import TrainLeader

from .node_carrier import NodeCarrier
from .rollout_node import RolloutNode
from .train_node import TrainNode

M = TypeVar("M")

FOR_ROLLOUT_SERVICE = (
    wire.TurnsDone,
    EngineState,
    wire.EngineVersion,
    wire.EngineLoad,
    wire.Committed,
    wire.FromEnvHost,
    wire.EnvHostLost,
)


class Routes:
    def __init__(self) -> None:
        self._rows: dict[type, Callable[[Any], object]] = {}

    def add(self, kind: type[M], handler: Callable[[M], object]) -> None:
        """Raises `ValueError` where another part has the messages of this type."""
        if self._rows.setdefault(kind, handler) != handler:
            raise ValueError(f"{kind.__name__} has a handler: {self._rows[kind]}")

    def deliver(self, message: object) -> bool:
        """Hand a message to its handler; False when there is none."""
        handler = self._rows.get(type(message))
        if handler is None:
            return False
        handler(message)
        return True


def add_rollout(routes: Routes, rollout: RolloutNode, carrier: NodeCarrier) -> None:
    """Rows of a node with rollout engines."""
    routes.add(wire.Turns, rollout.on_turns)
    routes.add(wire.WrongEngine, rollout.on_wrong_engine)
    routes.add(wire.WeightsCurrent, rollout.on_current)
    routes.add(Publish, carrier.publish)


def add_engines(routes: Routes, rollout: RolloutNode, train: TrainNode, carrier: NodeCarrier) -> None:
    """Rows of a node with engines of both kinds."""
    rollout.beside, train.beside = train, rollout
    add_rollout(routes, rollout, carrier)
    routes.add(wire.SnapshotPart, lambda part: train.keeper.on_part(part))
    routes.add(wire.ToReplica, lambda order: train.on_message(order.message))


def add_train_leader(routes: Routes, leader: TrainLeader) -> None:
    """Rows of the train leader."""

    def lost(engine: EngineState) -> None:
        if engine.kind == "train" and engine.state == "lost":
            leader.on_replica_down(engine.rank, engine.reason)

    routes.add(wire.FromReplica, lambda answer: leader.on_reply(answer.rank, answer.message))
    routes.add(wire.GroupDone, leader.on_group)
    routes.add(wire.Batch, leader.on_batch)
    routes.add(wire.WeightsOffered, leader.on_offered)
    routes.add(wire.WeightsWanted, leader.weights.on_wanted)
    routes.add(wire.WeightsHere, leader.weights.on_here)
    routes.add(EngineState, lost)


def add_rollout_service(routes: Routes, service: RolloutService) -> None:
    for kind in FOR_ROLLOUT_SERVICE:
        routes.add(kind, service.on_message)
