"""The carrier of a node, as its agent's child: started with the agent, and again when it ends.

- It serves -> the train leader learns where, and publishes the newest version to it; an event has its transport.
- Its image has a version -> the engines of the node get it.
- It ended -> another one goes on with the image; nodes behind it go on with another node.
- A checkpoint is asked for -> it writes the policy; another carrier is asked again.
- A part of a snapshot is wanted -> it pulls it; another carrier begins again.
- It ends more often than `RestartBudget` allows -> all ranks restart.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from libra_hpc.errors import error_text
from libra_hpc.mesh.agent_context import AgentContext
from libra_hpc.process.child import Child, spawn
from libra_hpc.process.progress import ProgressWatch
from libra_hpc.protocol import agents as wire
from libra_hpc.protocol.carriers import (
    CarrierReady,
    Engines,
    ImageHere,
    NotStored,
    PartPulled,
    Peer,
    PieceRefused,
    PolicySaved,
    Publish,
    PullPart,
    SavePolicy,
    Stalled,
    VersionHere,
    from_carrier,
    to_carrier,
)
from libra_hpc.protocol.engine import VersionFiles
from libra_hpc.protocol.engine_state import WRITE
from libra_hpc.protocol.trainer import OfferFailed
from libra_hpc.simulated.state import image_shapes
from libra_hpc.weights.carrier import CarrierConfig
from libra_hpc.weights.image import IMAGE_FILE

from .supervised import NO_START_S, ChildCommand, EngineNode, Supervised

PLACE = os.environ.get("SLURM_TOPOLOGY_ADDR") or socket.gethostname()
"""See `Peer.place`; without switches in Slurm's configuration it is the host."""
CHANGES = 8
"""Versions: an engine that is further behind reads the image.  Half: a long pause ends in a read; double: nothing."""


class _Asked(NamedTuple):
    order: SavePolicy
    answer: Callable[[PolicySaved], None]


