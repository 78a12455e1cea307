"""The training half of a node agent: owns the node's ``tp * pp`` Megatron processes.

On a node of the core they are its share of the core's world; on a hybrid node they are a replica without optimizer.

- A message to the node's trainers -> every process gets it.
- Every process has answered -> the node has (`merged`).
- One process dies -> the others are ended, because they are only whole together.
- They were a whole core -> the next start restores from the newest whole snapshot or checkpoint.
- They were a part of the core -> all ranks restart: the rest of the state is elsewhere.
- They were a part of a replica -> the coordinator has its other nodes begin anew as well.
- A snapshot is due -> every process writes its part, and the node keeps them (`SnapshotKeeper`).
- A replica is to join -> its processes are told of the weights that this node has for rollout.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from libra_hpc.mesh.agent_context import AgentContext
from libra_hpc.process.budget import RestartBudget
from libra_hpc.process.child import Child
from libra_hpc.process.deadlines import stall_of
from libra_hpc.process.visible_devices import MAX_STARTS, engine_environment
from libra_hpc.protocol import mesh as wire
from libra_hpc.protocol.trainer import (
    Alive,
    Export,
    Exported,
    ExportFailed,
    FromWorker,
    Join,
    Joined,
    Saved,
    SaveFailed,
    SnapshotFailed,
    SnapshotTaken,
    Standby,
    StepDone,
    StopWorker,
    TakeSnapshot,
    ToWorker,
    WorkerError,
    WorkerReady,
    from_worker,
    to_worker,
)
from libra_hpc.state.snapshot_keeper import SnapshotKeeper
from libra_hpc.state.snapshots import holders
from libra_hpc.trainer.link import BUSY
from libra_hpc.trainer.settings import write_config
from libra_hpc.weights.flow import WeightFile
from libra_hpc.weights.relay import Publisher

from .commands import trainer_command
from .replica_watch import ReplicaWatch
from .trainer_start import worker_configs

KIND = "train"
ASKED: dict[type, type] = {SaveFailed: Saved, ExportFailed: Exported, SnapshotFailed: SnapshotTaken}
"""Answers that count as the same answer to one request."""
WATCH_S = 1.0
"""Between two checks of whether the replica makes progress."""
KILL_S = 10.0
"""After SIGKILL; a process that still lives then waits inside the kernel, for a file system or a device."""
REPEAT_S = 60.0
"""Between two events about a process that does not end."""


def merged(answers: Mapping[int, FromWorker]) -> FromWorker:
    """The answer of a node: local rank 0's, but for a checkpoint and a snapshot, of which every process has a part."""
    for answer in answers.values():
        if isinstance(answer, SaveFailed | SnapshotFailed):
            return answer
    first = answers[0]
    if isinstance(first, Saved):
        parts = [answer for answer in answers.values() if isinstance(answer, Saved)]
        files = {name: entry for part in parts for name, entry in part.files.items()}
        return Saved(first.folder, first.step, max(part.seconds for part in parts), files)
    return first


