"""The elastic pool as a pure state machine: event in, new pool out; `Pool.rows` is what its nodes are to be.

    STARTING --engine or hosts ready--> ROLLOUT, ENV, or TRAIN once it is a member with its state
    ROLLOUT  --move--> TO_TRAIN --drained, engine ready, member, state arrived--> TRAIN
    TRAIN    --move--> TO_ROLLOUT --left the membership at a step boundary, engine ready--> ROLLOUT
    any      --rank lost--> LOST --rank back--> STARTING

- ``hybrid`` nodes move, and those of the core where they share (`Node.shares`), all together.
- The core goes to rollout once its trainers are in standby; they keep their state, and no generation has them.
- A rollout engine of the core, or its trainers, end meanwhile -> the core goes back to training.
- A training engine is ready -> the next *membership* (numbered set of nodes) is proposed, instead of one still forming.
- A node of the training core, which owns the optimizer's state, is not ready -> nothing is proposed.
- Every rank of a proposal has confirmed it, at a step boundary -> it is the current generation.
- A member has the weights -> it counts as a trainer.
- A node leaves -> it trains until a generation without it is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Literal, Union

import msgspec

from libra_hpc.protocol.engine_state import EngineKind, ObservedEngine
from libra_hpc.protocol.layout import Drain, Row

NodeComponent = Literal["train", "hybrid", "rollout", "env"]


class NodeState(StrEnum):
    STARTING = "starting"
    TRAIN = "train"
    TO_ROLLOUT = "to_rollout"
    ROLLOUT = "rollout"
    TO_TRAIN = "to_train"
    ENV = "env"
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


class TurnsDrained(msgspec.Struct, frozen=True):
    """No turn of the node's engines is in flight."""

    rank: int


class EnginesAre(msgspec.Struct, frozen=True):
    """The node's engines of a kind are all ready, one ended, or its trainers are in standby."""

    rank: int
    kind: EngineKind
    state: Literal["ready", "lost", "standby"]
    world: int = 0


class StateArrived(msgspec.Struct, frozen=True):
    """The node's training engine has the weights of the current step."""

    rank: int


class MemberOf(msgspec.Struct, frozen=True):
    """The node's training engine formed this generation's group; one of a superseded generation changes nothing."""

    rank: int
    generation: int


class RankLost(msgspec.Struct, frozen=True):
    """The node's heartbeat is missing, or its process ended."""

    rank: int


class RankBack(msgspec.Struct, frozen=True):
    """The lost node has ended all that it had."""

    rank: int


Event = Union[MoveOrdered, TurnsDrained, EnginesAre, StateArrived, MemberOf, RankLost, RankBack]
"""A lost training engine of an earlier world changes nothing."""


class IllegalTransition(Exception):
    """The event is impossible in the present state of the pool; the caller logs it and keeps the old pool."""


class Node(msgspec.Struct, frozen=True):
    rank: int
    component: NodeComponent
    state: NodeState
    role: EngineKind
    """The role it has, or is moving to."""
    drain: Drain = ""
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
    starts: int = 0
    life: int = 0
    """Both as in `Row`."""

    @property
    def moves(self) -> bool:
        return self.component == "hybrid" or self.shares

    @property
    def leaving(self) -> bool:
        """Ordered to roll out while its trainers have their state."""
        return self.role == "rollout" and self.has_state

    def row(self, member: bool) -> Row:
        active: EngineKind = "train" if self.has_state else "rollout" if self.drain else self.role
        awake = None if self.state is NodeState.LOST else active
        return Row(str(self.state), awake, self.starts, self.world, self.drain, self.life, member=member)


