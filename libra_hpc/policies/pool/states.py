"""The elastic pool as a pure state machine: event in, new pool and effects (messages of the mesh) out.

    STARTING --engine ready--> ROLLOUT, or TRAIN once it is a member with its state
    ROLLOUT  --move--> TO_TRAIN --drained, engine ready, member, state arrived--> TRAIN
    TRAIN    --move--> TO_ROLLOUT --left the membership at a step boundary, engine ready--> ROLLOUT
    any      --rank lost--> LOST --rank back--> STARTING

- ``hybrid`` nodes move, and those of the core where they share (`Node.shares`), all together.
- The core goes to rollout once its trainers are in standby; they keep their state, and no generation has them.
- A rollout engine of the core, or its trainers, end meanwhile -> the core goes back to training.
- A training engine is ready -> the next *membership* (numbered set of nodes) is proposed, instead of one still forming.
- The training core owns the optimizer's state: nothing is proposed while one of its nodes is not ready.
- Every rank of a proposal has confirmed it, at a step boundary -> it is the current generation.
- A member has the weights -> it counts as a trainer.
- A node leaves -> it trains until a generation without it is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Literal, Union

import msgspec

from libra_hpc.protocol.agents import (
    DrainTurns,
    FormGeneration,
    RankBack,
    RankLost,
    RestCore,
    StandbyEngine,
    StartEngine,
    StopTrainers,
    TurnsDrained,
)
from libra_hpc.protocol.engine_state import EngineKind, EngineState

Component = Literal["train", "hybrid", "rollout"]


class NodeState(StrEnum):
    STARTING = "starting"
    TRAIN = "train"
    TO_ROLLOUT = "to_rollout"
    ROLLOUT = "rollout"
    TO_TRAIN = "to_train"
    LOST = "lost"


class Membership(msgspec.Struct, frozen=True):
    """A numbered set of training nodes; a run starts from an empty one."""

    generation: int
    ranks: tuple[int, ...]


class MoveOrdered(msgspec.Struct, frozen=True):
    """The planner wants a hybrid node in the other role."""

    rank: int
    to: EngineKind
    abort: bool = False
    """Its turns in flight go on elsewhere."""
    last: bool = False
    """Also as the last rollout node: the run ends."""


class StateArrived(msgspec.Struct, frozen=True):
    """The node's training engine has the weights of the current step."""

    rank: int


class MemberOf(msgspec.Struct, frozen=True):
    """The node's training engine formed this generation's group; one of a superseded generation changes nothing."""

    rank: int
    generation: int


Event = Union[MoveOrdered, TurnsDrained, EngineState, StateArrived, MemberOf, RankLost, RankBack]
"""A lost training engine of an earlier world changes nothing."""
Effect = Union[StartEngine, StopTrainers, StandbyEngine, DrainTurns, FormGeneration, RestCore]
"""Messages to the node's agent; the last three are for the leaders."""


class IllegalTransition(Exception):
    """The event is impossible in the present state of the pool; the caller logs it and keeps the old pool."""


class Node(msgspec.Struct, frozen=True):
    rank: int
    component: Component
    state: NodeState
    role: EngineKind
    """The role it has, or is moving to."""
    draining: bool = False
    """Ordered to train, with turns still in flight."""
    engine_ready: bool = False
    """Whether the engine of ``role`` is ready."""
    has_state: bool = False
    """Its training engine has the current weights; a leaving node has them until it is freed."""
    member_of: int = -1
    """Last generation its present training engine confirmed."""
    unit: tuple[int, ...] = ()
    """Ranks of the nodes that train as one world and move together; alone its own."""
    world: int = 0
    """Number of the unit's training world: all its processes restart when one has ended."""
    shares: bool = False
    """A node of the core that rolls out, too."""

    @property
    def moves(self) -> bool:
        return self.component == "hybrid" or self.shares


