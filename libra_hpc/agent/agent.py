"""The node agent: one MPI rank per node, the process that Slurm starts.

It uses asyncio, sockets and msgpack, never torch, vLLM or Megatron, so that it outlives every crash of an engine.

- Every agent can run engines of both kinds (`RolloutNode`, `TrainNode`), or environments alone (`EnvNode`).
- Rank 0 is also the coordinator, the lowest training rank the train leader, one that rolls out the rollout leader.
- All parts run in one event loop and talk through the mesh, also where they share a process.

``python -m libra_hpc.agent.agent --run RUN_DIR --attempt N``
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import logging
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from libra_hpc.agent.hosting.hosts import EnvNode
from libra_hpc.agent.hosting.rollout_service import RolloutService
from libra_hpc.config.load import load_resolved, with_values
from libra_hpc.config.node_groups import first_gpu
from libra_hpc.config.run import RunConfig
from libra_hpc.coordinator.coordinator import Coordinator
from libra_hpc.coordinator.guard_watch import read_guards
from libra_hpc.coordinator.nodes import NodePool
from libra_hpc.errors import OperationError, UserError
from libra_hpc.facts.fact_writer import RESULT_BYTES, Reserve, status_reserve
from libra_hpc.facts.rundir import RunDir
from libra_hpc.facts.status import renewed_status
from libra_hpc.mesh.agent_context import AgentContext, RankLayout
from libra_hpc.mesh.door import close_door, open_door, shown
from libra_hpc.mesh.layout_publisher import Publisher, opened
from libra_hpc.mesh.mesh import Mesh
from libra_hpc.mesh.mpi_link import MpiLink
from libra_hpc.mesh.world import Endpoint, World, meet
from libra_hpc.process.agent_folders import hold, kept_folder, own, owned, remove
from libra_hpc.process.child import raise_limits
from libra_hpc.process.child_environment import VARIABLE, own_devices
from libra_hpc.process.code_stamp import other_code
from libra_hpc.process.entry import STRAY, dump_on_request, leave, stray_words
from libra_hpc.process.lease import CHECK_S, Fence
from libra_hpc.process.owner_link import NoWorld, OwnerLink
from libra_hpc.process.retry import cannot
from libra_hpc.process.storage_watch import StorageWatch
from libra_hpc.protocol import agents as wire
from libra_hpc.protocol.codec import FrameError
from libra_hpc.protocol.joining import Admitted, ConfigWanted, DoorRecord, JoinWanted, NotAdmitted, door, is_guest
from libra_hpc.protocol.layout import Layout, LayoutChange, ResumePoint, Row
from libra_hpc.protocol.layout_changes import NOTHING, taken
from libra_hpc.protocol.ranks_stop import RanksStop, Why, start_of
from libra_hpc.simulated.dry_run import in_wall_time
from libra_hpc.state.attempt import newest_point
from libra_hpc.state.snapshot_keeper import whole_parts
from libra_hpc.train_leader.train_leader import TrainLeader
from libra_hpc.train_leader.train_leader_setup import make_train_leader, rendezvous_folder

from .coordinator_watch import SAVE_S, CoordinatorWatch
from .node import LIVE_S, NodeAgent, Routes, add_engines, add_rollout_service, add_train_leader
from .node_carrier import NodeCarrier
from .rollout_node import RolloutNode
from .train_node import TrainNode

FOLDERS_S = 1.0
"""Between two checks that this agent's folders are there."""
DOOR_S = 10.0
"""Between two tries to write how to join."""
FAN_OUT = 32
"""Agents to which one passes on what all MPI processes have put, 1 kB each: rank 0 sends 45 MB to reach 1,024 by two
steps.  Half: by three; double: twice as much."""
SIGNAL_S = 2.0
"""Until a signal is reported that rank 0 did not get: whoever stops a run signals all ranks."""
NEW = Row()
"""What an agent knows of a node before its first Layout."""

log = logging.getLogger("libra_hpc.agent")