class Pool(msgspec.Struct, frozen=True):
    nodes: dict[int, Node]
    membership: Membership
    """Latest complete generation."""
    issued: int
    """Highest generation number ever proposed."""
    forming: Membership | None = None
    """Latest proposal while not every member has confirmed it."""

    @property
    def newest(self) -> Membership:
        return self.forming or self.membership

    @property
    def rows(self) -> dict[int, Row]:
        members = set(self.newest.ranks)
        return {rank: node.row(rank in members) for rank, node in self.nodes.items()}

    @property
    def rests(self) -> bool:
        """Whether the trainers of the core are to go into standby."""
        return any(node.shares and node.leaving for node in self.nodes.values())


def start(
    nodes: Iterable[tuple[int, NodeComponent]],
    hybrid_role: EngineKind = "rollout",
    unit: Callable[[int], tuple[int, ...]] = lambda rank: (rank,),
    core_rolls_out: bool = False,
) -> Pool:
    """A pool whose nodes ``(rank, component)`` all have to start their engine; ``unit`` as in `Node`."""
    made: dict[int, Node] = {}
    for rank, component in nodes:
        role = hybrid_role if component == "hybrid" else component
        shares = core_rolls_out and component == "train"
        made[rank] = Node(rank, component, NodeState.STARTING, role, unit=unit(rank), shares=shares, starts=1)
    return Pool(made, Membership(0, ()), issued=0)


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


def at_work(engines: Mapping[str, ObservedEngine], kind: str, starts: int) -> bool:
    """Whether all engines of the kind are ready that were started, or woken, for this `Row.starts`."""
    own = [one for one in engines.values() if one.kind == kind and one.state != "closed"]
    return bool(own) and all(one.state == "ready" and one.starts == starts for one in own)


def ended(before: Mapping[str, ObservedEngine], now: Mapping[str, ObservedEngine], kind: str) -> list[ObservedEngine]:
    """Engines of the kind that have ended between two heartbeats."""
    ends = {name: one.ends for name, one in before.items()}
    return [one for name, one in now.items() if one.kind == kind and one.ends > ends.get(name, 0)]


def observed(node: Node, before: Mapping[str, ObservedEngine], now: Mapping[str, ObservedEngine]) -> list[EnginesAre]:
    """What the node's engines did between two heartbeats, beside its row."""
    kinds: tuple[EngineKind, ...] = ("train", "rollout")
    found = [EnginesAre(node.rank, kind, "lost", one.world) for kind in kinds for one in ended(before, now, kind)[:1]]
    for one in now.values():
        if node.shares and one.kind == "train" and one.state == "standby" and one.starts == node.starts:
            found.append(EnginesAre(node.rank, "train", "standby"))
    waits = not (node.engine_ready or node.drain or node.leaving)
    if waits and at_work(now, node.role, node.starts):
        found.append(EnginesAre(node.rank, node.role, "ready"))
    return [] if node.state is NodeState.LOST else found


def advance(pool: Pool, event: Event) -> Pool:
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
        case EnginesAre():
            return _engines_are(pool, node, event)
        case StateArrived():
            if node.shares and node.role == "rollout":
                return pool  # it was ordered to roll out while the generation without the others formed
            _require(node.role == "train" and node.engine_ready, node, "state arrived")
            return _settle(_put(pool, node, has_state=True))
        case MemberOf(generation=generation):
            return _member(pool, node, generation)
        case RankLost():
            return _lost(pool, node)
        case RankBack():
            _require(node.state is NodeState.LOST, node, "returned")
            return _begin(pool, node, state=NodeState.STARTING)


def _engines_are(pool: Pool, node: Node, event: EnginesAre) -> Pool:
    match event:
        case EnginesAre(state="ready", kind=kind):
            return _engine_ready(pool, node, kind)
        case EnginesAre(kind="train", state="standby"):
            return _trainers_rest(pool, node)
        case EnginesAre(kind="train", world=world):
            return _trainers_lost(pool, node) if world == node.world else pool
    return _rollout_engine_lost(pool, node)


def _unit(pool: Pool, node: Node) -> list[Node]:
    return [pool.nodes[rank] for rank in node.unit]


