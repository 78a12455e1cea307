"""The node agent: one MPI rank per node, the process Slurm starts.

Thin on purpose: asyncio, sockets and msgpack, never torch, vLLM or Megatron, so that it outlives every crash of an
engine.  Every agent can run engines of both kinds (`RolloutNode`, `TrainNode`); rank 0 is also the coordinator, the
lowest training rank the train leader, the lowest rollout rank the rollout leader.  All parts run in one event loop and
talk through the mesh, also where they share a process.

``python -m libra_hpc.runtime.agent --run RUN_DIR --attempt N``
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import logging
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from libra_hpc.config.run import RunConfig
from libra_hpc.errors import OperationError, UserError
from libra_hpc.process.agent_folders import make_folders
from libra_hpc.process.child import Child
from libra_hpc.process.leave import leave
from libra_hpc.process.reaper import become_subreaper, end_strangers
from libra_hpc.protocol import mesh as wire
from libra_hpc.simulated.dry_run import in_wall_time
from libra_hpc.telemetry.run_config import load_resolved
from libra_hpc.telemetry.rundir import RunDir
from libra_hpc.train import state_folders as folders
from libra_hpc.train.train_leader import DataOrder, TrainLeader

from .agent_context import AgentContext
from .attempt import complete_checkpoint, remove_old, whole_start_state
from .coordinator import Coordinator
from .coordinator_watch import CoordinatorWatch
from .mesh import Mesh
from .rank_layout import RankLayout, check_world
from .rollout_lead import RolloutLead
from .rollout_node import RolloutNode
from .routes import Routes, add_engines, add_rollout_lead, add_train_leader
from .train_node import TrainNode
from .world import NoWorld, World, meet

HEARTBEAT_S = 1.0
REAP_S = 1.0
"""Between two looks for processes that were left behind."""
GOODBYE_S = 5.0

log = logging.getLogger("libra_hpc.agent")


class Agent:
    """All parts of one node."""

    def __init__(self, world: World, config: RunConfig, layout: RankLayout, run: RunDir, attempt: int) -> None:
        self.mesh = Mesh(world, self._on_message)
        self.layout, self.run_dir, self.attempt = layout, run, attempt
        self.rank = self.mesh.rank
        self.config = in_wall_time(config)
        self.private, self.shared_memory = make_folders()
        self.context: AgentContext | None = None
        self.coordinator: Coordinator | None = None
        self.train_leader: TrainLeader | None = None
        self.rollout_lead: RolloutLead | None = None
        self.rollout_node: RolloutNode | None = None
        self.train_node: TrainNode | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stop = asyncio.Event()
        self._watch = CoordinatorWatch(run.gone(attempt))
        self._training: asyncio.Task[Any] | None = None
        self._early_signals: list[str] = []
        """Notices that came while rank 0 still read its checkpoint."""
        self._rendezvous: Path | None = None
        """Train leader only: its folder for the meeting points of generations."""
        self._routes = Routes()
        self._routes.add(wire.Welcome, self._enter)
        self._routes.add(wire.Roles, self._on_roles)
        self._routes.add(wire.RankLost, self._on_rank_lost)
        self._routes.add(wire.RankBack, lambda back: self.mesh.remember(back.rank))
        self._routes.add(wire.Reset, lambda order: self._spawn(self._reset()))
        self._routes.add(wire.StopAgent, self._on_stop)

    async def run(self) -> bool:
        """Serve until the coordinator says stop; True when the run completed or starts again (rank 0), or this node
        was not at fault (others)."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGUSR1):
            loop.add_signal_handler(number, self._on_signal, number)
        loop.set_exception_handler(self._on_defect)
        if self.rank == 0:
            # Before any message is read: what comes for the coordinator waits in the kernel until there is one.
            start, damaged = await asyncio.to_thread(whole_start_state, self.run_dir)
            self._enter(msgspec.structs.replace(start, pid=os.getpid()))
            assert self.context is not None
            self.coordinator = Coordinator(self.context, damaged)
            self.mesh.from_lost = self._on_lost_message
            for name in self._early_signals:
                self.coordinator.on_signal(name)
            self._spawn(self.coordinator.run(), then=self._stop.set)
        self._spawn(self.mesh.run())
        self._spawn(self._reap())
        self._hello()
        self._spawn(self._heartbeats())
        if self.rank != 0:
            self._spawn(self._outlive_coordinator())
        await self._stop.wait()
        await self._leave()
        return self.coordinator is None or self.coordinator.state in ("completed", "restarting")

    def _hello(self) -> None:
        self.mesh.send(0, wire.Hello(self.rank, socket.gethostname(), os.getpid(), self.layout.components[self.rank]))

    # --- life
    # ----------------------------------------------------------------------------------------------

    def _enter(self, start: wire.Welcome) -> None:
        """The attempt's start state is known: build the parts of this node."""
        if self.context is not None:
            return
        context = AgentContext(
            self.rank,
            self.layout,
            self.config,
            self.run_dir,
            self.attempt,
            self.mesh.send,
            start,
            self.private,
            self.shared_memory,
        )
        self.context = context
        if context.component != "planner":
            self.rollout_node, self.train_node = RolloutNode(context), TrainNode(context)
            add_engines(self._routes, self.rollout_node, self.train_node, self._spawn)
            self._spawn(self.rollout_node.watch())
            self._spawn(self.train_node.watch())
            if self.rank == self.layout.train_leader:
                self.train_leader = self._make_train_leader(context)
                add_train_leader(self._routes, self.train_leader, self.train_node, self.rank, self.mesh.send)
                self._training = self._spawn(self.train_leader.run())
            if self.rank == self.layout.rollout_leader:
                self.rollout_lead = RolloutLead(context)
                add_rollout_lead(self._routes, self.rollout_lead)
                self._spawn(self.rollout_lead.run())

    def _make_train_leader(self, context: AgentContext) -> TrainLeader:
        config, start = self.config, context.start
        # Of this start alone: a killed one leaves meeting points behind that would be met again.
        shutil.rmtree(self.run_dir.rendezvous, ignore_errors=True)
        self._rendezvous = rendezvous = self.run_dir.rendezvous / f"attempt-{self.attempt}-{os.getpid()}"
        rendezvous.mkdir(parents=True)
        self.run_dir.checkpoints.mkdir(exist_ok=True)

        async def saved(step: int, order: DataOrder, reports: Sequence[wire.StepReport]) -> None:
            records = tuple(
                folders.StepRecord(report.step, report.t, dict(report.metrics.columns())) for report in reports
            )
            position = folders.DataPosition(step, order.low, tuple(sorted(order.extra)), records)
            # A shared file system may take a minute for any of this, and this loop has heartbeats to send.
            await asyncio.to_thread(complete_checkpoint, self.run_dir.checkpoint(step), position)
            context.log("checkpoint_saved", step=step)
            asyncio.get_running_loop().run_in_executor(None, remove_old, self.run_dir, config.checkpoint.keep)

        order = DataOrder(start.low, start.extra)
        leader = self.layout.rollout_leader
        return TrainLeader(
            config,
            self.rank,
            start.step,
            order,
            self.mesh.send,
            leader,
            lambda: context.receivers,
            saved,
            rendezvous=rendezvous,
            checkpoints=self.run_dir.checkpoints,
        )

    async def _leave(self) -> None:
        """End the engines, then the tasks; the folders of this agent go with it."""
        stops = [part.stop() for part in (self.rollout_lead, self.rollout_node, self.train_node) if part is not None]
        await asyncio.gather(*stops)
        await self.mesh.drain(GOODBYE_S)
        for task in self._tasks:
            task.cancel()
        if self._rendezvous is not None:
            shutil.rmtree(self._rendezvous, ignore_errors=True)
        shutil.rmtree(self.private, ignore_errors=True)
        shutil.rmtree(self.shared_memory, ignore_errors=True)

    async def _heartbeats(self) -> None:
        while True:
            nodes = [part for part in (self.rollout_node, self.train_node) if part is not None]
            engines = {name: state for part in nodes for name, state in part.states.items()}
            pids = {name: pid for part in nodes for name, pid in part.pids.items()}
            version = -1
            if self.rollout_node is not None and self.train_node is not None:
                version = self.rollout_node.version if self.rollout_node.version >= 0 else self.train_node.step
            unreachable = self.mesh.unreachable()
            if 0 in unreachable:
                # Only rank 0 can take this node back, so it must hear that messages to it were lost.
                self.mesh.reopen(0)
            component = self.layout.components[self.rank]
            self.mesh.send(0, wire.Heartbeat(self.rank, component, engines, pids, version, unreachable))
            await asyncio.sleep(HEARTBEAT_S)

    async def _outlive_coordinator(self) -> None:
        """Leave once the coordinator is gone, but not before training has saved."""
        await self._watch.gone()
        if self.train_leader is not None and self._training is not None:
            self.train_leader.on_stop("the coordinator was lost")
            await self._watch.save(self._training)
        elif self.layout.components[self.rank] in ("train", "hybrid"):
            await self._watch.stay(self.layout.train_leader)
        self._stop.set()

    async def _reap(self) -> None:
        """End what outlived a child of this agent: a host that was killed leaves the processes its tools started."""
        become_subreaper()
        while True:
            await asyncio.sleep(REAP_S)
            if not Child.starting:
                end_strangers(Child.live)

    def _on_defect(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception that no task of ours is waiting for ends the run, with its traceback in this agent's log."""
        error = context.get("exception")
        if isinstance(error, Exception):
            self._fail(context["message"], error)
        else:
            log.error("%s", context["message"], exc_info=error)

    def _fail(self, what: str, error: BaseException) -> None:
        """A defect of ours: traceback into this agent's log, the reason to the coordinator, which ends the run, or
        restarts it after a file system's fault."""
        log.error("%s", what, exc_info=error)
        self.mesh.send(0, wire.Fatal(self.rank, f"{type(error).__name__}: {error}", restart=isinstance(error, OSError)))

    def _spawn(self, work: Any, then: Any = None) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)

        def done(finished: asyncio.Task[Any]) -> None:
            self._tasks.discard(finished)
            if finished.cancelled():
                return
            error = finished.exception()
            if error is not None:
                self._fail("a task of this agent failed", error)
            if then is not None:
                then()

        task.add_done_callback(done)
        return task

    def _on_signal(self, number: signal.Signals) -> None:
        name = signal.Signals(number).name
        if self.coordinator is not None:
            self.coordinator.on_signal(name)
        else:
            self._early_signals.append(name)

    # --- messages
    # ----------------------------------------------------------------------------------------------

    def _on_message(self, source: int, message: Any, blob: bytes | bytearray) -> None:
        if source == 0:
            self._watch.heard(message.pid if isinstance(message, wire.Welcome) else 0)
        try:
            self._route(source, message, blob)
        except Exception as error:
            self._fail(f"message {type(message).__name__} from rank {source}", error)

    def _route(self, source: int, message: Any, blob: bytes | bytearray) -> None:
        if not self._routes.deliver(message, blob) and self.coordinator is not None:
            self.coordinator.on_message(source, message)

    def _on_roles(self, roles: wire.Roles) -> None:
        if self.context is not None:
            self.context.receivers = roles.receivers
        if self.train_leader is not None:
            self.train_leader.on_recorded(roles.recorded)

    def _on_rank_lost(self, lost: wire.RankLost) -> None:
        self.mesh.forget(lost.rank)
        if self.train_leader is not None:
            self.train_leader.on_replica_down(lost.rank, "node lost")
        if self.rollout_lead is not None:
            self.rollout_lead.leader.on_rank_lost(lost.rank)

    def _on_lost_message(self, rank: int, message: Any) -> None:
        """Rank 0 only: a rank that was declared lost is heard again."""
        if isinstance(message, wire.Heartbeat) and self.coordinator is not None:
            self.mesh.remember(rank)
            self.coordinator.on_back(rank)

    async def _reset(self) -> None:
        """This node was declared lost and is taken back: its engines end, and it begins as a new one."""
        log.warning("this node was declared lost: ending its engines and starting again")
        await asyncio.gather(*(part.reset() for part in (self.rollout_node, self.train_node) if part is not None))
        self.mesh.remember(0)
        self._hello()

    def _on_stop(self, stop: wire.StopAgent) -> None:
        log.info("stop: %s", stop.reason)
        self._stop.set()


