"""The agent of a node, whatever runs there: parts in one event loop, with one life.

- A part is a kind of children (`EngineNode`) or a leader; its messages are rows of `Routes`, added when it is built.
- A message without a row is for the coordinator; where there is none it is dropped: it is for a part that this node
  does not have, or not yet.
- Once a second -> a heartbeat to rank 0, and the end of what outlived a child.
- An engine has changed -> a heartbeat at once to rank 0 and both leaders, but not within `LEAST_S` of the last one.
- A task, the handler of a message or a callback fails -> its traceback is in the log, and `NodeAgent.defect` acts.
- The node ends -> its parts end, the last messages reach the kernel, its tasks and folders go.

An agent of the run, a guest and a node of an evaluation differ in their parts.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any, Protocol, TypeVar

import msgspec

from libra_hpc.agent.hosting.rollout_service import RolloutService
from libra_hpc.mesh.mesh import Mesh
from libra_hpc.policies.pool.reconcile import Reset, StandbyEngines, StartEngines, StopTrainers, reconcile
from libra_hpc.process.agent_folders import make_folders, remove
from libra_hpc.process.child import Child
from libra_hpc.process.child_environment import clean_own
from libra_hpc.process.reaper import become_subreaper, end_strangers
from libra_hpc.protocol import agents as wire
from libra_hpc.protocol.carriers import Publish
from libra_hpc.protocol.engine_state import ObservedEngine
from libra_hpc.protocol.layout import Row
from libra_hpc.train_leader.train_leader import TrainLeader

from .node_carrier import NodeCarrier
from .rollout_node import RolloutNode
from .supervised import EngineNode
from .train_node import TrainNode

M = TypeVar("M")

FOR_ROLLOUT_SERVICE = (
    wire.TurnsDone,
    wire.Heartbeat,
    wire.EngineLoads,
    wire.Committed,
    wire.ExpertsWanted,
    wire.FromEnvHost,
)


class Routes:
    def __init__(self) -> None:
        self._rows: dict[type, list[Callable[[Any], object]]] = {}

    def add(self, kind: type[M], handler: Callable[[M], object]) -> None:
        """Add a part that takes messages of this type: both leaders take those about engines."""
        self._rows.setdefault(kind, []).append(handler)

    def deliver(self, message: object) -> bool:
        """Hand a message to its handlers; False when there is none."""
        handlers = self._rows.get(type(message), [])
        for handler in handlers:
            handler(message)
        return bool(handlers)


def add_rollout(routes: Routes, rollout: RolloutNode, carrier: NodeCarrier) -> None:
    """Rows of a node with rollout engines."""
    routes.add(wire.Turns, rollout.on_turns)
    routes.add(wire.WeightsCurrent, rollout.on_current)
    routes.add(Publish, carrier.publish)


def add_engines(routes: Routes, rollout: RolloutNode, train: TrainNode, carrier: NodeCarrier) -> None:
    """Rows of a node with engines of both kinds."""
    rollout.beside, train.beside = train, rollout
    add_rollout(routes, rollout, carrier)
    routes.add(wire.SnapshotPart, lambda part: train.keeper.on_part(part))
    routes.add(wire.ToReplica, lambda order: train.on_message(order.message))
    routes.add(wire.SampleExperts, train.experts.on_experts)


def add_train_leader(routes: Routes, leader: TrainLeader) -> None:
    """Rows of the train leader."""
    routes.add(wire.FromReplica, lambda answer: leader.on_reply(answer.rank, answer.message))
    routes.add(wire.GroupDone, leader.on_group)
    routes.add(wire.Batch, leader.on_batch)
    routes.add(wire.WeightsWanted, leader.weights.on_wanted)
    routes.add(wire.WeightsHere, leader.weights.on_here)
    routes.add(wire.Heartbeat, lambda beat: leader.on_engines(beat.rank, beat.engines))


def add_rollout_service(routes: Routes, service: RolloutService) -> None:
    for kind in FOR_ROLLOUT_SERVICE:
        routes.add(kind, service.on_message)


def _news(before: ObservedEngine | None, now: ObservedEngine) -> ObservedEngine:
    same = before is not None and before.capacity == now.capacity
    return msgspec.structs.replace(now, capacity=None) if same else now


LIVE_S = 1.0
"""Between two heartbeats, and two searches for processes that were left behind."""
LEAST_S = 0.05
"""Between two heartbeats for what has changed.  Half: twice the messages of a version; double: moves wait."""
WHOLE = 5
"""Heartbeats of which one has all engines, for who took this node for lost and was wrong."""
GOODBYE_S = 5.0
"""For the last messages of a leaving agent to reach the kernel."""

log = logging.getLogger("libra_hpc.agent")


class Stops(Protocol):
    """A part or a leader of the node's agent, as far as it ends."""

    async def stop(self) -> None: ...


