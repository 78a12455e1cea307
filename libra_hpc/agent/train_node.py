"""The training half of a node agent: owns the node's ``tp * pp`` Megatron processes.

On a node of the core they are its share of the core's world; on a hybrid node they are a replica without optimizer.

- A message to the node's trainers -> every process gets it.
- Every process has answered -> the node has (`merged`).
- One process dies -> the others are ended, because they are only whole together.
- They were a whole core -> the next start restores from the newest whole snapshot or checkpoint.
- They were a part of the core -> all ranks restart: the rest of the state is elsewhere.
- They were a part of a replica -> the coordinator has its other nodes begin again as well.
- A checkpoint is due -> every process writes its part, and on the train leader's node the carrier the policy.
- A snapshot is due -> every process writes its part, and the node keeps them (`SnapshotKeeper`).
- The node's engines still free their memory -> no process starts or wakes until they have.
- The core is to rest -> its processes leave the group and keep their state; the coordinator hears of it.
- A replica is to join -> it waits a while for its image to have the core's step; else weights come from the core.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from libra_hpc.mesh.agent_context import AgentContext
from libra_hpc.process.child import Child
from libra_hpc.process.child_environment import engine_environment
from libra_hpc.process.progress import Stall
from libra_hpc.protocol import agents as wire
from libra_hpc.protocol.carriers import PolicySaved, SavePolicy
from libra_hpc.protocol.engine_state import STORAGE, WRITE, Doing, EngineReady
from libra_hpc.protocol.trainer import (
    Freed,
    FromWorker,
    Join,
    Joined,
    KeepState,
    Offered,
    OfferFailed,
    OfferWeights,
    PortionDone,
    Saved,
    SaveFailed,
    SaveState,
    Standby,
    StepDone,
    ToWorker,
    TrainPortion,
    TrainStep,
    WorkerFailed,
    from_worker,
    to_worker,
)
from libra_hpc.state import state_folders as folders
from libra_hpc.state.snapshot_keeper import SnapshotKeeper, successors
from libra_hpc.trainer.settings import write_config

from .child_start import child_command, worker_configs
from .expert_pull import ExpertPull
from .node_carrier import NodeCarrier
from .supervised import ChildCommand, EngineNode, Supervised

IMAGE_SHARE = 1 / 6
"""Share of the shortest deadline for which a join waits for the image: 10 s by default, in which 100 Gb/s bring 32B.
The core waits with it; half: large models come from the core more often."""
GIVE_UP = 4
"""Storage phases in a row that were stalled.  Half: two stalls of a file system restart all; double: two hours without
a saved state."""
ASKED: dict[type, type] = {SaveFailed: Saved, OfferFailed: Offered}
"""Answers that count as the same answer to one request."""


def merged(answers: Mapping[int, FromWorker]) -> FromWorker:
    """The answer of a node: local rank 0's, but for what every process has a part of."""
    for answer in answers.values():
        refused = isinstance(answer, PortionDone) and bool(answer.error)
        if refused or isinstance(answer, SaveFailed | OfferFailed):
            return answer
    first = answers[0]
    if isinstance(first, Saved):
        parts = [answer for answer in answers.values() if isinstance(answer, Saved)]
        files = {name: entry for part in parts for name, entry in part.files.items()}
        return msgspec.structs.replace(first, seconds=max(part.seconds for part in parts), files=files)
    if isinstance(first, Joined):
        received = sum(answer.received_bytes for answer in answers.values() if isinstance(answer, Joined))
        return msgspec.structs.replace(first, received_bytes=received)
    return first