class Pool(msgspec.Struct, frozen=True):
    nodes: dict[int, Node]
    membership: Membership
    """Latest complete generation."""
    issued: int
    """Highest generation number ever proposed."""
    forming: Membership | None = None
    """Latest proposal while not every member has confirmed it."""


def start(
    nodes: Iterable[tuple[int, Component]],
    hybrid_role: EngineKind = "rollout",
    unit: Callable[[int], tuple[int, ...]] = lambda rank: (rank,),
    core_rolls_out: bool = False,
) -> tuple[Pool, tuple[Effect, ...]]:
    """A pool whose nodes ``(rank, component)`` all have to start their engine; ``unit`` as in `Node`."""
    made: dict[int, Node] = {}
    for rank, component in nodes:
        role = hybrid_role if component == "hybrid" else component
        shares = core_rolls_out and component == "train"
        made[rank] = Node(rank, component, NodeState.STARTING, role, unit=unit(rank), shares=shares)
    return Pool(made, Membership(0, ()), issued=0), tuple(StartEngine(node.rank, node.role) for node in made.values())


def trainers(pool: Pool) -> tuple[int, ...]:
    """Nodes that train now: members with their weights, leaving ones until they are freed."""
    nodes = (pool.nodes[rank] for rank in pool.membership.ranks)
    return tuple(
        n.rank for n in nodes if n.state is NodeState.TRAIN or (n.state is NodeState.TO_ROLLOUT and n.has_state)
    )


def core_rolls_out(pool: Pool) -> bool:
    """Whether nodes of the core roll out, or are about to."""
    return any(node.shares and node.role == "rollout" for node in pool.nodes.values())


def rollout_nodes(pool: Pool) -> tuple[int, ...]:
    return tuple(rank for rank, node in pool.nodes.items() if node.state is NodeState.ROLLOUT)


def advance(pool: Pool, event: Event) -> tuple[Pool, tuple[Effect, ...]]:
    """Apply one event; raises `IllegalTransition` and changes nothing when it is impossible."""
    node = pool.nodes.get(event.rank)
    if node is None:
        raise IllegalTransition(f"node {event.rank} is not in the pool")
    match event:
        case MoveOrdered(to="train"):
            return _to_train(pool, node, event)
        case MoveOrdered():
            return _to_rollout(pool, node)
        case TurnsDrained():
            return _drained(pool, node)
        case EngineState():
            return _engine_state(pool, node, event)
        case StateArrived():
            if node.shares and node.role == "rollout":
                return pool, ()  # it was ordered to roll out while the generation without the others formed
            _require(node.role == "train" and node.engine_ready, node, "state arrived")
            return _settle(_put(pool, node, has_state=True)), ()
        case MemberOf(generation=generation):
            return _member(pool, node, generation)
        case RankLost():
            return _lost(pool, node)
        case RankBack():
            _require(node.state is NodeState.LOST, node, "returned")
            return _put(pool, node, state=NodeState.STARTING), (StartEngine(node.rank, node.role),)


def _engine_state(pool: Pool, node: Node, event: EngineState) -> tuple[Pool, tuple[Effect, ...]]:
    match event:
        case EngineState(state="ready", kind=kind):
            return _engine_ready(pool, node, kind)
        case EngineState(kind="train", state="standby"):
            return _trainers_rest(pool, node)
        case EngineState(kind="train", world=world):
            return _trainers_lost(pool, node) if world == node.world else (pool, ())
    return _rollout_engine_lost(pool, node)


def _unit(pool: Pool, node: Node) -> list[Node]:
    return [pool.nodes[rank] for rank in node.unit]


def _to_train(pool: Pool, node: Node, order: MoveOrdered) -> tuple[Pool, tuple[Effect, ...]]:
    _require(node.moves, node, "ordered to train: it is a core node")
    _require(all(n.state is NodeState.ROLLOUT for n in _unit(pool, node)), node, "ordered to train")
    stays = order.last or len(rollout_nodes(pool)) > len(node.unit)
    _require(stays, node, "ordered to train: it is the last rollout node")
    return _drain(pool, node, order.abort)