class Agent(NodeAgent):
    def __init__(
        self,
        world: World,
        config: RunConfig,
        layout: RankLayout,
        run: RunDir,
        attempt: int,
        from_step: int | None = None,
        owner: OwnerLink | None = None,
        link: MpiLink | None = None,
    ) -> None:
        """``from_step``: where the attempt is to start; None: at the newest whole state.  ``link``: of this node."""
        super().__init__(Mesh(world, self._on_message), layout.components[world.rank], Routes(), layout.listeners)
        self.layout, self.run_dir, self.attempt, self._from_step = layout, run, attempt, from_step
        self.config = in_wall_time(config)
        self._shown = shown(config)
        self.kept = kept_folder(run.path, _place(config, self.rank))
        self._world, self._endpoints, self._secret = world, world.endpoints, world.secret
        self._restarts = False
        """Whether all ranks start again: snapshots stay."""
        self.context: AgentContext | None = None
        self.coordinator: Coordinator | None = None
        self.train_leader: TrainLeader | None = None
        self.rollout_service: RolloutService | None = None
        self._owner = owner or OwnerLink()
        self.ended = self._owner.lost
        self._watch = CoordinatorWatch(self.ended.__contains__)
        self._given = start_of()
        self._fence = Fence(run.leases, self._given.nonce, self._given.generation)
        self._training: asyncio.Task[Any] | None = None
        self._early_signals: list[str] = []
        """Notices that came while rank 0 still read its checkpoint."""
        self._door: DoorRecord | None = None
        """Rank 0 only: how to join this start."""
        self._rendezvous: Path | None = None
        """Train leader only: its folder of rendezvous files."""
        self.mesh.on_rejected = self._on_rejected
        self._newest = NOTHING
        """The newest Layout."""
        self._life, self._by_mpi, self._ended_world = 0, False, -1
        """See `Heartbeat`."""
        self._link, self._link_world, self._members = link, 0, tuple(range(world.size))
        """This node's MPI process, which world it meets, and the ranks with the others."""
        self._routes.add(LayoutChange, self._on_change)
        self._routes.add(wire.MpiStart, self._on_mpi_start)
        self._routes.add(wire.MpiBarrier, self._on_barrier)
        self._routes.add(wire.StopAgent, self._on_stop)

    async def run(self) -> bool:
        """Serve until the coordinator stops the run.

        True where the run completed or restarts (rank 0), or this node was not at fault (others).
        """
        self._owner.serve()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGUSR1):
            loop.add_signal_handler(number, self._on_signal, number)
        for stray in (signal.SIGHUP, signal.SIGINT, *STRAY):
            loop.add_signal_handler(stray, lambda number: log.warning(stray_words(number)), stray)
        loop.set_exception_handler(self._on_defect)
        if self.rank == 0:
            # Before any message is read: what comes for the coordinator waits in the kernel until there is one.
            # A start that was killed leaves files that must not be met again.
            await asyncio.to_thread(shutil.rmtree, self.run_dir.rendezvous, ignore_errors=True)
            parts = [endpoint.parts for endpoint in self._endpoints]
            point, events = await asyncio.to_thread(
                newest_point,
                self.run_dir,
                self.config,
                self.attempt,
                core=self.layout.core,
                parts=parts,
                from_step=self._from_step,
                waits_for=self._waits_for,
            )
            self._enter(msgspec.structs.replace(point, pid=os.getpid()))
            assert self.context is not None
            guards = await asyncio.to_thread(read_guards, self.config, self.run_dir, self.attempt, point.step)
            self.coordinator = Coordinator(self.context, events, guards)
            self.mesh.from_lost, self.mesh.admit = self._on_lost_message, self._admit
            publisher = Publisher(self.mesh, self._secret, self.context.log, self.coordinator.log_layout)
            self.context.publisher, self.mesh.on_closed = publisher, publisher.leave_out
            self._spawn(publisher.watch())
            for name in self._early_signals:
                self.coordinator.on_signal(name)
            self._spawn(self.coordinator.run(), then=self._stop.set)
            self._spawn(self._open_door(self.coordinator.nodes))
        if self._link is not None:
            self._serve_link(self._link)
        self._spawn(self.mesh.run())
        if self.rank != 0:
            self._spawn(self._outlive_coordinator())
        await self.live()
        return self.coordinator is None or self.coordinator.state in ("completed", "restarting")

    def _waits_for(self, sentence: str) -> None:
        """Rank 0: show what the start waits for in the status that the owner left, also on a full disk."""
        log.warning("%s", sentence)
        with contextlib.suppress(OSError):
            if content := renewed_status(self.run_dir, self.attempt, state="starting", message=sentence):
                status_reserve(self.run_dir).write(content)

    # --- life

    def _enter(self, point: ResumePoint) -> None:
        self._watch.seen()
        context = AgentContext(
            rank=self.rank,
            layout=self.layout,
            config=self.config,
            run=self.run_dir,
            attempt=self.attempt,
            send=self.mesh.send,
            resume_point=point,
            private=self.private,
            shared_memory=self.shared_memory,
            changed=self.changed,
            kept=self.kept,
            fence=self._fence,
            ended=self.ended,
            secret=self._secret,
            addresses=self._endpoints[self.rank].addresses,
        )
        self.context = context
        if context.has_parts:
            self._spawn(hold(self.kept))
        else:
            # Of an earlier start, in which it was of the core.
            self._spawn(asyncio.to_thread(shutil.rmtree, self.kept, ignore_errors=True))
        self._spawn(self._keep_folders(context))
        storage = StorageWatch(self.run_dir.config, lambda why: context.log("storage_slow", rank=self.rank, reason=why))
        self._spawn(storage.run())
        if context.component == "env":
            env = EnvNode(context)
            self._routes.add(wire.ToEnvHost, lambda order: env.send(order.host, order.message))
            self.engines.append(env)
            self._spawn(env.watch())
        elif context.component != "planner":
            carrier = NodeCarrier(context, self.on_image)
            rollout, train = RolloutNode(context, carrier), TrainNode(context, carrier)
            add_engines(self._routes, rollout, train, carrier)
            self.engines += [rollout, train, carrier]
            for part in self.engines:
                self._spawn(part.watch())
            if self.rank == self.layout.train_leader:
                self._rendezvous = rendezvous_folder(context)
                self.train_leader = make_train_leader(context, self._rendezvous)
                add_train_leader(self._routes, self.train_leader)
                self._training = self._spawn(self.train_leader.run())
                self._spawn(self._watch_fence())
            if self.rank == self.layout.rollout_leader:
                self.rollout_service = RolloutService(context)
                add_rollout_service(self._routes, self.rollout_service)
                self.leaders.append(self.rollout_service)
                self._spawn(self.rollout_service.run())
            # Last: its first message goes to the train leader, which may be this node's.
            self._spawn(carrier.start())

    # --- the MPI process

    def _serve_link(self, link: MpiLink) -> None:
        def received(kind: bytes, content: bytes) -> None:
            publisher = self.context.publisher if self.context is not None else None
            if kind == b"F" and (change := opened(self._secret, content)) is not None:
                self._watch.seen()
                self._on_change(change, by_mpi=True)
            elif kind == b"A" and publisher is not None:
                publisher.on_passed_on()
            elif kind == b"M" and publisher is not None:
                publisher.linked(link)

        def ended() -> None:
            if link is self._link and not self._stop.is_set():
                log.warning("the MPI process %d has ended: Layouts come by stream", link.pid)
                self._ended_world = self._link_world
                if self.context is not None and self.context.publisher is not None:
                    self.context.publisher.on_ended()
                self._beat()

        world = self._link_world
        link.serve(received, ended, lambda put: self.mesh.send(0, wire.MpiBarrier(world, (put,), self.rank)))

    def _on_mpi_start(self, start: wire.MpiStart) -> None:
        old, self._link_world, self._members = self._link, start.world, start.members
        self._link = MpiLink(start.members.index(self.rank), len(start.members), self._secret, start.world)
        if old is not None:
            old.close()
        self._serve_link(self._link)

    def _on_barrier(self, message: wire.MpiBarrier) -> None:
        if message.rank >= 0 and self.context is not None and self.context.publisher is not None:
            self.context.publisher.on_barrier(message)
        elif self._link is not None and message.world == self._link_world:
            first = FAN_OUT * self._members.index(self.rank) + 1
            for rank in self._members[first : first + FAN_OUT]:
                self.mesh.send(rank, message)
            self._link.release(message.values)

    # --- the end

    async def leave(self) -> None:
        if self._link is not None:
            self._link.close()
        if self._door is not None and not self._fence.taken:
            with contextlib.suppress(OSError):
                await asyncio.to_thread(close_door, self.run_dir, self._door)

    async def over(self) -> None:
        if self._rendezvous is not None:
            shutil.rmtree(self._rendezvous, ignore_errors=True)
        restarts = self._restarts or (self.coordinator is not None and self.coordinator.state == "restarting")
        if not restarts or self._given.last:
            remove(self.kept)

    async def _open_door(self, nodes: NodePool) -> None:
        """Let guests join, once all ranks are there."""
        while self._door is None:
            await asyncio.sleep(LIVE_S)
            if nodes.pool is None:
                continue
            try:
                self._door = await asyncio.to_thread(open_door, self.run_dir, self.config, self.attempt, self._world)
                nodes.guests.open(self._door.next_rank)
            except (OSError, UserError) as error:
                assert self.context is not None
                self.context.log("door_closed", reason=f"how to join cannot be written: {error}")
                await asyncio.sleep(DOOR_S)

    def _admit(self, frame: bytes) -> bytes:
        """Answer an agent that wants to join."""
        try:
            wanted = door.decode(frame)
        except FrameError:
            wanted = None
        if isinstance(wanted, ConfigWanted):
            return door.encode(self._shown)
        if self.coordinator is None or not isinstance(wanted, JoinWanted):
            return door.encode(NotAdmitted("the question of this agent cannot be read"))
        rank = self.coordinator.nodes.guests.admit(wanted, time.time())
        self.coordinator.nodes.publish()
        if isinstance(rank, str):
            return door.encode(NotAdmitted(rank))
        return door.encode(Admitted(rank, tuple((one.host, one.addresses, one.port) for one in self._endpoints)))

    def noted(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.rollout_service is not None:
            found["drained"] = dict(self.rollout_service.leader.drained)
        if self.train_leader is not None:
            found["training"] = self.train_leader.report
        return found

    def _beat(self, **fields: Any) -> None:
        unreachable = self.mesh.unreachable()
        if 0 in unreachable:
            # Only rank 0 can take this node back, so it must hear that messages to it were lost.
            self.mesh.reopen(0)
        super()._beat(
            unreachable=unreachable,
            life=self._life,
            layout=self._newest.number,
            by_mpi=self._by_mpi,
            ended_world=self._ended_world,
        )

    async def _outlive_coordinator(self) -> None:
        await self._watch.gone()
        if self.train_leader is not None and self._training is not None:
            self.train_leader.on_coordinator_lost()
            if self.train_leader.unsaved:
                await asyncio.wait({self._training}, timeout=SAVE_S)
        elif self.layout.components[self.rank] in ("train", "hybrid"):
            await self._watch.stay(self.layout.train_leader)
        self._restarts = True
        self._stop.set()

    async def _watch_fence(self) -> None:
        """Leave once another owner has the run, also where rank 0 is gone."""
        while not await asyncio.to_thread(self._fence.check):
            await asyncio.sleep(CHECK_S)
        log.error("leaving: %s", self._fence.taken)
        self._stop.set()

    async def _keep_folders(self, context: AgentContext) -> None:
        """Make folders again that something removed, as logind does in /dev/shm at a logout; then their files are gone.

        One that cannot be made again raises `OSError`: the ranks restart, with other folders.
        """
        while True:
            await asyncio.sleep(FOLDERS_S)
            for folder in (self.private, self.shared_memory):
                if owned(folder):
                    continue
                reason = f"{folder} was removed while the agent of rank {self.rank} ran"
                own(folder)
                context.log("folder_lost", rank=self.rank, reason=f"{reason}: made again")
                for part in reversed(self.engines) if folder == self.shared_memory else ():
                    await part.folder_lost(reason)

    def defect(self, reason: str, error: BaseException) -> None:
        """All ranks restart.  After a fault of a file system they may as often as that is left."""
        self.mesh.send(0, wire.Fatal(self.rank, reason, restart=True, defect=not isinstance(error, OSError)))

    def _on_signal(self, number: signal.Signals) -> None:
        name = signal.Signals(number).name
        if self.coordinator is not None:
            self.coordinator.on_signal(name)
        elif self.rank == 0:
            self._early_signals.append(name)
        else:
            log.warning("%s: rank 0 alone acts on signals", name)
            asyncio.get_running_loop().call_later(SIGNAL_S, self._report_ignored, name)

    def _report_ignored(self, name: str) -> None:
        if self.context is not None and not self._stop.is_set() and name == "SIGTERM":
            reason = f"{name} is for rank 0; `libra-hpc cancel` ends the run, and SIGKILL this agent"
            self.context.log("signal_ignored", rank=self.rank, signal=name, reason=reason)

    # --- messages

    def _on_message(self, source: int, message: Any) -> None:
        if source == 0:
            self._watch.seen()
        try:
            taken = self._routes.deliver(message) and not isinstance(message, wire.Heartbeat)
            if self.coordinator is not None and not taken:
                self.coordinator.on_message(source, message)
        except Exception as error:
            self._fail(f"message {type(message).__name__} from rank {source}", error)

    def _on_rejected(self, sender: int, reason: str) -> None:
        if self.context is not None:
            self.context.log("undecodable", rank=self.rank, sender=sender, reason=reason)

    def _on_change(self, change: LayoutChange, by_mpi: bool = False) -> None:
        """Take a newer Layout; the echo comes at once where this node has something to do."""
        was, layout = self._newest, taken(self._newest, change)
        self._newest = layout
        if layout.number == change.number:
            # By both ways MPI counts.
            self._by_mpi = by_mpi or (self._by_mpi and layout is was)
        if layout.number > was.number:
            self._on_layout(layout, was)
            if layout.rows.get(self.rank) != was.rows.get(self.rank):
                self._beat()

    def _on_layout(self, layout: Layout, was: Layout) -> None:
        # What ended before is no end of what is started now.
        self._beat_if_changed()
        if self.context is None and layout.start is not None:
            self._enter(layout.start)
        context = self.context
        assert context is not None
        new = set(layout.receivers).difference(context.receivers)
        context.receivers, context.good_step = layout.receivers, layout.good_step
        if self.train_leader is not None:
            for rank in new:
                # Versions that came between its start and this Layout were not sent to it.
                self.train_leader.weights.catch_up(rank)
        for rank, row in layout.rows.items():
            self._on_row(rank, row, was.rows.get(rank, NEW))
        for rank in was.rows.keys() - layout.rows.keys():
            self._on_rank_lost(rank)
        if self.train_leader is not None:
            self.train_leader.on_layout(layout)
        if self.rank in layout.rows:
            self.reconcile(layout.rows[self.rank])

    def _on_row(self, rank: int, row: Row, known: Row) -> None:
        """Act upon what is new in the row of any node."""
        if row.guest is not None and known is NEW:
            host, addresses, port = row.guest
            self.mesh.add_guest(rank, Endpoint(host, addresses, port))
        lost = row.life > known.life
        if rank != self.rank and lost:
            self._on_rank_lost(rank)
        if rank != self.rank and row.active is not None and (lost or (known is not NEW and known.active is None)):
            self.mesh.remember(rank)
        drains = row.drain and (row.drain, row.starts) != (known.drain, known.starts)
        if drains and self.rollout_service is not None:
            self.rollout_service.leader.on_drain(rank, row.starts, row.drain == "abort")

    def _on_rank_lost(self, rank: int) -> None:
        self.mesh.drop(rank)
        if self.train_leader is not None:
            self.train_leader.on_replica_down(rank, "node lost")
            self.train_leader.weights.lost(rank)
        if self.rollout_service is not None:
            self.rollout_service.leader.on_rank_lost(rank)

    def _on_lost_message(self, rank: int, message: Any) -> None:
        if is_guest(rank):
            # It was given up while it lived; it may come again, as another one.
            self.mesh.remember(rank)
            self.mesh.send(rank, wire.StopAgent("it was given up", restart=True))
            self.mesh.drop(rank)
        elif isinstance(message, wire.Heartbeat) and self.coordinator is not None:
            nodes = self.coordinator.nodes
            if nodes.takes_back(rank):
                self.mesh.remember(rank)
                nodes.request_reset(rank)

    async def reset(self, life: int) -> None:
        log.warning("this node was declared lost: ending its engines and starting again")
        await super().reset(life)
        # It lost the others while they lost it.
        for rank in (0, *(rank for rank, row in self._newest.rows.items() if row.active is not None)):
            self.mesh.remember(rank)
        self._life, self._told = max(self._life, life), {}
        self._beat()

    def _on_stop(self, stop: wire.StopAgent) -> None:
        log.info("stop: %s", stop.reason)
        self._restarts = stop.restart
        self._stop.set()


def main() -> None:
    parser = argparse.ArgumentParser(prog="libra-hpc node agent")
    parser.add_argument("--run", required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--from-step", type=int)
    arguments = parser.parse_args()
    faulthandler.enable()
    dump_on_request()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    owner = OwnerLink()
    # It loads MPI while this process reads the configuration and meets the others.
    link = MpiLink(owner.rank, owner.size, owner.secret) if owner.size else None
    problems = [other_code(os.environ), owner.problem]
    run = RunDir(arguments.run)
    try:
        config = with_values(load_resolved(run.config), start_of().fewer.changes)
        layout = RankLayout.of(config)
        problems.append(raise_limits(len(layout.components)))
    except (UserError, OperationError) as error:
        problems.append(str(error))
    problem = next(filter(None, problems), "")
    try:
        world = meet(
            owner,
            "" if problem else config.slurm.interface,
            problem,
            lambda rank: () if problem else whole_parts(kept_folder(run.path, _place(config, rank))),
            guests=not problem and bool(config.borrow.spot.nodes or config.borrow.lenders),
            again=start_of().met,
        )
    except NoWorld as error:
        _refuse(run, arguments.attempt, error.rank, error, "unmet")
    if config.components.one_node and config.slurm.device == "cuda":
        gpus = getattr(config.components, layout.components[world.rank]).gpus
        os.environ[VARIABLE] = own_devices(os.environ, first_gpu(config, world.rank), gpus)
    if world.rank == 0:
        owner.met()
    agent = Agent(
        world, config, layout, run, attempt=arguments.attempt, from_step=arguments.from_step, owner=owner, link=link
    )
    try:
        good = asyncio.run(agent.run())
    except OperationError as error:
        _refuse(run, arguments.attempt, world.rank, error, "fatal")
    leave(0 if good else 1)


def _place(config: RunConfig, rank: int) -> str:
    """What an agent's kept folder is named after: its node, as the rank of a node changes when another is lost."""
    alone = config.slurm.executor == "slurm" and not config.components.one_node and rank != 0
    return os.environ.get("SLURMD_NODENAME", "") if alone else str(rank)


def _refuse(run: RunDir, attempt: int, rank: int, error: OperationError, why: Why) -> NoReturn:
    """End before there is a coordinator; rank 0 leaves why, also on a full disk."""
    log.error("%s", error)
    if rank == 0:
        try:
            Reserve(run.ended(attempt), RESULT_BYTES).write(msgspec.json.encode(RanksStop(why, str(error), 0)))
        except OSError as fault:
            # The owner finds the sentence in this agent's log.
            log.warning("%s", cannot(fault, "written"))
    leave(error.exit_code)


if __name__ == "__main__":
    main()
