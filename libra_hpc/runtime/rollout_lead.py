"""The rollout leader's surroundings in its agent: environment host processes, its files, deadlines, and the report
of every second."""

from __future__ import annotations

import asyncio
import shutil
import time
from typing import Any

from libra_hpc.errors import said
from libra_hpc.protocol import mesh as wire
from libra_hpc.protocol.trace import Restart
from libra_hpc.rollout.history import history
from libra_hpc.rollout.recovered import Recovered, SavedTrajectory, TrainedPrompts
from libra_hpc.rollout.recovery_log import RecoveryLog
from libra_hpc.rollout.rollout_leader import RolloutLeader
from libra_hpc.rollout.run_lines import Routed, TrajectoryEnd, decision_line, trace_line
from libra_hpc.rollout.trajectory import Trajectory
from libra_hpc.sched.registry import make_policy
from libra_hpc.telemetry.journal import Journal

from .agent_context import AgentContext
from .attempt import start_state
from .hosts import Hosts
from .origin import digest
from .storage import KEEP_LINES, Storage

REPORT_S = 1.0
LEARN_AT_ONCE = 200
"""Earlier trajectories a policy learns from before the loop's other tasks get their turn: some 10 ms."""
STALL_S = 1.0
"""This process ran this much later than it wanted: nobody could read messages meanwhile, so nobody is judged by that
time."""


def position(start: wire.Welcome) -> TrainedPrompts:
    """The data order's part of a start state."""
    return TrainedPrompts(start.step, start.low, frozenset(start.extra))


def line(record: TrajectoryEnd | Restart) -> dict[str, Any]:
    """A line of `trajectories.jsonl`."""
    return record.line() if isinstance(record, Restart) else trace_line(record)


class RolloutLead:
    """See the module docstring."""

    def __init__(self, context: AgentContext) -> None:
        self._context = context
        config = context.config
        self._trajectories: Journal[TrajectoryEnd | Restart] = Journal(context.run.trajectories, line, KEEP_LINES)
        self._decisions: Journal[Routed] = Journal(context.run.decisions, decision_line)
        self._storage = Storage(self._trajectories, self._decisions, context.log)
        self._spool = (
            RecoveryLog(context.run.experience, self._saved, time.monotonic) if config.checkpoint.experience else None
        )
        self._new: list[Trajectory | SavedTrajectory | wire.Committed] = []
        """For the spool's next write."""
        self._stopping = False
        self._policy = make_policy(config.rollout.policy)
        self.leader = RolloutLeader(
            config,
            context.rank,
            self._policy,
            context.send,
            context.layout.train_leader,
            lambda host, message: self._hosts.send(host, message),
            self._on_ended,
            self._decisions.add,
            context.log,
        )
        self._hosts = Hosts(
            context,
            self.leader.on_host,
            self.leader.on_host_down,
            lambda reason: context.send(0, wire.Fatal(context.rank, reason)),
        )
        self._watcher: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Start the hosts, take over and learn from earlier attempts, then report every second until stopped."""
        await self._hosts.start()
        self._watcher = asyncio.get_running_loop().create_task(self._watch())
        start, kept = self._context.start, await self._recover()
        await self._supersede(kept)
        await self._learn()
        self.leader.on_position(start.step, start.low, start.extra, kept.groups)
        while not self._stopping:
            await asyncio.sleep(REPORT_S)
            self._context.send(0, self.leader.report())
            if not self._stopping:
                await self._flush()

    async def _watch(self) -> None:
        """Look after deadlines once a second; time in which this process stood still counts for nobody."""
        before = time.monotonic()
        while not self._stopping:
            await asyncio.sleep(REPORT_S)
            now = time.monotonic()
            late_s, before = now - before - REPORT_S, now
            if late_s > STALL_S:
                # What has come meanwhile is read before the next look.
                self._hosts.discount(late_s)
                self.leader.discount(late_s)
            else:
                self._hosts.watch()
                self.leader.watch()

    async def _supersede(self, kept: Recovered) -> None:
        """Mark what earlier starts finished and this one does not go on with."""
        start, path = self._context.start, self._context.run.trajectories
        try:
            if not path.stat().st_size:
                return
        except OSError:
            return
        done = sorted((t.index, t.sample) for group in kept.groups.values() for t in group if t.place == "done")
        self._trajectories.add(Restart(start.step, start.low, start.extra, tuple(done)))
        await self._flush()

    async def _learn(self) -> None:
        """Show the policy what it could have learned before this attempt."""
        context, config = self._context, self._context.config
        try:
            records = await asyncio.to_thread(
                history, context.run.trajectories, config.rollout.warm_start, config.task.name
            )
        except OSError as error:
            context.log(
                "storage_fault", part="trajectories.jsonl", reason=f"trajectories.jsonl cannot be read: {said(error)}"
            )
            return
        for number, record in enumerate(records):
            self._policy.finished(record, time.monotonic())
            if number % LEARN_AT_ONCE == 0:
                await asyncio.sleep(0)
        if records:
            context.log("scheduler_warm_start", trajectories=len(records))

    async def _recover(self) -> Recovered:
        """What earlier starts have finished and this one need not sample again."""
        context, config, start = self._context, self._context.config, self._context.start
        if self._spool is None:
            # Weights count by their versions, and a start that leaves no trace would mix its own with those of others.
            await asyncio.to_thread(shutil.rmtree, context.run.experience, ignore_errors=True)
            return Recovered({}, {})
        kept = await self._spool.recover(digest(config), position(start), config.algorithm.eta)
        if kept.groups or kept.dropped:
            context.log("experience_kept", **kept.event(config.algorithm.group_size))
        return kept

    def _saved(self) -> TrainedPrompts:
        """Where a start would go on now."""
        return position(start_state(self._context.run))

    def _on_ended(self, ended: TrajectoryEnd) -> None:
        self._trajectories.add(ended)
        self._new.append(ended.trajectory)

    async def _flush(self) -> None:
        new, self._new = self._new, []
        await self._storage.flush(self._spool, new)

    async def stop(self) -> None:
        """End the environment hosts and write what is left."""
        self._stopping = True
        if self._watcher is not None:
            self._watcher.cancel()
        # Before anything that takes time: whoever ends the job may not wait for it.  What is in mid-course comes last,
        # as it is now: it may go on meanwhile.
        self._new += [SavedTrajectory.of(trajectory) for trajectory in self.leader.unfinished()]
        await self._flush()
        await self._hosts.stop()
        # What ended meanwhile: its line is in `trajectories.jsonl`, and the next start must not let it end once more.
        await self._flush()
        await self._storage.close()
        if self._spool is not None:
            await self._spool.close()

    def on_message(self, message: Any) -> None:
        """What the mesh brings for the rollout leader."""
        leader = self.leader
        match message:
            case wire.TurnsDone(items=items):
                leader.on_turns_done(items)
            case wire.EngineLoad(engine=engine, stats=stats):
                leader.on_engine_load(engine, stats)
            case wire.EngineVersion(engine=engine, version=version):
                leader.on_engine_version(engine, version)
            case wire.EngineUp():
                leader.on_engine_up(message)
            case wire.EngineDown(engine=engine, reason=reason):
                leader.on_engine_down(engine, reason)
            case wire.DrainTurns(rank=rank):
                leader.on_drain(rank)
            case wire.Committed(indices=indices):
                leader.on_committed(indices)
                self._new.append(message)
