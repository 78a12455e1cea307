"""The rollout leader's surroundings in its agent: environment host processes, its files, and the report of every second."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from typing import Any

from libra_hpc.protocol import mesh as wire
from libra_hpc.protocol.env import ToHost, from_host, to_host
from libra_hpc.rollout.history import history
from libra_hpc.rollout.kept import Kept, Position, Record
from libra_hpc.rollout.leader import RolloutLeader
from libra_hpc.rollout.record import Ended, Routed, decision_line, trace_line
from libra_hpc.rollout.settings import rollout_settings
from libra_hpc.rollout.spool import Spool
from libra_hpc.rollout.trajectory import Trajectory
from libra_hpc.sched.registry import make_policy
from libra_hpc.tasks.settings import write_private
from libra_hpc.telemetry.journal import Journal

from .attempt import start_state
from .child import Child
from .commands import host_command, host_settings
from .context import Context
from .origin import digest

REPORT_S = 1.0
LEARN_AT_ONCE = 200
"""Earlier trajectories a policy learns from before the loop's other tasks get their turn: some 10 ms."""
HOST_RESTART_S = 0.5
MAX_FAST_DEATHS = 5
"""Deaths in a row without a single `HostReady`: then the task itself is broken and the run ends with its message."""


def position(start: wire.Welcome) -> Position:
    """The data order's part of a start state."""
    return Position(start.step, start.low, frozenset(start.extra))


class RolloutLead:
    """See the module docstring."""

    def __init__(self, context: Context) -> None:
        self._context = context
        config = context.config
        self._trajectories: Journal[Ended] = Journal(context.run.trajectories, trace_line)
        self._decisions: Journal[Routed] = Journal(context.run.decisions, decision_line)
        self._spool = Spool(context.run.experience, self._saved, time.monotonic) if config.checkpoint.experience else None
        self._new: list[Trajectory | Record | wire.Committed] = []
        """For the spool's next write."""
        self._hosts: list[Child | None] = [None] * config.task.hosts
        self._deaths = [0] * config.task.hosts
        self._restarts: dict[int, asyncio.Task[None]] = {}
        self._stopping = False
        self._policy = make_policy(config.rollout.policy, config.run.seed)
        self.leader = RolloutLeader(
            rollout_settings(config, context.rank),
            self._policy,
            context.send,
            context.layout.train_leader,
            config.task.hosts,
            self._to_host,
            self._on_ended,
            self._decisions.add,
            context.log,
        )

    async def run(self) -> None:
        """Learn from earlier attempts, start the hosts, then report every second until stopped."""
        await self._learn()
        for host in range(len(self._hosts)):
            await self._start_host(host)
        start, kept = self._context.start, await self._recover()
        self.leader.on_position(start.step, start.low, start.extra, kept.groups)
        while not self._stopping:
            await asyncio.sleep(REPORT_S)
            self._context.send(0, self.leader.report())
            if not self._stopping:
                await self._flush()

    async def _learn(self) -> None:
        """Show the policy what it could have learned before this attempt."""
        context, config = self._context, self._context.config
        records = await asyncio.to_thread(history, context.run.trajectories, config.rollout.warm_start, config.task.name)
        for number, record in enumerate(records):
            self._policy.finished(record, time.monotonic())
            if number % LEARN_AT_ONCE == 0:
                await asyncio.sleep(0)
        if records:
            context.log("scheduler_warm_start", trajectories=len(records))

    async def _recover(self) -> Kept:
        """What earlier starts have finished and this one need not sample again."""
        context, config, start = self._context, self._context.config, self._context.start
        if self._spool is None:
            # Weights count by their versions, and a start that leaves no trace would mix its own with those of others.
            await asyncio.to_thread(shutil.rmtree, context.run.experience, ignore_errors=True)
            return Kept({}, {})
        kept = await self._spool.recover(digest(config), position(start), config.algorithm.eta)
        if kept.groups or kept.dropped:
            context.log("experience_kept", **kept.event(config.algorithm.group_size))
        return kept

    def _saved(self) -> Position:
        """Where a start would go on now."""
        return position(start_state(self._context.run))

    def _on_ended(self, ended: Ended) -> None:
        self._trajectories.add(ended)
        self._new.append(ended.trajectory)

    async def _flush(self) -> None:
        # Lines first: what is kept has one, so that a start which goes on with it need not write it.
        new, self._new = self._new, []
        await self._trajectories.flush()
        await self._decisions.flush()
        spool = self._spool
        if spool is not None:
            await spool.write(new)
            if spool.failed:
                self._context.log("experience_not_kept", reason=spool.failed)
                self._spool = None

    async def stop(self) -> None:
        """End the environment hosts and write what is left."""
        self._stopping = True
        # Before anything that takes time: whoever ends the job may not wait for it.  What is in mid-course comes last, as it is now: it may go on meanwhile.
        self._new += [Record.of(trajectory) for trajectory in self.leader.unfinished()]
        await self._flush()
        await asyncio.gather(*(child.stop() for child in self._hosts if child is not None))
        # What ended meanwhile: its line is in `trajectories.jsonl`, and the next start must not let it end once more.
        await self._flush()
        await self._trajectories.close()
        await self._decisions.close()
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

    # --- environment hosts ------------------------------------------------------------------------------------------------------------------

    async def _start_host(self, host: int) -> None:
        context = self._context
        child = Child(f"host{host}", context.private / f"host{host}.sock", to_host, from_host, self._message, self._exited)
        self._hosts[host] = child
        settings = context.private / f"host{host}.json"
        write_private(settings, host_settings(context.config))
        await child.start(host_command(context.config, settings), dict(os.environ), context.logs / f"host{host}.log")

    def _to_host(self, host: int, message: ToHost) -> None:
        child = self._hosts[host]
        if child is not None:
            child.send(message)

    def _message(self, child: Child, message: Any) -> None:
        host = self._hosts.index(child)
        self._deaths[host] = 0
        self.leader.on_host(host, message)

    def _exited(self, child: Child, code: int) -> None:
        if self._stopping:
            return
        host = self._hosts.index(child)
        self._deaths[host] += 1
        reason = f"environment host ended with {code}"
        self._context.log("host_lost", host=host, reason=reason)
        if self._deaths[host] >= MAX_FAST_DEATHS:
            self._context.send(0, wire.Fatal(self._context.rank, f"{reason} {self._deaths[host]} times in a row; see {self._context.logs}/host{host}.log"))
            return
        self._restarts[host] = asyncio.get_running_loop().create_task(self._restart(host, reason))

    async def _restart(self, host: int, reason: str) -> None:
        await asyncio.sleep(HOST_RESTART_S * self._deaths[host])
        if not self._stopping:
            await self._start_host(host)
            self.leader.on_host_down(host, reason)