def _to_train(pool: Pool, node: Node, order: MoveOrdered) -> Pool:
    _require(node.moves, node, "ordered to train: it is a core node")
    _require(all(n.state is NodeState.ROLLOUT for n in _unit(pool, node)), node, "ordered to train")
    return _drain(pool, node, order.abort)


def _drain(pool: Pool, node: Node, abort: bool) -> Pool:
    drain: Drain = "abort" if abort else "wait"
    for one in _unit(pool, node):
        if one.state is not NodeState.LOST:
            pool = _put(pool, one, state=NodeState.TO_TRAIN, role="train", drain=drain, engine_ready=False)
    return pool


def _drained(pool: Pool, node: Node) -> Pool:
    _require(bool(node.drain), node, "drained")
    if any(n.role != "train" for n in _unit(pool, node)):
        # It cannot train without the others, of which one was lost; it may be back already.
        return _begin(pool, node, state=NodeState.TO_ROLLOUT, role="rollout", drain="")
    return _begin(pool, node, drain="")


def _to_rollout(pool: Pool, node: Node) -> Pool:
    _require(node.moves, node, "ordered to rollout: it is a core node")
    _require(all(n.state is NodeState.TRAIN for n in _unit(pool, node)), node, "ordered to rollout")
    for one in _unit(pool, node):
        pool = _put(pool, one, state=NodeState.TO_ROLLOUT, role="rollout", engine_ready=False)
    return pool if node.shares else _propose(pool)


def _trainers_rest(pool: Pool, node: Node) -> Pool:
    """The trainers of a node of the core are in standby, outside of all generations."""
    _require(node.shares and node.state is not NodeState.LOST, node, "trainers in standby")
    if node.role == "rollout":
        return _begin(pool, node, has_state=False, member_of=-1)
    if node.drain:
        return _put(pool, node, has_state=False, member_of=-1)
    # It was ordered back meanwhile.
    return _begin(pool, node, state=NodeState.TO_TRAIN, engine_ready=False, has_state=False, member_of=-1)


def _engine_ready(pool: Pool, node: Node, kind: EngineKind) -> Pool:
    started = node.state is not NodeState.LOST and not node.drain and not node.engine_ready
    _require(started and kind == node.role and not node.leaving, node, f"{kind} engine ready")
    if kind != "train":
        return _put(pool, node, state=NodeState(kind), engine_ready=True)
    pool = _put(pool, node, engine_ready=True)
    return _propose(pool) if all(n.engine_ready for n in _unit(pool, node)) else pool


def _member(pool: Pool, node: Node, generation: int) -> Pool:
    _require(generation <= pool.issued, node, f"member of generation {generation}, which was never proposed")
    forming = pool.forming
    if forming is None or generation != forming.generation:
        return pool
    _require(node.rank in forming.ranks, node, f"member of generation {generation}")
    pool = _put(pool, node, member_of=generation)
    if any(pool.nodes[rank].member_of != generation for rank in forming.ranks):
        return pool
    pool = msgspec.structs.replace(pool, membership=forming, forming=None)
    for leaving in [n for n in pool.nodes.values() if n.state is NodeState.TO_ROLLOUT and n.leaving and not n.shares]:
        pool = _begin(pool, leaving, has_state=False, member_of=-1)
    return _settle(pool)


def _rollout_engine_lost(pool: Pool, node: Node) -> Pool:
    _require(node.state is not NodeState.LOST, node, "rollout engine lost")
    if node.drain:
        return _drained(pool, node)
    if node.role != "rollout" or node.has_state:
        return pool  # a standby: the next move pays a cold start
    if node.shares:
        return _drain(pool, node, abort=True)
    if node.state is NodeState.ROLLOUT:
        return _begin(pool, node, state=NodeState.STARTING, engine_ready=False)
    return _begin(pool, node)


