"""The elastic pool as a pure state machine: event in, new pool and effects out.

    STARTING --engine ready--> ROLLOUT, or TRAIN once it is a member with its state
    ROLLOUT  --move--> TO_TRAIN --drained, engine ready, member, state arrived--> TRAIN
    TRAIN    --move--> TO_ROLLOUT --left the membership at a step boundary, engine ready--> ROLLOUT
    any      --heartbeat lost--> LOST --returned--> STARTING

- Only ``hybrid`` nodes move; ``train`` and ``rollout`` nodes are the core.
- A training engine answers -> the next *membership* (numbered set of training nodes) is proposed, instead of one still
  forming.
- The training core owns the optimizer's state: nothing is proposed while one of its nodes does not answer.
- Every rank of a proposal has confirmed it, at a step boundary -> it is the current generation.
- A member has the weights -> it counts as a trainer.
- A node leaves -> it trains until a generation without it is complete.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Literal, Union

import msgspec

Role = Literal["train", "rollout"]
Component = Literal["train", "hybrid", "rollout"]


class NodeState(StrEnum):
    STARTING = "starting"
    TRAIN = "train"
    TO_ROLLOUT = "to_rollout"
    ROLLOUT = "rollout"
    TO_TRAIN = "to_train"
    LOST = "lost"


class IllegalTransition(Exception):
    """The event is impossible in the present state of the pool; the caller logs it and keeps the old pool."""


class Node(msgspec.Struct, frozen=True):
    rank: int
    component: Component
    state: NodeState
    role: Role
    """The role it has, or is moving to."""
    draining: bool = False
    """Ordered to train, with turns still in flight."""
    engine_ready: bool = False
    """Whether the engine of ``role`` answers."""
    has_state: bool = False
    """Its training engine has the current weights; a leaving node has them until it is freed."""
    member_of: int = -1
    """Last generation its present training engine confirmed."""


class Membership(msgspec.Struct, frozen=True):
    """A numbered set of training nodes; a run starts from an empty one."""

    generation: int
    ranks: tuple[int, ...]


class Pool(msgspec.Struct, frozen=True):
    nodes: dict[int, Node]
    membership: Membership
    """Latest complete generation."""
    issued: int
    """Highest generation number ever proposed."""
    forming: Membership | None = None
    """Latest proposal while not every member has confirmed it."""


# Events -------------------------------------------------------------------------------------------


class MoveOrdered(msgspec.Struct, frozen=True):
    """The planner wants a hybrid node in the other role."""

    rank: int
    to: Role


class Drained(msgspec.Struct, frozen=True):
    """A node that leaves rollout has no turn in flight any more."""

    rank: int


class EngineAnswers(msgspec.Struct, frozen=True):
    """The node's engine of this kind answers."""

    rank: int
    kind: Role


class StateArrived(msgspec.Struct, frozen=True):
    """The node's training engine has the weights of the current step."""

    rank: int


class MemberOf(msgspec.Struct, frozen=True):
    """The node's training engine formed this generation's group; one of a superseded generation changes nothing."""

    rank: int
    generation: int


class EngineEnded(msgspec.Struct, frozen=True):
    """The node's engine of this kind ended unasked; the node itself lives."""

    rank: int
    kind: Role


class HeartbeatLost(msgspec.Struct, frozen=True):
    """The node is silent for too long."""

    rank: int


class Returned(msgspec.Struct, frozen=True):
    """A lost node is heard again; whatever it held is gone."""

    rank: int


Event = Union[MoveOrdered, Drained, EngineAnswers, StateArrived, MemberOf, EngineEnded, HeartbeatLost, Returned]

# Effects ------------------------------------------------------------------------------------------


class OrderStart(msgspec.Struct, frozen=True):
    """Start the node's engine of this kind, or wake it from standby."""

    rank: int
    kind: Role


class OrderStandby(msgspec.Struct, frozen=True):
    """Put the node's engine of this kind into warm standby."""

    rank: int
    kind: Role


class OrderDrain(msgspec.Struct, frozen=True):
    """Send no new turns to this node; report `Drained` when those in flight are answered or moved."""

    rank: int


