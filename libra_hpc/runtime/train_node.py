"""The training half of a node agent: owns the processes of the node's Megatron replica (``tp * pp`` of them).

- A message to the replica -> every process gets it.
- Every process has answered -> the replica has, with local rank 0's answer.
- One process dies -> the others are ended, because a replica is only whole.
- The next start -> restores from the newest whole snapshot or checkpoint, whichever has the higher step.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

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
    Joined,
    Saved,
    SaveFailed,
    Standby,
    StepDone,
    StopWorker,
    ToWorker,
    Warned,
    WorkerError,
    WorkerReady,
    from_worker,
    to_worker,
)
from libra_hpc.train import state_folders as folders
from libra_hpc.train.link import BUSY
from libra_hpc.train.settings import WorkerConfig, algorithm_settings, optimizer_settings, write_config
from libra_hpc.weights.relay import Publisher

from .agent_context import AgentContext
from .commands import trainer_command
from .replica_watch import ReplicaWatch

KIND = "train"
ASKED: dict[type, type] = {SaveFailed: Saved, ExportFailed: Exported}
"""Answers that count as the same answer to one request."""
WATCH_S = 1.0
"""Between two checks of whether the replica makes progress."""
KILL_S = 10.0
"""After SIGKILL; a process that still lives then waits inside the kernel, for a file system or a device."""
REPEAT_S = 60.0
"""Between two events about a process that does not end."""
WARNING_S = 60.0
"""A full file system fails every snapshot: one event a minute is enough."""


class TrainNode:
    def __init__(self, context: AgentContext) -> None:
        self._context = context
        self._children: list[Child] = []
        self._ready: dict[int, WorkerReady] = {}
        self._answers: dict[str, dict[int, FromWorker]] = {}
        self._state = "none"
        self._starts = self._failed_starts = 0
        self._spawning = asyncio.Lock()
        self._budget = RestartBudget(context.config.deadlines.restarts)
        self._watch = ReplicaWatch(context.config.deadlines)
        self._ordered_at = 0.0
        self._warned_at = float("-inf")
        self._killed_at: float | None = None
        """When all processes of the replica were to end (monotonic seconds)."""
        self._stuck_at = float("-inf")
        """When an event last named one that does not."""
        self._stopping = False
        self._publisher = Publisher(context.send)
        self.step = -1

    @property
    def states(self) -> dict[str, str]:
        return {} if self._state == "none" else {f"t{self._context.rank}": self._state}

    @property
    def pids(self) -> dict[str, int]:
        return {child.name: child.pid for child in self._children if not child.ended}

    async def start(self) -> None:
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
        train = config.train
        snapshots = context.shared_memory / "snapshots"
        snapshots.mkdir(exist_ok=True)
        self._state, self._ready, self._answers, self._children = "starting", {}, {}, []
        self._killed_at = None
        # Reads whole states, which this loop must not wait for.
        checkpoints = await self._checkpoints() if self._starts else []
        start_dir = await asyncio.to_thread(self._start_dir, snapshots, checkpoints)
        self._watch.started(time.monotonic())
        self._starts += 1
        self._failed_starts += 1
        for local_rank in range(train.tp * train.pp):
            worker = WorkerConfig(
                model_dir=config.model.path,
                world_rendezvous=str(context.private / f"world-{self._starts}"),
                start_dir=start_dir,
                device=config.slurm.device,
                device_index=local_rank,
                dtype=config.model.dtype,
                tp=train.tp,
                pp=train.pp,
                rank=local_rank,
                optimizer=optimizer_settings(config),
                algorithm=algorithm_settings(config),
                micro_tokens=train.micro_tokens,
                recompute=train.recompute,
                snapshot_dir=str(snapshots) if train.snapshot_every else "",
                snapshot_every=train.snapshot_every,
                threads=train.threads,
                seed=config.run.seed,
            )
            name = f"t{context.rank}.{local_rank}"
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
                os.environ, config.slurm.device, first=0, count=train.tp * train.pp, threads=train.threads
            )
            await child.start(
                trainer_command(config, context.component, path), environment, context.logs / f"{name}.log"
            )

    def _start_dir(self, snapshots: Path, checkpoints: list[tuple[int, Path]]) -> str:
        """The newest of what the attempt started from, whole snapshots, and whole checkpoints."""
        step, found = self._context.start.step, self._context.start.checkpoint
        newest = folders.latest_whole(snapshots)
        if newest is not None and (saved := folders.read_state(newest).step) >= step:
            step, found = saved, str(newest)
        for saved, folder in reversed(checkpoints):
            if saved <= step:
                break
            if not folders.verify(folder):
                return str(folder)
        return found

    async def _checkpoints(self) -> list[tuple[int, Path]]:
        try:
            return await asyncio.to_thread(self._context.run.complete_checkpoints)
        except OSError as error:
            reason = f"the checkpoints cannot be listed: {error}"
            self._context.log("worker_error", rank=self._context.rank, reason=reason, fatal=False)
            return []

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
        if isinstance(message, Warned):
            if now - self._warned_at >= WARNING_S:
                self._warned_at = now
                self._context.log("snapshot_failed", rank=self._context.rank, reason=message.what)
            return
        if isinstance(message, WorkerError):
            # One process may fail alone; its peers then never answer, so this cannot wait for them.
            self._watch.answered(message, now)
            self._context.log("worker_error", rank=self._context.rank, reason=message.what, fatal=message.fatal)
            self._context.send(self._context.layout.train_leader, wire.FromReplica(self._context.rank, message))
            return
        # Local rank 0 alone writes files, so it alone may have failed to.
        asked = ASKED.get(type(message), type(message)).__name__
        answers = self._answers.setdefault(asked, {})
        answers[local_rank] = message
        if len(answers) == len(self._children):
            del self._answers[asked]
            answer = answers[0]
            self._watch.answered(answer, now)
            if isinstance(answer, StepDone | Joined):
                self.step = answer.step
            self._context.send(self._context.layout.train_leader, wire.FromReplica(self._context.rank, answer))

    def _exited(self, child: Child, code: int) -> None:
        name = f"worker process {child.name}"
        self._ended(child, f"{name} ended with {code}" if code >= 0 else f"{name} was killed by signal {-code}")

    def _ended(self, child: Child, reason: str) -> None:
        """The replica is lost with this process; once for every start."""
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
        if self._failed_starts >= MAX_STARTS:
            times = f"{self._failed_starts} times before it was ready"
            self._fail(f"the replica ended {times}, the last time because {reason}; see {where}")
            return
        if not self._budget.spend(time.monotonic()):
            times = f"the replica ended {self._budget.spent} times within {self._budget.window_s:.0f} s"
            self._fail(f"{reason}, and {times}; see {where}")
            return
        self._context.send(0, wire.EngineDied(self._context.rank, KIND, reason))
        self._context.send(self._context.layout.train_leader, wire.EngineDied(self._context.rank, KIND, reason))
