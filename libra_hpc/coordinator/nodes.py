"""The pool of nodes at rank 0: the state machine's pool, the last report of every node, and the Layout that follows.

- An event -> `apply`: the pure state machine (`libra_hpc.policies.pool.states`) makes another pool.
- Anything of the Layout has changed -> it is published to all nodes (`Publisher`).
- A node is lost -> its row shows it; whether it comes back decides `Readmission`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from libra_hpc.mesh.agent_context import AgentContext
from libra_hpc.policies.pool import states
from libra_hpc.policies.pool.readmission import Readmission
from libra_hpc.protocol import agents as wire
from libra_hpc.protocol.engine_state import EngineKind
from libra_hpc.protocol.joining import is_guest
from libra_hpc.protocol.layout import Layout, StopTraining

from .guests import Guests
from .liveness import LostNode, NodeContact, going_on, lost_nodes

SETTLED = (states.NodeState.TRAIN, states.NodeState.ROLLOUT, states.NodeState.ENV)


class NodePool:
    """``event(kind, **fields)`` writes to the event log; ``moved(direction, seconds, now)`` hears of completed moves.

    ``recorded()`` is the highest step whose metrics line is durable.
    """

    def __init__(
        self,
        context: AgentContext,
        event: Callable[..., None],
        moved: Callable[[Literal["to_train", "to_rollout"], float, float], None],
        recorded: Callable[[], int],
    ) -> None:
        self._context, self._event, self._moved, self._recorded = context, event, moved, recorded
        now, self._lost_s = time.time(), context.config.planner.fewer_after_s
        self.contacts = {rank: NodeContact(now) for rank in range(len(context.layout.components))}
        self.guests = Guests(context, event)
        self.pool: states.Pool | None = None
        """None until every agent has sent a heartbeat."""
        self.moves: dict[int, tuple[EngineKind, float]] = {}
        """Moves in flight: where to, and since when (epoch seconds)."""
        self.good_step = -1
        """Newest step that is known to be good, like `Layout.good_step`."""
        self.layout = Layout()
        """The one that was published last, without its number."""
        self._awaited: tuple[tuple[int, ...], float] = (), 0.0
        self._stop: StopTraining | None = None
        self._returning: set[int] = set()
        """Lost nodes that may begin as new ones."""
        self._readmission = Readmission()
        self.frozen = False
        """The run is over: nothing is ordered any more."""

    @property
    def complete(self) -> bool:
        return all(node.host for node in self.contacts.values())

    @property
    def trainers(self) -> int:
        return len(self.pool.membership.ranks) if self.pool else 0

    @property
    def receivers(self) -> tuple[int, ...]:
        return states.rollout_nodes(self.pool) if self.pool else ()

    @property
    def droppable(self) -> dict[int, int]:
        """Step of the weights of each node that rolls out, and that the run can do without."""
        beats = {rank: self.contacts[rank].beat for rank in set(self.receivers).difference(self._context.layout.vital)}
        return {rank: beat.version for rank, beat in beats.items() if beat is not None}

    @property
    def replicas(self) -> frozenset[int]:
        """Nodes that train with the core, or are about to; the run can do without them."""
        nodes = self.pool.nodes.values() if self.pool else ()
        ranks = frozenset(node.rank for node in nodes if node.role == "train" and node.engine_ready)
        return ranks.difference(self._context.layout.vital)

    def silent_s(self, now: float) -> dict[int, float]:
        """Seconds since the last message of each node that the run has, and can do without."""
        nodes = self.pool.nodes.values() if self.pool else ()
        ranks = {node.rank for node in nodes if node.state is not states.NodeState.LOST}
        return {rank: now - self.contacts[rank].seen for rank in ranks.difference(self._context.layout.vital)}

    @property
    def starting(self) -> frozenset[int]:
        """Nodes that start, or change their role."""
        settled = (*SETTLED, states.NodeState.LOST)
        nodes = self.pool.nodes.values() if self.pool else ()
        return frozenset(node.rank for node in nodes if node.state not in settled)

    def start(self, hybrid_role: EngineKind) -> None:
        layout = self._context.layout
        self.pool = states.start(layout.pool(), hybrid_role, layout.unit, layout.core_rolls_out)
        self.publish()

    def move(self, rank: int, role: EngineKind, now: float, abort: bool = False) -> None:
        """Order a node and those that move with it, unless they are on their way; ``abort`` as in `MoveOrdered`."""
        if rank not in self.moves and self.pool and str(self.pool.nodes[rank].state) != role:
            self.moves |= dict.fromkeys(self._context.layout.unit(rank), (role, now))
            self.apply(states.MoveOrdered(rank, role, abort))

    @property
    def quarantined(self) -> list[str]:
        return self._readmission.sentences()

    def going_on(self, now: float) -> str:
        """Without which nodes the run goes on, as a sentence (`liveness.going_on`)."""
        return going_on(self.pool, self.contacts, self._context.ended, now - self._lost_s) if self.pool else ""

    def takes_back(self, rank: int) -> bool:
        """Whether a lost node that sends again may begin as a new one."""
        answer = self._readmission.seen(rank, time.time())
        if answer == "quarantine":
            self._event("node_quarantined", rank=rank, reason=self._readmission.out[rank])
        return answer == "take"

    def request_reset(self, rank: int) -> None:
        """Have a node that was declared lost, and sends again, begin as a new one."""
        self.contacts[rank].seen, self.contacts[rank].beat = time.time(), None
        self._returning.add(rank)
        self.publish(again=True)

    def on_beat(self, rank: int, beat: wire.Heartbeat) -> None:
        """Note a node's heartbeat; return it to the pool if it was lost, and has ended what it had."""
        contact, context = self.contacts[rank], self._context
        before = contact.take(beat)
        if context.publisher is not None:
            context.publisher.on_beat(rank, beat)
        node = self.pool.nodes.get(rank) if self.pool is not None else None
        returned = node is not None and node.state is states.NodeState.LOST and beat.life == node.life
        if returned or not contact.host:
            contact.host, contact.pid = beat.host, beat.pid
            self._event("agent_joined", rank=rank, host=beat.host, pid=beat.pid, component=beat.role)
        if returned:
            self._returning.discard(rank)
            self._event("node_returned", rank=rank)
            self.apply(states.RankBack(rank))
        elif node is not None:
            self.apply(*states.observed(node, before, contact.engines))
            self._find_closed(rank, contact)
        for other, starts in beat.drained.items():
            if is_guest(other):
                self.guests.on_drained(other, starts)
                self.publish()
            elif self.pool is not None and self.pool.nodes[other].drain and self.pool.nodes[other].starts == starts:
                self.apply(states.TurnsDrained(other))

    def _find_closed(self, rank: int, contact: NodeContact) -> None:
        """Give up a node that cannot go on: an environment node, or one whose engines all compute wrongly."""
        assert self.pool is not None
        engines = contact.engines.values()
        closed = [one for one in engines if one.state == "closed"]
        if not closed or self.pool.nodes[rank].state is states.NodeState.LOST:
            return
        node, kind = LostNode(rank, closed[0].reason, 0.0), closed[0].kind
        if kind == "env":
            self.lose([node], contact.seen)
        elif len(closed) == sum(one.kind == kind for one in engines) and rank not in self._context.layout.vital:
            self.quarantine(node, contact.seen)

    def await_members(self, ranks: tuple[int, ...], limit_s: float) -> None:
        """Have the train leader begin no step without these nodes, within the limit."""
        self._awaited = ranks, limit_s if ranks else 0.0
        self.publish()

    def stop_training(self, reason: str, after: int = 0) -> None:
        """Have the train leader save and finish, as `StopTraining`."""
        self._stop = StopTraining(reason, after)
        self.publish()

    def apply(self, *events: states.Event) -> None:
        """Take what happened, and publish the Layout that follows."""
        if self.pool is None or self.frozen:
            return
        forming = self.pool.forming
        for event in events:
            self._advance(self.pool, event)
        if (formed := self.pool.forming) not in (None, forming):
            self._event("generation", generation=formed.generation, ranks=list(formed.ranks))
        self.publish()

    def _advance(self, pool: states.Pool, event: states.Event) -> None:
        try:
            self.pool = after = states.advance(pool, event)
        except states.IllegalTransition as error:
            self._event("illegal_transition", reason=str(error))
            for rank in self._context.layout.unit(event.rank):
                self.moves.pop(rank, None)
            return
        now = time.time()
        for rank, node in after.nodes.items():
            if node.state is pool.nodes[rank].state:
                continue
            self.contacts[rank].since = now
            if rank in self.moves and str(node.state) == self.moves[rank][0]:
                role, started = self.moves.pop(rank)
                self._moved("to_train" if role == "train" else "to_rollout", now - started, now)
                self._event("move_done", rank=rank, role=role, seconds=now - started)
            elif rank in self.moves and (node.state is states.NodeState.LOST or node.role != self.moves[rank][0]):
                del self.moves[rank]

    def publish(self, again: bool = False) -> None:
        """Publish the Layout if it has changed; ``again``: also if it has not.

        Repeated, it reaches nodes that missed it, and shows that the coordinator lives.
        """
        pool, (awaited, await_s) = self.pool or states.Pool({}, states.Membership(0, ()), 0), self._awaited
        layout = Layout(
            start=self._context.resume_point,
            rows=pool.rows | self.guests.rows,
            generation=pool.newest.generation,
            rest=pool.rests,
            awaited=awaited,
            await_s=await_s,
            stop=self._stop,
            recorded=self._recorded(),
            good_step=self.good_step,
        )
        if layout == self.layout and not again:
            return
        self.layout = layout
        lost = {rank for rank, node in pool.nodes.items() if node.state is states.NodeState.LOST}
        ranks = {*self.contacts, *self.guests.contacts}
        if self._context.publisher is not None:
            self._context.publisher.publish(layout, ranks - (lost - self._returning))

    def find_lost(self, gone: Mapping[int, str], now: float) -> list[LostNode]:
        """Find the nodes that are lost now and announce them; ``gone`` as in `lost_nodes`.

        One that fell silent before is found again while it is down: Slurm may notice minutes later, and a spare node
        can replace it only then.
        """
        assert self.pool is not None
        vital, nodes = self._context.layout.vital, self.pool.nodes
        found = lost_nodes(self.contacts, self._context.rank, vital, gone=gone, now=now)
        new = [node for node in found if nodes[node.rank].state is not states.NodeState.LOST]
        self.lose(new, now)
        return [node for node in found if node in new or (node.down and node.rank not in vital)]

    def on_guest(self, rank: int, message: Any) -> None:
        if isinstance(message, wire.Heartbeat) and self._context.publisher is not None:
            self._context.publisher.on_beat(rank, message)
        self.guests.on_message(rank, message, time.time())
        self.publish()

    def check_guests(self, now: float) -> None:
        """Give up guests that are lost."""
        beats = [contact.beat for contact in self.contacts.values() if contact.beat is not None]
        self.guests.check({rank for beat in beats for rank in beat.unreachable}, now)
        self.publish()

    def quarantine(self, node: LostNode, now: float) -> None:
        """Declare a node lost for good, until all ranks start again."""
        self._event("node_quarantined", rank=node.rank, reason=self._readmission.quarantine(node.rank, node.reason))
        self.lose([node], now)

    def lose(self, nodes: Sequence[LostNode], now: float) -> None:
        """Declare nodes lost."""
        for node in nodes:
            self._event("node_lost", rank=node.rank, reason=node.reason, silent_s=node.silent_s)
            self._readmission.lost(node.rank, now)
            self._returning.discard(node.rank)
        self.apply(*(states.RankLost(node.rank) for node in nodes))