def _trainers_lost(pool: Pool, node: Node) -> Pool:
    _require(node.state is not NodeState.LOST, node, "train engine lost")
    changes = False
    for one in _unit(pool, node):
        pool = _restart_unit(pool, one)
        changes |= one.role == "train" and one.engine_ready
    return _propose(pool) if changes else pool


def _restart_unit(pool: Pool, node: Node) -> Pool:
    """The node's training processes are gone with those of its unit."""
    pool = _put(pool, node, world=node.world + (len(node.unit) > 1))
    own = pool.nodes[node.rank]
    if node.shares and node.role == "rollout" and not node.has_state:
        return _drain(pool, own, abort=True)
    if node.shares:
        pool = _put(pool, own, role="train")
        own = pool.nodes[node.rank]
    elif node.leaving:
        return _begin(pool, own, has_state=False, member_of=-1)
    if node.drain or (node.role != "train" and not node.shares):
        return pool  # a standby
    state = NodeState.STARTING if node.state in (NodeState.TRAIN, NodeState.TO_ROLLOUT) else node.state
    return _begin(pool, own, state=state, engine_ready=False, has_state=False, member_of=-1)


def _lost(pool: Pool, node: Node) -> Pool:
    if node.state is NodeState.LOST:
        return pool
    changes = node.role == "train" and node.engine_ready
    pool = _put(
        pool,
        node,
        state=NodeState.LOST,
        drain="",
        engine_ready=False,
        has_state=False,
        member_of=-1,
        life=node.life + 1,
    )
    if len(node.unit) > 1:
        # The others cannot train without it, and it returns to what they do.
        for one in _unit(pool, node):
            pool = _put(pool, one, world=one.world + 1)
            if one.rank != node.rank and one.state is not NodeState.LOST:
                pool = _roll_out_alone(pool, pool.nodes[one.rank])
                changes |= one.role == "train" and one.engine_ready
        pool = _put(pool, pool.nodes[node.rank], role="rollout")
    return _propose(pool) if changes else pool


def _roll_out_alone(pool: Pool, node: Node) -> Pool:
    """What a node does whose unit has lost another one; one that still drains returns once it has."""
    if node.drain or (node.role == "rollout" and not node.leaving):
        return pool
    return _begin(
        pool, node, state=NodeState.TO_ROLLOUT, role="rollout", engine_ready=False, has_state=False, member_of=-1
    )


def _propose(pool: Pool) -> Pool:
    """Propose the next generation, over all training engines that are ready; none while the core is incomplete."""
    nodes = pool.nodes.values()
    if not all(n.engine_ready and n.role == "train" for n in nodes if n.component == "train"):
        return msgspec.structs.replace(pool, forming=None)
    ready = {n.rank for n in nodes if n.role == "train" and n.engine_ready}
    wanted = tuple(sorted(rank for rank in ready if ready.issuperset(pool.nodes[rank].unit)))
    forming = Membership(pool.issued + 1, wanted)
    return msgspec.structs.replace(pool, forming=forming, issued=forming.generation)


def _settle(pool: Pool) -> Pool:
    """Let every member whose state has arrived count as a trainer."""
    for node in list(pool.nodes.values()):
        arrived = node.has_state and node.engine_ready and node.role == "train"
        if arrived and node.member_of == pool.membership.generation and node.state is not NodeState.TRAIN:
            pool = _put(pool, node, state=NodeState.TRAIN)
    return pool


def _begin(pool: Pool, node: Node, **changes: object) -> Pool:
    """Start or wake the node's engines."""
    return _put(pool, node, starts=node.starts + 1, **changes)


def _put(pool: Pool, node: Node, **changes: object) -> Pool:
    return msgspec.structs.replace(pool, nodes={**pool.nodes, node.rank: msgspec.structs.replace(node, **changes)})


def _require(possible: bool, node: Node, what: str) -> None:
    if not possible:
        raise IllegalTransition(f"node {node.rank} ({node.component}, {node.state}): {what}")