class FormMembership(msgspec.Struct, frozen=True):
    """Form this generation at the next step boundary; members report `MemberOf`, new ones `StateArrived` too."""

    membership: Membership


Effect = Union[OrderStart, OrderStandby, OrderDrain, FormMembership]

# Transitions --------------------------------------------------------------------------------------


def start(nodes: Iterable[tuple[int, Component]], hybrid_role: Role = "rollout") -> tuple[Pool, tuple[Effect, ...]]:
    """A pool whose nodes ``(rank, component)`` all have to start their engine."""
    made: dict[int, Node] = {}
    for rank, component in nodes:
        made[rank] = Node(rank, component, NodeState.STARTING, hybrid_role if component == "hybrid" else component)
    return Pool(made, Membership(0, ()), issued=0), tuple(OrderStart(node.rank, node.role) for node in made.values())


def trainers(pool: Pool) -> tuple[int, ...]:
    """Nodes that train now: members with their weights, leaving ones until they are freed."""
    nodes = (pool.nodes[rank] for rank in pool.membership.ranks)
    return tuple(
        n.rank for n in nodes if n.state is NodeState.TRAIN or (n.state is NodeState.TO_ROLLOUT and n.has_state)
    )


def rollout_nodes(pool: Pool) -> tuple[int, ...]:
    return tuple(rank for rank, node in pool.nodes.items() if node.state is NodeState.ROLLOUT)


def advance(pool: Pool, event: Event) -> tuple[Pool, tuple[Effect, ...]]:
    """Apply one event; raises `IllegalTransition` and changes nothing when it is impossible."""
    node = pool.nodes.get(event.rank)
    if node is None:
        raise IllegalTransition(f"node {event.rank} is not in the pool")
    match event:
        case MoveOrdered(to="train"):
            return _to_train(pool, node)
        case MoveOrdered():
            return _to_rollout(pool, node)
        case Drained():
            _require(node.draining, node, "drained")
            return _put(pool, node, draining=False), (
                OrderStandby(node.rank, "rollout"),
                OrderStart(node.rank, "train"),
            )
        case EngineAnswers(kind=kind):
            return _engine_ready(pool, node, kind)
        case StateArrived():
            _require(node.role == "train" and node.engine_ready, node, "state arrived")
            return _settle(_put(pool, node, has_state=True)), ()
        case MemberOf(generation=generation):
            return _member(pool, node, generation)
        case EngineEnded(kind=kind):
            return _engine_died(pool, node, kind)
        case HeartbeatLost():
            return _lost(pool, node)
        case Returned():
            _require(node.state is NodeState.LOST, node, "returned")
            return _put(pool, node, state=NodeState.STARTING), (OrderStart(node.rank, node.role),)


def _to_train(pool: Pool, node: Node) -> tuple[Pool, tuple[Effect, ...]]:
    _require(node.component == "hybrid", node, "ordered to train: it is a core node")
    _require(node.state is NodeState.ROLLOUT, node, "ordered to train")
    _require(len(rollout_nodes(pool)) > 1, node, "ordered to train: it is the last rollout node")
    moved = _put(pool, node, state=NodeState.TO_TRAIN, role="train", draining=True, engine_ready=False)
    return moved, (OrderDrain(node.rank),)


def _to_rollout(pool: Pool, node: Node) -> tuple[Pool, tuple[Effect, ...]]:
    _require(node.component == "hybrid", node, "ordered to rollout: it is a core node")
    _require(node.state is NodeState.TRAIN, node, "ordered to rollout")
    return _propose(_put(pool, node, state=NodeState.TO_ROLLOUT, role="rollout", engine_ready=False))


def _engine_ready(pool: Pool, node: Node, kind: Role) -> tuple[Pool, tuple[Effect, ...]]:
    started = node.state is not NodeState.LOST and not node.draining and not node.engine_ready
    _require(started and kind == node.role and not (kind == "rollout" and node.has_state), node, f"{kind} engine ready")
    if kind == "rollout":
        return _put(pool, node, state=NodeState.ROLLOUT, engine_ready=True), ()
    return _propose(_put(pool, node, engine_ready=True))