class TrainNode:
    def __init__(self, context: AgentContext, weights: Callable[[], WeightFile | None] = lambda: None) -> None:
        """``weights`` are the newest ones that this node has for rollout."""
        self._context, self._weights = context, weights
        self._elastic = context.rank not in context.layout.core
        self._children: list[Child] = []
        self._ready: dict[int, WorkerReady] = {}
        self._answers: dict[str, dict[int, FromWorker]] = {}
        self._state = "none"
        self._starts = self._failed_starts = self._world = 0
        self._spawning = asyncio.Lock()
        self._budget = RestartBudget(context.config.deadlines.restarts)
        self._watch = ReplicaWatch(context.config.deadlines)
        self._ordered_at = 0.0
        self._killed_at: float | None = None
        """When all processes of the replica were to end (monotonic seconds)."""
        self._stuck_at = float("-inf")
        """When an event last named one that does not."""
        self._stopping = False
        self._publisher = Publisher(context.send)
        layout = context.layout
        self.keeper = SnapshotKeeper(
            context.snapshots,
            context.rank,
            context.start_name,
            leader=layout.train_leader,
            successor=holders(layout.core).get(context.rank),
            send=context.send,
        )
        self.step = -1

    @property
    def states(self) -> dict[str, str]:
        return {} if self._state == "none" else {f"t{self._context.rank}": self._state}

    @property
    def pids(self) -> dict[str, int]:
        return {child.name: child.pid for child in self._children if not child.ended}

    async def start(self, world: int = 0) -> None:
        """Start the processes, or wake them; ``world`` as in `wire.StartEngine`."""
        self._world = world
        self._ordered_at = time.monotonic()
        if self._state == "standby":
            self._state = "ready"
            self._context.send(0, wire.EngineIsReady(self._context.rank, KIND, 0.0))
            return
        if self._state == "ready":
            self._context.send(0, wire.EngineIsReady(self._context.rank, KIND, 0.0))
            return
        async with self._spawning:
            while any(not child.ended for child in self._children):
                await asyncio.sleep(0.05)
            await self._spawn()

    def standby(self) -> None:
        """Leave training: the group is dropped and device memory released; the processes stay."""
        if self._state == "ready":
            self._state = "standby"
            self._watch.clear()
            for child in self._children:
                child.send(Standby())

    async def stop(self) -> None:
        self._stopping = True
        self.keeper.close()
        for child in self._children:
            child.stopping = True
            child.send(StopWorker())
        await asyncio.gather(*(child.stop() for child in self._children))

    async def reset(self) -> None:
        """End every process unreported: a lost node is readmitted."""
        async with self._spawning:
            children, self._children = self._children, []
            self._state, self._ready, self._answers, self.step = "none", {}, {}, -1
            self._killed_at = None
            self._watch.clear()
            for child in children:
                child.stopping = True
                child.kill()
            await asyncio.gather(*(child.stop() for child in children))

    def on_message(self, message: ToWorker) -> None:
        if isinstance(message, Export):
            message = Export(str(self._export_path(message.version)), message.version)
        elif isinstance(message, TakeSnapshot):
            message = self.keeper.order(message)
        elif isinstance(message, Join) and self._elastic and (file := self._weights()) is not None:
            message = msgspec.structs.replace(message, weights=str(file.path), version=file.version)
        if self._state == "ready":
            self._watch.asked(message, time.monotonic())
        for child in self._children:
            child.send(message)

    async def watch(self) -> None:
        """End a replica that makes no progress, until cancelled; it is rebuilt as after any other death."""
        checked_at = time.monotonic()
        while True:
            await asyncio.sleep(WATCH_S)
            now = time.monotonic()
            if stall := stall_of(now - checked_at, WATCH_S):
                self._watch.discount(stall)
            checked_at = now
            for reason in self._watch.late(now):
                self._log_part("slow", reason)
            if (reason := self._watch.hung(now)) and not self._stopping:
                hopeless = self._watch.give_up(now)
                self._log_part("hung", reason)
                if hopeless:
                    where = self._context.logs / f"{self._children[0].name}.log"
                    self._fail(f"training replica: {reason}; {hopeless}; see {where}")
                self._killed_at = now
                await asyncio.gather(*(child.end_hung() for child in self._children))
            self._check_ended(now)

    def _check_ended(self, now: float) -> None:
        """Count a process that SIGKILL does not end as ended; an event a minute names it."""
        if self._killed_at is None:
            return
        stuck = [child for child in self._children if child.pid and not child.ended]
        logged = self._stuck_at >= self._killed_at and now - self._stuck_at < REPEAT_S
        if not stuck:
            self._killed_at = None
        elif now - self._killed_at > KILL_S and not logged and not self._stopping:
            self._stuck_at = now
            names = ", ".join(f"{child.name} (process {child.pid})" for child in stuck)
            reason = f"{names} lives {now - self._killed_at:.0f} s after SIGKILL, so it waits inside the kernel"
            self._log_part("hung", reason)
            self._ended(stuck[0], reason)

    def _fail(self, reason: str) -> None:
        self._context.send(0, wire.Fatal(self._context.rank, reason))

    def _log_part(self, kind: str, reason: str) -> None:
        self._context.log(kind, rank=self._context.rank, part=f"t{self._context.rank}", reason=reason)

    def on_publish(self, message: wire.Publish) -> None:
        self._publisher.publish(message.version, self._export_path(message.version), message.crc32, message.ranks)

    def on_wanted(self, message: wire.WeightsWanted) -> None:
        if not self._publisher.answer(message.rank, message.have):
            self._context.send(message.rank, wire.WeightsCurrent(message.have))

    def _export_path(self, version: int) -> Path:
        return self._context.shared_memory / f"export-{version:08d}.safetensors"

    async def _spawn(self) -> None:
        context, config = self._context, self._context.config
        self._state, self._ready, self._answers, self._children = "starting", {}, {}, []
        self._killed_at = None
        start = context.start
        if not self._elastic and not self._starts:
            await asyncio.to_thread(self.keeper.begin, start.snapshot)
            if context.rank in start.restore:
                await self.keeper.fetch(start.snapshot, start.restore[context.rank])
        # May read whole states, which this loop must not wait for.
        workers = await asyncio.to_thread(worker_configs, context, self._starts, self._world)
        self._watch.started(time.monotonic())
        self._starts += 1
        self._failed_starts += 1
        for worker in workers:
            name = f"t{context.rank}.{worker.device_index}"
            path = context.private / f"{name}.json"
            write_config(worker, path)
            child = Child(
                name,
                context.private / f"{name}.sock",
                outbound=to_worker,
                inbound=from_worker,
                on_message=self._message,
                on_exit=self._exited,
            )
            self._children.append(child)
            environment = engine_environment(
                os.environ, config.slurm.device, first=0, count=len(workers), threads=config.train.threads
            )
            await child.start(
                trainer_command(config, context.component, path), environment, context.logs / f"{name}.log"
            )

    def _message(self, child: Child, message: Any) -> None:
        if child not in self._children:
            return
        local_rank = self._children.index(child)
        if isinstance(message, WorkerReady):
            self._ready[local_rank] = message
            if len(self._ready) == len(self._children):
                self._state, self.step, self._failed_starts = "ready", self._ready[0].step, 0
                self._watch.ready(time.monotonic())
                seconds = time.monotonic() - self._ordered_at
                self._context.log("replica_ready", rank=self._context.rank, step=self.step, seconds=seconds)
                self._context.send(0, wire.EngineIsReady(self._context.rank, KIND, seconds))
            return
        now = time.monotonic()
        if isinstance(message, Alive):
            self._watch.alive(local_rank, message, now)
            if message.phase in BUSY and not local_rank:
                self._context.send(self._context.layout.train_leader, wire.FromReplica(self._context.rank, message))
            return
        if isinstance(message, WorkerError):
            # One process may fail alone; its peers then never answer, so this cannot wait for them.
            self._watch.answered(message, now)
            self._context.log("worker_error", rank=self._context.rank, reason=message.what, fatal=message.fatal)
            self._context.send(self._context.layout.train_leader, wire.FromReplica(self._context.rank, message))
            return
        # One process may fail to write its files, for all.
        asked = ASKED.get(type(message), type(message)).__name__
        answers = self._answers.setdefault(asked, {})
        answers[local_rank] = message
        if len(answers) == len(self._children):
            del self._answers[asked]
            answer = merged(answers)
            self._watch.answered(answer, now)
            if isinstance(answer, SnapshotTaken | SnapshotFailed):
                self.keeper.taken(answer)
                return
            if isinstance(answer, StepDone | Joined):
                self.step = answer.step
            self._context.send(self._context.layout.train_leader, wire.FromReplica(self._context.rank, answer))

    def _exited(self, child: Child, code: int) -> None:
        name = f"worker process {child.name}"
        self._ended(child, f"{name} ended with {code}" if code >= 0 else f"{name} was killed by signal {-code}")

    def _ended(self, child: Child, reason: str) -> None:
        """The node's trainers are lost with this process; once for every start."""
        if self._stopping or child not in self._children or self._state == "lost":
            return
        was, self._state = self._state, "lost"
        self._watch.clear()
        if self._killed_at is None:
            self._killed_at = time.monotonic()
        for other in self._children:
            other.kill()
        self._context.log("engine_lost", rank=self._context.rank, engine=child.name, reason=reason, state=was)
        where = self._context.logs / f"{child.name}.log"
        if was == "starting" and (snapshot := self._context.start.snapshot) and not self._elastic:
            # It may be why they ended: the next start takes the checkpoint.
            self.keeper.discard(snapshot)
        if not self._elastic and len(self._context.layout.core) > 1:
            self._context.send(0, wire.Fatal(self._context.rank, f"{reason} (see {where})", restart=True))
            return
        if self._failed_starts >= MAX_STARTS:
            times = f"{self._failed_starts} times before it was ready"
            self._fail(f"the replica ended {times}, the last time because {reason}; see {where}")
            return
        if not self._budget.spend(time.monotonic()):
            times = f"the replica ended {self._budget.spent} times within {self._budget.window_s:.0f} s"
            self._fail(f"{reason}, and {times}; see {where}")
            return
        died = wire.EngineDied(self._context.rank, KIND, reason, self._world)
        for rank in (0, self._context.layout.train_leader):
            self._context.send(rank, died)