def main() -> None:
    """Entry point of ``python -m libra_hpc.runtime.agent``."""
    parser = argparse.ArgumentParser(prog="libra-hpc node agent")
    parser.add_argument("--run", required=True)
    parser.add_argument("--attempt", type=int, required=True)
    arguments = parser.parse_args()
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    run, problem = RunDir(arguments.run), ""
    try:
        config = load_resolved(run.config)
        layout = RankLayout.of(config)
    except (UserError, OperationError) as error:
        problem = str(error)
    try:
        world = meet("" if problem else config.slurm.interface, problem)
        check_world(world.size, layout, os.environ)
    except NoWorld as error:
        _refuse(run, arguments.attempt, error.rank, error)
    except OperationError as error:
        _refuse(run, arguments.attempt, world.rank, error)
    if world.rank == 0:
        run.met(arguments.attempt).touch()
    good = asyncio.run(Agent(world, config, layout, run, arguments.attempt).run())
    leave(0 if good else 1)


def _refuse(run: RunDir, attempt: int, rank: int, error: OperationError) -> NoReturn:
    """End before there is a coordinator; rank 0 leaves the verdict."""
    log.error("%s", error)
    if rank == 0:
        run.write_json(
            run.result, {"state": "failed", "message": str(error), "step": 0, "attempt": attempt, "t": time.time()}
        )
    leave(error.exit_code)


if __name__ == "__main__":
    main()