class NodeAgent(ABC):
    def __init__(self, mesh: Mesh, component: str, routes: Routes, listeners: Collection[int]) -> None:
        """``listeners``: rank 0 and the leaders."""
        self.mesh, self.rank, self.component, self._routes = mesh, mesh.rank, component, routes
        self._listeners = listeners
        self._told: dict[str, ObservedEngine] = {}
        self._noted: dict[str, Any] = {}
        """Engines, and what leaders know, as they were in the last heartbeat."""
        self._beat_at, self._due = 0.0, False
        """When that was, in monotonic seconds, and whether the next one comes for what has changed."""
        self.private, self.shared_memory = make_folders()
        clean_own(mesh.hosts)
        self.ended: Mapping[int, str] = {}
        """See `OwnerLink.lost`; an agent without an owner knows of none."""
        self.engines: list[EngineNode[Any]] = []
        """Parts with children."""
        self.leaders: list[Stops] = []
        self._observed = Row()
        """What this node did to make its row true."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stop = asyncio.Event()

    @abstractmethod
    def defect(self, reason: str, error: BaseException) -> None:
        """Something of this node failed that nobody waits for."""

    async def live(self) -> None:
        """Serve until it is to stop, then end everything of this node."""
        asyncio.get_running_loop().set_exception_handler(self._on_defect)
        become_subreaper()
        self._spawn(self._beats())
        await self._stop.wait()
        await self.leave()
        parts: list[Stops] = [*self.leaders, *self.engines]
        await asyncio.gather(*(part.stop() for part in parts))
        await self.mesh.drain(GOODBYE_S, self.ended)
        for task in self._tasks:
            task.cancel()
        for folder in (self.private, self.shared_memory):
            remove(folder)
        await self.over()

    def reconcile(self, row: Row) -> None:
        """Make this node's row true."""
        parts = {part.kind: part for part in self.engines}
        self._observed, actions = reconcile(row, self._observed, "train" in parts and parts["train"].alive)
        for action in actions:
            match action:
                case Reset():
                    self._spawn(self.reset(row.life))
                case StartEngines(kind=kind, world=world) if kind in parts:
                    self._spawn(parts[kind].start(row.starts, world))
                case StandbyEngines(kind=kind) if kind in parts:
                    parts[kind].standby()
                case StopTrainers():
                    self._spawn(parts["train"].reset())

    async def reset(self, life: int) -> None:
        """End all and begin as a new node: this one was declared lost and is readmitted."""
        await asyncio.gather(*(part.reset() for part in self.engines))

    def on_image(self) -> None:
        for part in self.engines:
            part.on_image()

    async def leave(self) -> None:
        """Called before the node's parts end."""
        return

    async def over(self) -> None:
        """Called once all parts of the node have ended."""
        return

    async def _beats(self) -> None:
        for count in itertools.count():
            if count % WHOLE == 0:
                self._told = {}
            self._beat()
            await asyncio.sleep(LIVE_S)
            if not Child.starting:
                end_strangers(Child.live)

    def changed(self) -> None:
        """An engine may have changed, or what a leader knows."""
        if not self._due:
            self._due = True
            wait_s = max(0.0, self._beat_at + LEAST_S - time.monotonic())
            asyncio.get_running_loop().call_later(wait_s, self._beat_if_changed)

    def _beat_if_changed(self) -> None:
        self._due = False
        if (self._observed_engines(), self.noted()) != (self._told, self._noted):
            self._beat()

    def _observed_engines(self) -> dict[str, ObservedEngine]:
        return {name: engine for part in self.engines for name, engine in part.observed.items()}

    def noted(self) -> dict[str, Any]:
        """What a leader here knows, as fields of the heartbeat."""
        return {}

    def _beat(self, **fields: Any) -> None:
        told, self._told, self._beat_at = self._told, self._observed_engines(), time.monotonic()
        self._noted = self.noted()
        beat = wire.Heartbeat(
            self.rank,
            self.component,
            engines={name: _news(told.get(name), now) for name, now in self._told.items() if told.get(name) != now},
            version=next((part.weights for part in self.engines if part.weights >= 0), -1),
            host=os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
            pid=os.getpid(),
            **fields,
            **self._noted,
        )
        for rank in self._listeners if beat.engines else (0,):
            self.mesh.send(rank, beat)

    def _spawn(self, work: Coroutine[Any, Any, Any], then: Callable[[], object] | None = None) -> asyncio.Task[Any]:
        """Run a task of this node; ``then`` is called once it has ended, unless it was cancelled."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(lambda ended: self.on_ended(ended, then))
        return task

    def on_ended(self, task: asyncio.Task[Any], then: Callable[[], object] | None = None) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            self._fail("a task of this agent failed", error)
        if then is not None:
            then()

    def _on_defect(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, Exception):
            self._fail(context["message"], error)
        else:
            log.error("%s", context["message"], exc_info=error)

    def _fail(self, what: str, error: BaseException) -> None:
        log.error("%s", what, exc_info=error)
        self.defect(f"{type(error).__name__}: {error}", error)
