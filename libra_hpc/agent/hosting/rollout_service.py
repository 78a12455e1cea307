"""The rollout leader's surroundings in its agent: environment hosts, files, deadlines, and a report every second.

Transcripts are written off its loop; a full disk costs transcripts, never a step.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import deque
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from libra_hpc.config.run import RunConfig
from libra_hpc.errors import error_text
from libra_hpc.facts.journal import Journal
from libra_hpc.facts.rundir import read_lines
from libra_hpc.mesh.agent_context import AgentContext
from libra_hpc.policies.scheduling.registry import make_policy
from libra_hpc.process.child import spawn
from libra_hpc.process.progress import ticks
from libra_hpc.process.retry import patiently
from libra_hpc.protocol import agents as wire
from libra_hpc.protocol.agents import Group
from libra_hpc.protocol.env import ToHost
from libra_hpc.protocol.trace import Restart
from libra_hpc.rollout.records.transcripts import TranscriptWriter
from libra_hpc.rollout.recovery.recovery_log import Recovered, RecoveryLog
from libra_hpc.rollout.rollout_leader import RolloutLeader
from libra_hpc.rollout.trajectory import Routed, Trajectory, decision_line, history
from libra_hpc.state.attempt import saved_point

from .hosts import Hosts
from .origin import digest
from .storage import DECISIONS_BYTES, KEEP_LINES, Storage, StorageFaults

GB = 1_000_000_000
MOST_WAITING = 64
"""Steps in memory: those of a second, or while the file system does not answer; older ones are left out."""
MOST_FAILED = 64
"""Failed attempts of a step that are retained, the newest.  Half: a rare error may be missing; double: 64 long contexts
more in memory."""


class TranscriptLog:
    """Transcripts that wait to be written; ``log`` writes an event."""

    def __init__(self, folder: Path, config: RunConfig, log: Callable[..., None]) -> None:
        budget = int(config.run.transcripts_gb * GB)
        # Simulated engines write no text.
        self._wanted = budget > 0 and config.run.engine == "real"
        # Made by the first write, because it reads the folder.
        self._writer = cache(partial(TranscriptWriter, folder, budget))
        self._waiting: deque[tuple[int, list[Trajectory], tuple[Group, ...], str]] = deque()
        self._failed: deque[Trajectory] = deque(maxlen=MOST_FAILED)
        self._log, self._faults, self._dropped, self._removed = log, StorageFaults(log), 0, False

    def failed(self, trajectory: Trajectory) -> None:
        """Record a failed attempt, beside the next step."""
        if self._wanted:
            self._failed.append(trajectory)

    def end(self, step: int) -> None:
        """Record the attempts that failed since the last step as those of ``step``, which was not composed."""
        if self._failed:
            self.add(step, [], ())

    def add(self, step: int, trajectories: list[Trajectory], groups: tuple[Group, ...], evaluation: str = "") -> None:
        """Record what a step is trained on, or its evaluation; written by the next `flush`."""
        if not evaluation:
            trajectories = [*trajectories, *self._failed]
            self._failed.clear()
        if self._wanted:
            self._waiting.append((step, trajectories, groups, evaluation))
        if len(self._waiting) > MOST_WAITING:
            self._waiting.popleft()
            self._dropped += 1
            self._faults.report("transcripts", "the file system does not answer", self._dropped)

    async def flush(self) -> None:
        """Write what waits; what cannot be written is left out, and the first failure is an event."""
        while self._waiting:
            batch = self._waiting.popleft()
            try:
                removed = await asyncio.to_thread(lambda batch: self._writer().write(*batch), batch)
            except OSError as error:
                self._dropped += 1
                self._faults.report("transcripts", error_text(error), self._dropped)
                continue
            self._faults.report("transcripts", "", self._dropped)
            if removed and not self._removed:
                self._removed = True
                self._log("transcripts_removed", step=batch[0], reason="run.transcripts_gb is used")


REPORT_S = 1.0
"""Between two reports."""
LEARN_BATCH = 200
"""Earlier trajectories a policy learns from before the loop's other tasks run: some 10 ms."""
SAVED_S = 30.0
"""For the newest checkpoint's data position to be readable, while records wait in memory."""


def line(record: Trajectory | Restart) -> dict[str, Any]:
    return record.line() if isinstance(record, Restart) else record.numbers