class TrainNode(EngineNode[Supervised]):
    engine, kind, outbound, inbound = Supervised, "train", to_worker, from_worker

    def __init__(self, context: AgentContext, carrier: NodeCarrier) -> None:
        on_cpus = context.config.slurm.device == "cpu"
        less = "a smaller train.micro_tokens" if on_cpus else "train.snapshot_every = 0"
        super().__init__(context, [f"t{context.rank}"], less=less)
        self._carrier = carrier
        self._elastic = context.rank not in context.layout.core
        self._leads = context.rank == context.layout.train_leader
        (self._trainer,) = self._engines.values()
        self.experts = ExpertPull(context, self._trainer.send)
        self._ready: dict[int, EngineReady] = {}
        self._answers: dict[tuple[str, int, int, str], dict[int, FromWorker]] = {}
        """By kind, generation, attempt and folder: answers to an order that was replaced complete no other."""
        self._written: list[Saved | SaveFailed] = []
        """Parts of the checkpoint that was asked for last."""
        self._begun = 0
        """Starts of the processes so far."""
        self._storage_stalls = 0
        """Reads and writes of saved states in a row that were stalled."""
        layout = context.layout
        self.keeper = SnapshotKeeper(
            context.snapshots,
            context.rank,
            leader=layout.train_leader,
            successor=successors(layout.core).get(context.rank),
            send=context.send,
            carrier=carrier,
        )
        self.step = self._offered = -1
        self._postponed: Join | None = None
        """Waits for the image."""

    async def start(self, starts: int = 0, world: int = 0) -> None:
        self._trainer.world = world
        self._ordered_at = ordered_at = time.monotonic()
        await self.room()
        if self._ordered_at != ordered_at:
            return
        if self._trainer.state in ("standby", "ready"):
            self._trainer.state = "ready"
            self.acted(starts)
            return
        async with self._changing:
            while self._trainer.alive:
                await asyncio.sleep(0.05)
            self.acted(starts)
            await self._spawn()

    @property
    def alive(self) -> bool:
        return self._trainer.state != "lost" or self._changing.locked()

    def standby(self) -> None:
        """Leave training: the group is dropped and device memory released; the processes stay.

        Those of the core keep their state.
        """
        self._ordered_at = time.monotonic()
        if self._trainer.state == "ready":
            self._trainer.state, self._postponed, self._answers = "standby", None, {}
            self.experts.drop()
            self._frees.add(self._trainer.name)
            self._trainer.send(Standby())
            if self._elastic:
                self.trained, self.step = self.step, -1

    @property
    def weights(self) -> int:
        return self.step

    async def stop(self) -> None:
        self.keeper.close()
        await super().stop()

    async def reset(self) -> None:
        self._ordered_at = time.monotonic()
        async with self._changing:
            self._ready, self._answers, self.step, self._postponed = {}, {}, -1, None
            self._carrier.drop_policy()
            self.has_freed(self._trainer.name)
            await self._trainer.reset()

    def on_message(self, message: ToWorker) -> None:
        if isinstance(message, OfferWeights):
            message = msgspec.structs.replace(message, folder=str(self._context.shared_memory))
        elif isinstance(message, SaveState) and message.tier == "snapshot":
            message = self.keeper.order(message)
        elif isinstance(message, KeepState):
            self.keeper.keep(message)
            return
        elif isinstance(message, Standby):
            self.standby()
            return
        elif isinstance(message, Join) and self._elastic:
            self._hold(message)
            return
        elif isinstance(message, Join) and self._trainer.state == "standby":
            # The coordinator is lost, and the train leader saves.
            self._trainer.state = "ready"
        self._forward(message)

    def on_image(self) -> None:
        if self._postponed is not None and self._carrier.version >= self._postponed.step:
            self._join(self._postponed)

    def _hold(self, message: Join) -> None:
        self._postponed, context = message, self._context
        if max(self.step, self._carrier.version) >= message.step:
            self._join(message)
            return
        context.send(context.layout.train_leader, wire.WeightsWanted(context.rank, self._carrier.version))
        wait_s = IMAGE_SHARE * context.config.deadlines.floor_s
        asyncio.get_running_loop().call_later(wait_s, self._join, message)

    def _join(self, message: Join) -> None:
        if message is not self._postponed:
            return
        self._postponed, carrier = None, self._carrier
        if carrier.version >= 0:
            message = msgspec.structs.replace(message, weights=str(carrier.image), version=carrier.version)
        self._forward(message)

    def _forward(self, message: ToWorker) -> None:
        if isinstance(message, TrainStep | TrainPortion):
            self.experts.hold(message)
            return
        if isinstance(message, Join):
            self.experts.drop()
        if self._trainer.state == "ready" and isinstance(message, SaveState) and message.tier == "checkpoint":
            self._save(message)
        self._trainer.send(message)

    def _save(self, message: SaveState) -> None:
        self._written = []
        if self._leads:
            path = Path(message.folder) / folders.POLICY_DIR / folders.WEIGHTS_FILE
            # Before any trainer goes on, so that the carrier has no newer version yet.
            self._carrier.save_policy(SavePolicy(message.step, str(path)), partial(self._policy_saved, message))

    def _policy_saved(self, order: SaveState, answer: PolicySaved) -> None:
        if answer.reason:
            self._wrote(SaveFailed(order.folder, order.step, answer.reason))
        else:
            name = f"{folders.POLICY_DIR}/{folders.WEIGHTS_FILE}"
            self._wrote(Saved(order.folder, order.step, 0.0, {name: (answer.size, answer.crc32)}))

    def _wrote(self, part: Saved | SaveFailed) -> None:
        """The processes or the carrier have written; the node has, once both have."""
        self._written.append(part)
        if len(self._written) == 1 + self._leads:
            self._to_leader(merged(dict(enumerate(self._written))))
        elif isinstance(part, SaveFailed):
            self._carrier.drop_policy()

    def _to_leader(self, message: FromWorker | wire.WeightsOffered) -> None:
        self._context.send(self._context.layout.train_leader, wire.FromReplica(self._context.rank, message))

    async def stalled(self, engine: Supervised, stall: Stall) -> None:
        """End a replica that makes no progress; it is rebuilt as after any other death."""
        self._storage_stalls += stall.phase in (*STORAGE, WRITE)
        if stall.phase in (*STORAGE, WRITE) and self._storage_stalls >= GIVE_UP:
            often = f"{self._storage_stalls} times in a row; raise deadlines.storage_s if the file system needs longer"
            engine.restart_all(f"{stall.sentence}, {often}")
        await engine.end_hung(stall.sentence)

    def stuck(self, engine: Supervised, reason: str) -> None:
        """A process that SIGKILL does not end counts as ended."""
        if reason:
            self._ended(reason)

    async def folder_lost(self, reason: str) -> None:
        """The carrier of a node of the core lost the offers: the train leader has whole tensors offered again."""
        if not self._elastic and self._offered >= 0:
            self._to_leader(OfferFailed(self._offered, reason))

    async def _spawn(self) -> None:
        context, config = self._context, self._context.config
        self._trainer.state, self._ready, self._answers = "starting", {}, {}
        point = context.resume_point
        if not self._elastic and not self._begun:
            await asyncio.to_thread(self.keeper.begin, point.snapshot)
            if point.snapshot and (why := await self.keeper.restore(point.snapshot, point.restore.get(context.rank))):
                context.log("snapshot_failed", step=point.step, reason=f"the part of node {context.rank}: {why}")
        # May read whole states, which this loop must not wait for.
        workers = await asyncio.to_thread(worker_configs, context, self._begun, self._trainer.world)
        self.experts.of(workers)
        self._begun += 1
        environment = engine_environment(
            os.environ, config.slurm.device, first=0, count=len(workers), threads=config.train.threads
        )
        commands = []
        for worker in workers:
            name = f"{self._trainer.name}.{worker.device_index}"
            path = context.private / f"{name}.json"
            write_config(worker, path)
            commands.append(ChildCommand(name, child_command(config, "trainer", path), environment))
        await self._trainer.start(commands)

    def received(self, trainer: Supervised, local_rank: int, message: Any) -> None:
        if isinstance(message, EngineReady):
            self._ready[local_rank] = message
            if len(self._ready) == len(trainer.children):
                trainer.state, self.step, trainer.starts = "ready", self._ready[0].version, 0
                seconds = time.monotonic() - self._ordered_at
                known = {"rank": self._context.rank, "engine": trainer.name, "version": self.step}
                self._context.log("engine_ready", **known, seconds=seconds)
            return
        if isinstance(message, Doing):
            if not local_rank and any(phase in STORAGE for phase in message.now):
                self._to_leader(message)
            return
        if isinstance(message, WorkerFailed):
            # One process may fail alone; its peers then never answer, so this cannot wait for them.
            self._context.log("worker_error", rank=self._context.rank, reason=message.what, fatal=message.fatal)
            self._to_leader(message)
            return
        # One process may fail to write its files, for all.
        kind = ASKED.get(type(message), type(message)).__name__
        asked = kind, getattr(message, "generation", 0), getattr(message, "attempt", 0), getattr(message, "folder", "")
        answers = self._answers.setdefault(asked, {})
        answers[local_rank] = message
        if len(answers) == len(trainer.children):
            del self._answers[asked]
            self._answered(answers)

    def _answered(self, answers: Mapping[int, FromWorker]) -> None:
        """Act on the answers of all processes of the node."""
        answer = merged(answers)
        if isinstance(answer, Freed):
            self.has_freed(self._trainer.name)
        elif isinstance(answer, Saved | SaveFailed) and answer.tier == "snapshot":
            self.keeper.written(answer)
        elif isinstance(answer, Saved | SaveFailed):
            if isinstance(answer, Saved):
                self._storage_stalls = 0
            self._wrote(answer)
        elif isinstance(answer, Offered):
            self._offered = answer.version
            offers = tuple(offer for offer in answers.values() if isinstance(offer, Offered))
            self._to_leader(wire.WeightsOffered(offers))
        else:
            if isinstance(answer, Joined):
                source = "core" if answer.received_bytes else "image" if answer.step != self.step else "own"
                answer = msgspec.structs.replace(answer, source=source)
            if isinstance(answer, StepDone | Joined):
                self.step = answer.step
            self._to_leader(answer)

    def exited(self, trainer: Supervised, child: Child, reason: str) -> None:
        self._ended(reason)

    def _ended(self, reason: str) -> None:
        """The node's trainers are lost with one process; once for every start."""
        trainer, context = self._trainer, self._context
        self.has_freed(trainer.name)
        if self._stopping or trainer.state == "lost":
            return
        was, self._postponed = trainer.state, None
        trainer.state, trainer.reason, trainer.ends = "lost", reason, trainer.ends + 1
        self._carrier.drop_policy()
        trainer.kill()
        context.log("engine_lost", rank=context.rank, engine=trainer.name, reason=reason, was=was)
        if was == "starting" and context.resume_point.snapshot and not self._elastic:
            # It may be why they ended: the next start takes the checkpoint.
            self.keeper.discard(context.resume_point.snapshot)
        if not self._elastic and len(context.layout.core) > 1:
            trainer.restart_all(reason, defect=trainer.out_of_memory)
        else:
            trainer.ends_too_often(reason, time.monotonic())