class NodeCarrier(EngineNode[Supervised]):
    engine, kind, outbound, inbound = Supervised, "carrier", to_carrier, from_carrier

    def __init__(self, context: AgentContext, changed: Callable[[], None]) -> None:
        """``changed`` is called when the image has a newer version."""
        super().__init__(context, [f"c{context.rank}"])
        self._config = CarrierConfig(
            run=context.config,
            rank=context.rank,
            folder=str(context.shared_memory),
            addresses=context.addresses,
            secret=context.secret,
            shapes=image_shapes() if context.config.run.engine == "simulated" else {},
            parts=str(context.snapshots) if context.has_parts else "",
            guest=context.component == "guest",
            pull_mb_s=context.pull_mb_s,
        )
        (self._carrier,) = self._engines.values()
        self._changed = changed
        self._policy: _Asked | None = None
        self._saves = ProgressWatch(context.config.deadlines)
        self._parts: dict[str, tuple[PullPart, asyncio.Future[str]]] = {}
        """Pulls of snapshots in progress, by the folder that they fill."""
        self.peer: Peer | None = None
        """Where this node's carrier serves; None: it does not yet."""
        self._lost = -1
        """The version of which an own offer was not whole, since the last one was published."""
        self.version = -1
        """Version of the image; -1: there is none."""
        self.changes = deque[VersionFiles](maxlen=CHANGES)
        """Newest versions whose offers came."""
        self.wire_s = self.image_s = 0.0
        """Seconds of the last version on the wire, and of the image's last change."""

    @property
    def image(self) -> Path:
        return self._context.shared_memory / IMAGE_FILE

    async def start(self, starts: int = 0, world: int = 0, wait_s: float = 0.0) -> None:
        await asyncio.sleep(wait_s)
        async with self._changing:
            if self._stopping:
                return
            context, name = self._context, self._carrier.name
            path = context.private / f"{name}.json"
            argv = [sys.executable, "-m", "libra_hpc.weights.carrier", "--config", str(path)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self._carrier.state = "starting"
            try:
                path.write_bytes(msgspec.json.encode(self._config))
                await self._carrier.start([ChildCommand(name, argv, environment)])
            except OSError as error:
                self._ended(f"carrier cannot be started: {error_text(error)}", NO_START_S)

    async def reset(self) -> None:
        """Begin with what the folder has: a lost node is readmitted, or the folder was made again."""
        async with self._changing:
            self.version = -1
            self.changes.clear()
            await self._carrier.reset()
        await self.start()

    async def folder_lost(self, reason: str) -> None:
        await self.reset()
        self._changed()

    def publish(self, message: Publish) -> None:
        self._lost = -1
        self._carrier.send(message)

    def save_policy(self, order: SavePolicy, answer: Callable[[PolicySaved], None]) -> None:
        """Have a version of the weights written; ``answer`` is called once, unless another order comes first."""
        self._policy = _Asked(order, answer)
        self._saves.begin(order.path, WRITE, time.monotonic())
        if self._carrier.state == "ready":
            self._carrier.send(order)

    def drop_policy(self) -> None:
        """It is not needed any more: what is being written ends, and what waits for its version is answered."""
        if self._policy is not None and self._carrier.state == "ready":
            self._carrier.send(SavePolicy(-1, ""))
        elif self._policy is not None:
            self._policy_saved(PolicySaved(self._policy.order.path, reason="it was not needed any more"))

    async def pull_part(self, peer: Peer, source: str, target: Path) -> str:
        """Get a part of a snapshot into a new folder; returns why it did not come, or an empty string."""
        order, came = PullPart(peer, source, str(target)), asyncio.get_running_loop().create_future()
        self._parts[order.target] = order, came
        if self._carrier.state == "ready":
            self._carrier.send(order)
        try:
            return str(await came)
        finally:
            del self._parts[order.target]

    def _policy_saved(self, message: PolicySaved) -> None:
        if self._policy is not None and message.path == self._policy.order.path:
            answer, self._policy = self._policy.answer, None
            self._saves.drop(message.path)
            answer(message)

    def engines_have(self, version: int | None) -> None:
        """Report the version that every live engine of the node has; None: there is no engine."""
        self._carrier.send(Engines(version))

    def received(self, carrier: Supervised, process: int, message: Any) -> None:
        context = self._context
        match message:
            case CarrierReady(port=port):
                self._carrier_ready(carrier, port)
            case VersionHere(version=version, bytes=size, wire_s=wire_s):
                self.wire_s = wire_s
                if message.files:
                    self.changes.append(VersionFiles(version, message.base, message.files))
                context.send(context.layout.train_leader, wire.WeightsHere(context.rank, version, size, wire_s))
            case ImageHere(version=version, seconds=seconds):
                self.version, self.image_s = version, seconds
                self._changed()
            case PolicySaved():
                self._policy_saved(message)
            case PartPulled(target=target, reason=reason) if target in self._parts:
                _, came = self._parts[target]
                if not came.done():
                    came.set_result(reason)
            case PieceRefused(version=version, writer=writer, reason=reason):
                context.log("weights_corrupt", rank=context.rank, version=version, writer=writer, reason=reason)
                if message.own and self._lost != version:
                    self._lost = version
                    failed = OfferFailed(version, reason)
                    context.send(context.layout.train_leader, wire.FromReplica(context.rank, failed))
            case Stalled(version=version, received=received, reason=reason):
                context.log("weights_stalled", rank=context.rank, version=version, received=received, reason=reason)
            case NotStored(version=version, reason=reason):
                context.log("weights_not_stored", rank=context.rank, version=version, reason=reason)

    def _carrier_ready(self, carrier: Supervised, port: int) -> None:
        context = self._context
        carrier.state, carrier.starts = "ready", 0
        peer = self.peer = Peer(context.rank, context.addresses, port, PLACE)
        for order, _ in self._parts.values():
            shutil.rmtree(order.target, ignore_errors=True)
            carrier.send(order)
        if self._policy is not None:
            # First: the train leader publishes the newest version to it.
            carrier.send(self._policy.order)
        context.send(context.layout.train_leader, wire.WeightsHere(context.rank, carrier=peer))

    def exited(self, carrier: Supervised, child: Child, reason: str) -> None:
        self._ended(reason)

    def _ended(self, reason: str, wait_s: float = 0.0) -> None:
        carrier, self.peer = self._carrier, None
        carrier.state = "lost"
        if self._stopping:
            return
        self._context.log("engine_lost", rank=self._context.rank, engine=carrier.name, reason=reason)
        if not carrier.ends_too_often(reason, time.monotonic()):
            spawn(self.start(wait_s=wait_s))

    async def check(self, now: float) -> None:
        """A file system may stop it in the middle of a policy, while it carries weights."""
        await super().check(now)
        for stall in self._saves.stalled(now):
            self._policy_saved(PolicySaved(stall.key, reason=stall.sentence))

    def discount(self, stall: float) -> None:
        super().discount(stall)
        self._saves.discount(stall)