def _drain(pool: Pool, node: Node, abort: bool) -> tuple[Pool, tuple[Effect, ...]]:
    here = [one for one in _unit(pool, node) if one.state is not NodeState.LOST]
    for one in here:
        pool = _put(pool, one, state=NodeState.TO_TRAIN, role="train", draining=True, engine_ready=False)
    return pool, tuple(DrainTurns(one.rank, abort) for one in here)


def _drained(pool: Pool, node: Node) -> tuple[Pool, tuple[Effect, ...]]:
    _require(node.draining, node, "drained")
    if any(n.role != "train" for n in _unit(pool, node)):
        # It cannot train without the others, of which one was lost; it may be back already.
        back = _put(pool, node, state=NodeState.TO_ROLLOUT, role="rollout", draining=False)
        return back, (StartEngine(node.rank, "rollout"),)
    orders = StandbyEngine(node.rank, "rollout"), StartEngine(node.rank, "train", node.world)
    return _put(pool, node, draining=False), orders


def _to_rollout(pool: Pool, node: Node) -> tuple[Pool, tuple[Effect, ...]]:
    _require(node.moves, node, "ordered to rollout: it is a core node")
    _require(all(n.state is NodeState.TRAIN for n in _unit(pool, node)), node, "ordered to rollout")
    for one in _unit(pool, node):
        pool = _put(pool, one, state=NodeState.TO_ROLLOUT, role="rollout", engine_ready=False)
    return (pool, (RestCore(),)) if node.shares else _propose(pool)


def _trainers_rest(pool: Pool, node: Node) -> tuple[Pool, tuple[Effect, ...]]:
    """The trainers of a node of the core are in standby, outside of all generations."""
    _require(node.shares and node.state is not NodeState.LOST, node, "trainers in standby")
    pool = _put(pool, node, has_state=False, member_of=-1)
    if node.role == "rollout":
        return pool, (StartEngine(node.rank, "rollout"),)
    if node.draining:
        return pool, ()
    # It was ordered back meanwhile.
    pool = _put(pool, pool.nodes[node.rank], state=NodeState.TO_TRAIN, engine_ready=False)
    return pool, (StartEngine(node.rank, "train", node.world),)


def _engine_ready(pool: Pool, node: Node, kind: EngineKind) -> tuple[Pool, tuple[Effect, ...]]:
    started = node.state is not NodeState.LOST and not node.draining and not node.engine_ready
    _require(started and kind == node.role and not (kind == "rollout" and node.has_state), node, f"{kind} engine ready")
    if kind == "rollout":
        return _put(pool, node, state=NodeState.ROLLOUT, engine_ready=True), ()
    pool = _put(pool, node, engine_ready=True)
    return _propose(pool) if all(n.engine_ready for n in _unit(pool, node)) else (pool, ())


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
    for leaving in [n for n in pool.nodes.values() if n.state is NodeState.TO_ROLLOUT and n.has_state and not n.shares]:
        pool = _put(pool, leaving, has_state=False, member_of=-1)
        effects += (StandbyEngine(leaving.rank, "train"), StartEngine(leaving.rank, "rollout"))
    return _settle(pool), tuple(effects)


def _rollout_engine_lost(pool: Pool, node: Node) -> tuple[Pool, tuple[Effect, ...]]:
    _require(node.state is not NodeState.LOST, node, "rollout engine lost")
    if node.draining:
        drained, orders = _drained(pool, node)
        return drained, tuple(order for order in orders if not isinstance(order, StandbyEngine))
    if node.role != "rollout" or node.has_state:
        return pool, ()  # a standby: the next move pays a cold start
    if node.shares:
        return _drain(pool, node, abort=True)
    if node.state is NodeState.ROLLOUT:
        pool = _put(pool, node, state=NodeState.STARTING, engine_ready=False)
    return pool, (StartEngine(node.rank, "rollout"),)