class RolloutService:
    """See the module docstring; it is the `Surroundings` of its leader."""

    def __init__(self, context: AgentContext, steps: int | None = None) -> None:
        """``steps``: of the run, where they are others than the configuration's."""
        self._context = context
        config = context.config
        self._trajectories: Journal[Trajectory | Restart] = Journal(context.run.trajectories, line, KEEP_LINES)
        self._decisions: Journal[Routed] = Journal(context.run.decisions, decision_line, most=DECISIONS_BYTES)
        self._evaluations: Journal[dict[str, Any]] = Journal(context.run.evaluations, dict, KEEP_LINES)
        self._storage = Storage(self._trajectories, self._decisions, context.log)
        self._transcripts = TranscriptLog(context.run.transcripts, config, context.log)
        self._recovery_log = (
            RecoveryLog(
                context.run.experience, lambda: patiently(lambda: saved_point(context.run), SAVED_S), time.monotonic
            )
            if config.checkpoint.experience
            else None
        )
        self._unwritten: list[Trajectory | wire.Committed] = []
        """For the next write to the recovery log."""
        self._stopping = False
        self._policy = make_policy(config.rollout.policy)
        self.clock, self.send, self.log, self.routed = time.monotonic, context.send, context.log, self._decisions.add
        self.changed = context.changed
        led = config if steps is None else config.changed(run={"steps": steps})
        self.leader = RolloutLeader(led, context.rank, context.layout.train_leader, self._policy, surroundings=self)
        self._hosts = Hosts(context, self.leader)
        self._watchers: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Start the hosts, recover and learn from earlier attempts, then report every second until stopped."""
        await self._hosts.start()
        self._watchers = [spawn(self._watch()), spawn(self._hosts.watch())]
        point, recovered = self._context.resume_point, await self._recover()
        await self._supersede(recovered)
        await self._learn()
        self.leader.evaluations.restore(await asyncio.to_thread(list, read_lines(self._context.run.evaluations)))
        self.leader.on_position(point.step, point.low, point.extra, recovered.groups)
        while not self._stopping:
            await asyncio.sleep(REPORT_S)
            self._context.send(0, self.leader.report())
            if not self._stopping:
                await self._flush()

    async def _watch(self) -> None:
        async for stall in ticks(REPORT_S):
            self.leader.discount(stall)
            # What has come meanwhile is read before the next check.
            if not stall:
                self.leader.watch()

    async def _supersede(self, recovered: Recovered) -> None:
        """Mark what earlier starts finished and this one does not go on with."""
        point, path = self._context.resume_point, self._context.run.trajectories
        try:
            if not path.stat().st_size:
                return
        except OSError:
            return
        done = sorted((t.index, t.sample) for group in recovered.groups.values() for t in group if t.place == "done")
        self._trajectories.add(Restart(point.step, point.low, point.extra, tuple(done)))
        await self._flush()

    async def _learn(self) -> None:
        context, config = self._context, self._context.config
        try:
            records = await asyncio.to_thread(history, context.run.trajectories, config.task.name)
        except OSError as error:
            context.log(
                "storage_fault",
                part="trajectories.jsonl",
                reason=f"trajectories.jsonl cannot be read: {error_text(error)}",
            )
            return
        for number, record in enumerate(records):
            self._policy.finished(record, time.monotonic())
            if number % LEARN_BATCH == 0:
                await asyncio.sleep(0)
        if records:
            context.log("scheduler_warm_start", trajectories=len(records))

    async def _recover(self) -> Recovered:
        context, config, point = self._context, self._context.config, self._context.resume_point
        if self._recovery_log is None:
            # Versions number the weights of one line of starts; without records, those of another could be mixed in.
            await asyncio.to_thread(shutil.rmtree, context.run.experience, ignore_errors=True)
            return Recovered({}, {})
        recover, eta = self._recovery_log.recover, config.algorithm.eta
        recovered = await asyncio.to_thread(recover, digest(config), point, eta)
        if self._recovery_log.changed:
            context.log("workload_changed")
        if recovered.groups or recovered.dropped:
            context.log("experience_kept", **recovered.event(config.algorithm.group_size))
        return recovered

    # --- surroundings of the leader

    def to_host(self, host: int, message: ToHost) -> None:
        rank, host = divmod(host, self._context.config.task.hosts)
        if rank:
            self.send(rank, wire.ToEnvHost(host, message))
        else:
            self._hosts.send(host, message)

    def composed(self, step: int, trajectories: list[Trajectory], groups: tuple[wire.Group, ...]) -> None:
        self._transcripts.add(step, trajectories, groups)

    def failed(self, trajectory: Trajectory) -> None:
        self._transcripts.failed(trajectory)

    def evaluated(self, line: dict[str, Any], trajectories: list[Trajectory]) -> None:
        self._evaluations.add(line)
        self._transcripts.add(line["step"], trajectories, (), line["task"])

    def ended(self, trajectory: Trajectory) -> None:
        self._trajectories.add(trajectory)
        self._unwritten.append(trajectory)

    async def _flush(self) -> None:
        new, self._unwritten = self._unwritten, []
        await self._storage.flush(self._recovery_log, new)
        await self._transcripts.flush()
        await self._evaluations.flush()
        self._storage.faults.report("evaluations.jsonl", self._evaluations.fault, self._evaluations.dropped)

    async def stop(self) -> None:
        self._stopping = True
        for watcher in self._watchers:
            watcher.cancel()
        # Before anything slow, for which whoever ends the job may not wait.  Unfinished trajectories are written as
        # they are now: they may go on meanwhile.
        self._unwritten += self.leader.unfinished()
        self._transcripts.end(self.leader.composed + 1)
        await self._flush()
        await self._hosts.stop()
        # What ended meanwhile: its line is in `trajectories.jsonl`, and the next start must not let it end once more.
        await self._flush()
        await self._storage.close()
        await self._evaluations.close()
        if self._recovery_log is not None:
            await self._recovery_log.close()

    def _number(self, rank: int, host: int) -> int:
        """The number that `Environments` has for a host of an environment node."""
        return rank * self._context.config.task.hosts + host

    def on_message(self, message: Any) -> None:
        leader = self.leader
        match message:
            case wire.TurnsDone(items=items):
                leader.on_turns_done(items)
            case wire.EngineLoads(loads=loads):
                for engine, stats in loads.items():
                    leader.on_engine_load(engine, stats)
            case wire.Heartbeat(rank=rank, engines=engines, lender=lender):
                leader.on_engines(rank, engines, lender)
            case wire.FromEnvHost(rank=rank, host=host):
                leader.on_host(self._number(rank, host), message.message)
            case wire.ExpertsWanted():
                leader.on_experts_wanted(message)
            case wire.Committed():
                leader.on_committed(message)
                self._unwritten.append(message)
