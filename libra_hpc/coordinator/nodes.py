"""The pool of nodes at rank 0: the state machine's pool, the last report of every node, and the orders that follow.

- An event -> `apply`: the pure state machine (`libra_hpc.policies.pool.states`) answers with effects.
- An effect -> sent to the agent or leader that it is for.
- A node is lost or comes back -> announced to everybody; whether it comes back decides `Readmission`.

The rollout leader hears of engines from their own nodes, so no effect is about turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from libra_hpc.mesh.agent_context import AgentContext
from libra_hpc.policies.pool import states
from libra_hpc.policies.pool.readmission import SILENT_S, Readmission
from libra_hpc.protocol import agents as wire
from libra_hpc.protocol.engine_state import EngineKind

from .guests import Guests
from .liveness import Gone, LostNode, NodeContact, lost_nodes


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
        now = time.time()
        self.contacts = {rank: NodeContact(now) for rank in range(len(context.layout.components))}
        self.guests = Guests(context, event)
        self.pool: states.Pool | None = None
        """None until every agent has sent `Hello`."""
        self.moves: dict[int, tuple[EngineKind, float]] = {}
        """Moves in flight: where to, and since when (epoch seconds)."""
        self.good_step = -1
        """Newest step that is known to be good, like `Roles.good_step`."""
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

    def silent_s(self, now: float) -> dict[int, float]:
        """Seconds since the last message of each node that the run has, and can do without."""
        nodes = self.pool.nodes.values() if self.pool else ()
        ranks = {node.rank for node in nodes if node.state is not states.NodeState.LOST}
        return {rank: now - self.contacts[rank].seen for rank in ranks.difference(self._context.layout.vital)}

    @property
    def starting(self) -> frozenset[int]:
        """Nodes that start, or change their role."""
        settled = (states.NodeState.TRAIN, states.NodeState.ROLLOUT, states.NodeState.LOST)
        nodes = self.pool.nodes.values() if self.pool else ()
        return frozenset(node.rank for node in nodes if node.state not in settled)

    @property
    def unsettled(self) -> str:
        """A node that neither trains nor rolls out, as a sentence; empty when there is none."""
        nodes = self.pool.nodes.values() if self.pool else ()
        settled = (states.NodeState.TRAIN, states.NodeState.ROLLOUT)
        return next((f"node {n.rank} is in state {n.state}" for n in nodes if n.state not in settled), "")

    def start(self, hybrid_role: EngineKind) -> None:
        layout = self._context.layout
        self.pool, effects = states.start(layout.pool(), hybrid_role, layout.unit, layout.core_rolls_out)
        self.announce()
        self._carry_out(effects)

    def move(self, rank: int, role: EngineKind, now: float, abort: bool = False, last: bool = False) -> None:
        """Order a node and those that move with it, unless they are on their way; the rest as in `MoveOrdered`."""
        if rank not in self.moves and self.pool and str(self.pool.nodes[rank].state) != role:
            self.moves |= dict.fromkeys(self._context.layout.unit(rank), (role, now))
            self.apply(states.MoveOrdered(rank, role, abort, last))

    @property
    def quarantined(self) -> list[str]:
        return self._readmission.sentences()

    def takes_back(self, rank: int) -> bool:
        """Whether a lost node that sends again may begin as a new one."""
        answer = self._readmission.seen(rank, time.time())
        if answer == "quarantine":
            self._event("node_quarantined", rank=rank, reason=self._readmission.out[rank])
        return answer == "take"

    def request_reset(self, rank: int) -> None:
        """Have a node that was declared lost, and sends again, begin as a new one."""
        self.contacts[rank].seen, self.contacts[rank].beat = time.time(), None
        assert self.pool is not None
        for other, node in self.pool.nodes.items():
            if other != rank:
                # It may have missed both while it was lost itself.
                lost = node.state is states.NodeState.LOST
                self._context.send(rank, wire.RankLost(other) if lost else wire.RankBack(other))
        self._context.send(rank, wire.Reset())

    def readmit(self, rank: int) -> None:
        """Return a node to the pool if it was lost; it has sent `Hello` again."""
        node = self.pool.nodes.get(rank) if self.pool is not None else None
        if node is None or node.state is not states.NodeState.LOST:
            return
        self._event("node_returned", rank=rank)
        for other in self.contacts:
            if other != rank:
                self._context.send(other, wire.RankBack(rank))
        self.apply(wire.RankBack(rank))

    def apply(self, event: states.Event) -> None:
        if self.pool is None or self.frozen:
            return
        before = self.pool.nodes
        try:
            self.pool, effects = states.advance(self.pool, event)
        except states.IllegalTransition as error:
            self._event("illegal_transition", reason=str(error))
            for rank in self._context.layout.unit(event.rank):
                self.moves.pop(rank, None)
            return
        self._carry_out(effects)
        now = time.time()
        for rank, node in self.pool.nodes.items():
            if node.state is before[rank].state:
                continue
            self.contacts[rank].since = now
            self._event("node_state", rank=rank, state=str(node.state), was=str(before[rank].state))
            if rank in self.moves and str(node.state) == self.moves[rank][0]:
                role, started = self.moves.pop(rank)
                self._moved("to_train" if role == "train" else "to_rollout", now - started, now)
                self._event("move_done", rank=rank, role=role, seconds=now - started)
            elif rank in self.moves and (node.state is states.NodeState.LOST or node.role != self.moves[rank][0]):
                del self.moves[rank]
        if self.pool.nodes != before:
            self.announce()

    def _carry_out(self, effects: tuple[states.Effect, ...]) -> None:
        context = self._context
        for effect in effects:
            match effect:
                case wire.DrainTurns():
                    context.send(context.layout.rollout_leader, effect)
                case wire.FormGeneration(generation=generation, ranks=ranks):
                    self._event("generation", generation=generation, ranks=list(ranks))
                    context.send(context.layout.train_leader, effect)
                case wire.RestCore():
                    context.send(context.layout.train_leader, effect)
                case _:
                    context.send(effect.rank, effect)

    def announce(self) -> None:
        """Send everybody the state of every node; repeated, it also shows that the coordinator lives."""
        assert self.pool is not None
        named = {rank: str(node.state) for rank, node in self.pool.nodes.items()}
        # A node on its way to rollout, or being rebuilt, asks for the weights itself; those that serve are pushed to.
        # So are those on their way to training, which join with them.
        pushed = (states.NodeState.ROLLOUT, states.NodeState.TO_TRAIN)
        receivers = tuple(rank for rank, node in self.pool.nodes.items() if node.state in pushed)
        message = wire.Roles(named, (*receivers, *self.guests.serving), self._recorded(), self.good_step)
        for rank in (*self.contacts, *self.guests.contacts):
            self._context.send(rank, message)

    def find_lost(self, gone: Mapping[int, Gone], now: float) -> list[LostNode]:
        """Find the nodes that are lost now and announce them; ``gone`` as in `lost_nodes`.

        One that fell silent before is found again while it is down: Slurm may notice minutes later, and a spare node
        can replace it only then.
        """
        assert self.pool is not None
        layout, found = self._context.layout, []
        for node in lost_nodes(self.contacts, self._context.rank, layout.vital, gone=gone, now=now):
            new = self.pool.nodes[node.rank].state is not states.NodeState.LOST
            if new:
                self.lose(node, now)
            if new or (node.down and node.rank not in layout.vital):
                found.append(node)
        heard = [now - node.seen < SILENT_S for rank, node in self.contacts.items() if rank != self._context.rank]
        # A network that is away for most nodes is no fault of each.
        for rank, silent_s in self.silent_s(now).items() if 2 * sum(heard) >= len(heard) else ():
            if why := self._readmission.silent(rank, now - silent_s, now):
                self._event("node_quarantined", rank=rank, reason=why)
                found.append(LostNode(rank, why, silent_s))
                self.lose(found[-1], now)
        return found

    def on_guest(self, rank: int, message: Any) -> None:
        if self.guests.on_message(rank, message, time.time()):
            self.announce()

    def check_guests(self, now: float) -> None:
        """Give up guests that are lost."""
        beats = [contact.beat for contact in self.contacts.values() if contact.beat is not None]
        if self.guests.check({rank for beat in beats for rank in beat.unreachable}, now):
            self.announce()

    def lose(self, node: LostNode, now: float) -> None:
        """Declare a node lost."""
        self._event("node_lost", rank=node.rank, reason=node.reason, silent_s=node.silent_s)
        self._readmission.lost(node.rank, now)
        for other in self.contacts:
            if other != node.rank:
                self._context.send(other, wire.RankLost(node.rank))
        self.apply(wire.RankLost(node.rank))