def _trainers_lost(pool: Pool, node: Node) -> tuple[Pool, tuple[Effect, ...]]:
    _require(node.state is not NodeState.LOST, node, "train engine lost")
    changes = False
    effects: list[Effect] = []
    for one in _unit(pool, node):
        if one.rank != node.rank:
            effects.append(StopTrainers(one.rank))
        pool, own = _restart_unit(pool, one)
        effects += own
        changes |= one.role == "train" and one.engine_ready
    pool, proposal = _propose(pool) if changes else (pool, ())
    return pool, (*proposal, *effects)


def _restart_unit(pool: Pool, node: Node) -> tuple[Pool, list[Effect]]:
    """The node's training processes are gone with those of its unit."""
    world = node.world + (len(node.unit) > 1)
    pool = _put(pool, node, world=world)
    if node.shares and node.role == "rollout" and not node.has_state:
        drained, orders = _drain(pool, pool.nodes[node.rank], abort=True)
        return drained, list(orders)
    if node.shares:
        pool = _put(pool, pool.nodes[node.rank], role="train")
    elif node.role == "rollout" and node.has_state:
        return _put(pool, pool.nodes[node.rank], has_state=False, member_of=-1), [StartEngine(node.rank, "rollout")]
    if node.draining or (node.role != "train" and not node.shares):
        return pool, []  # a standby
    state = NodeState.STARTING if node.state in (NodeState.TRAIN, NodeState.TO_ROLLOUT) else node.state
    begun = _put(pool, pool.nodes[node.rank], state=state, engine_ready=False, has_state=False, member_of=-1)
    return begun, [StartEngine(node.rank, "train", world)]


def _lost(pool: Pool, node: Node) -> tuple[Pool, tuple[Effect, ...]]:
    if node.state is NodeState.LOST:
        return pool, ()
    changes = node.role == "train" and node.engine_ready
    pool = _put(pool, node, state=NodeState.LOST, draining=False, engine_ready=False, has_state=False, member_of=-1)
    effects: list[Effect] = []
    if len(node.unit) > 1:
        # The others cannot train without it, and it returns to what they do.
        for one in _unit(pool, node):
            pool = _put(pool, one, world=one.world + 1)
            if one.rank != node.rank and one.state is not NodeState.LOST:
                pool, own = _roll_out_alone(pool, pool.nodes[one.rank])
                effects += [StopTrainers(one.rank), *own]
                changes |= one.role == "train" and one.engine_ready
        pool = _put(pool, pool.nodes[node.rank], role="rollout")
    pool, proposal = _propose(pool) if changes else (pool, ())
    return pool, (*proposal, *effects)


def _roll_out_alone(pool: Pool, node: Node) -> tuple[Pool, list[Effect]]:
    """What a node does whose unit has lost another one; one that still drains returns once it has."""
    leaving = node.role == "rollout" and node.has_state
    if node.draining or (node.role == "rollout" and not leaving):
        return pool, []
    back = _put(
        pool, node, state=NodeState.TO_ROLLOUT, role="rollout", engine_ready=False, has_state=False, member_of=-1
    )
    return back, [StartEngine(node.rank, "rollout")]


def _propose(pool: Pool) -> tuple[Pool, tuple[Effect, ...]]:
    """Propose the next generation, over all training engines that are ready; none while the core is incomplete."""
    nodes = pool.nodes.values()
    if not all(n.engine_ready and n.role == "train" for n in nodes if n.component == "train"):
        return msgspec.structs.replace(pool, forming=None), ()
    ready = {n.rank for n in nodes if n.role == "train" and n.engine_ready}
    wanted = tuple(sorted(rank for rank in ready if ready.issuperset(pool.nodes[rank].unit)))
    forming = Membership(pool.issued + 1, wanted)
    order = (FormGeneration(forming.generation, forming.ranks),)
    return msgspec.structs.replace(pool, forming=forming, issued=forming.generation), order


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