def _member(pool: Pool, node: Node, generation: int) -> tuple[Pool, tuple[Effect, ...]]:
    _require(generation <= pool.issued, node, f"member of generation {generation}, which was never proposed")
    forming = pool.forming
    if forming is None or generation != forming.generation:
        return pool, ()
    _require(node.rank in forming.ranks, node, f"member of generation {generation}")
    pool = _put(pool, node, member_of=generation)
    if any(pool.nodes[rank].member_of != generation for rank in forming.ranks):
        return pool, ()
    pool = msgspec.structs.replace(pool, membership=forming, forming=None)
    effects: list[Effect] = []
    for leaving in [n for n in pool.nodes.values() if n.state is NodeState.TO_ROLLOUT and n.has_state]:
        pool = _put(pool, leaving, has_state=False, member_of=-1)
        effects += (OrderStandby(leaving.rank, "train"), OrderStart(leaving.rank, "rollout"))
    return _settle(pool), tuple(effects)


def _engine_died(pool: Pool, node: Node, kind: Role) -> tuple[Pool, tuple[Effect, ...]]:
    _require(node.state is not NodeState.LOST, node, f"{kind} engine died")
    if kind == "rollout":
        if node.draining:
            return _put(pool, node, draining=False), (OrderStart(node.rank, "train"),)
        if node.role != "rollout" or node.has_state:
            return pool, ()  # a standby: the next move pays a cold start
        if node.state is NodeState.ROLLOUT:
            pool = _put(pool, node, state=NodeState.STARTING, engine_ready=False)
        return pool, (OrderStart(node.rank, "rollout"),)
    if node.state is NodeState.TO_ROLLOUT and node.has_state:
        return _put(pool, node, has_state=False, member_of=-1), (OrderStart(node.rank, "rollout"),)
    if node.role != "train" or node.draining:
        return pool, ()  # a standby
    state = NodeState.STARTING if node.state is NodeState.TRAIN else node.state
    was_proposed = node.engine_ready
    died = _put(pool, node, state=state, engine_ready=False, has_state=False, member_of=-1)
    died, effects = _propose(died) if was_proposed else (died, ())
    return died, (*effects, OrderStart(node.rank, "train"))


def _lost(pool: Pool, node: Node) -> tuple[Pool, tuple[Effect, ...]]:
    if node.state is NodeState.LOST:
        return pool, ()
    changes = node.role == "train" and node.engine_ready
    lost = _put(pool, node, state=NodeState.LOST, draining=False, engine_ready=False, has_state=False, member_of=-1)
    return _propose(lost) if changes else (lost, ())


def _propose(pool: Pool) -> tuple[Pool, tuple[Effect, ...]]:
    """Propose the next generation, over all training engines that answer; none while the core is incomplete."""
    nodes = pool.nodes.values()
    if not all(n.engine_ready for n in nodes if n.component == "train"):
        return msgspec.structs.replace(pool, forming=None), ()
    wanted = tuple(sorted(n.rank for n in nodes if n.role == "train" and n.engine_ready))
    forming = Membership(pool.issued + 1, wanted)
    return msgspec.structs.replace(pool, forming=forming, issued=forming.generation), (FormMembership(forming),)


def _settle(pool: Pool) -> Pool:
    """Let every member whose state has arrived count as a trainer."""
    for node in list(pool.nodes.values()):
        arrived = node.has_state and node.engine_ready and node.role == "train"
        if arrived and node.member_of == pool.membership.generation and node.state is not NodeState.TRAIN:
            pool = _put(pool, node, state=NodeState.TRAIN)
    return pool


def _put(pool: Pool, node: Node, **changes: object) -> Pool:
    return msgspec.structs.replace(pool, nodes={**pool.nodes, node.rank: msgspec.structs.replace(node, **changes)})


def _require(possible: bool, node: Node, what: str) -> None:
    if not possible:
        raise IllegalTransition(f"node {node.rank} ({node.component}, {node.state}): {what}")
