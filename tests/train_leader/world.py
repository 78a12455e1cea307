"""A train leader between nodes that only count, and the place where its checkpoints go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from libra_hpc.config.load import validate
from libra_hpc.facts.columns import TRAINING
from libra_hpc.protocol import agents
from libra_hpc.protocol import trainer as wire
from libra_hpc.protocol.agents import Batch, Committed, Fatal, Group, ToReplica, TrainReport
from libra_hpc.protocol.carriers import Peer, Publish
from libra_hpc.protocol.codec import pack_f32, pack_i32
from libra_hpc.protocol.trainer import Join, Sample, SaveState
from libra_hpc.state.state_folders import DataOrder, DataPosition, Manifest
from libra_hpc.train_leader.train_leader import TrainLeader
from tests.protocol.step_reports import batch_stats
from tests.stage.node_parts import Outbox
from tests.stage.waiting import until


def sample(uid: str, tokens: int = 4, advantage: float = 1.0) -> Sample:
    return Sample(uid, pack_i32(range(tokens)), b"\0" + b"\1" * (tokens - 1), pack_f32([0.0] * tokens), advantage)


def batch(step: int) -> Batch:
    groups = (Group(i, (sample(f"{i}.0"), sample(f"{i}.1", 6))) for i in (2 * step - 2, 2 * step - 1))
    return Batch(step, tuple(groups), batch_stats(reward=0.5))


class Replica:
    """A node whose state is the list of its steps; by default it answers at once."""

    def __init__(self, world: World, rank: int, step: int = 0) -> None:
        self.world, self.rank, self.history = world, rank, [f"step{s}" for s in range(1, step + 1)]
        self.silent = False
        self.instead: Callable[[Any], Any] | None = None
        """What is answered to any order, if anything."""
        self.skipped = 0
        self.answers_portions = True
        self.full = False
        self.slow = False
        """Whether a checkpoint is answered only by `saved`."""
        self.bad_offers = 0

    def take(self, message: Any) -> None:
        if self.instead is not None and not self.silent:
            self.world.reply(self.rank, self.instead(message))
        if self.instead is not None or self.silent:
            return
        match message:
            case Join(generation=generation, size=size, rendezvous=rendezvous, attempt=attempt):
                members = self.world.joining.setdefault(rendezvous, [])
                members.append(self)
                if len(members) == len(self.world.core) + (size - 1) * self.world.nodes_per_replica:
                    truth = next(member for member in members if member.rank == self.world.core[0])
                    for member in members:
                        member.history = list(truth.history)
                        self.world.reply(member.rank, wire.Joined(generation, len(member.history), 0, 0.0, attempt))
            case wire.TrainStep(step=step, generation=generation, minibatches=minibatches, divisors=totals):
                assert step == len(self.history) + 1
                self.history.append(f"step{step}")
                self.world.trained.append((self.rank, step, sorted(s.uid for m in minibatches for s in m), totals))
                # There is no reference policy.
                numbers = {one.name: 0.0 for one in TRAINING if one.name != "reference_kl"}
                numbers |= {"skipped": self.skipped, "trained_tokens": 8, "train_s": 0.1}
                self.world.reply(self.rank, wire.StepDone(step, generation, numbers))
            case wire.TrainPortion(step=step, generation=generation, portion=portion, samples=samples):
                self.world.ahead.append((self.rank, portion, sorted(s.uid for s in samples)))
                if self.answers_portions:
                    self.world.reply(self.rank, wire.PortionDone(step, generation, portion))
            case wire.OfferWeights(version=version, base=base):
                self.bad_offers -= 1
                if self.bad_offers >= 0:
                    self.world.reply(self.rank, wire.OfferFailed(version, "no room"))
                else:
                    done = wire.Offered(version, base, f"t{self.rank}.0", 100, 50, 50, 0.0)
                    self.world.reply(self.rank, agents.WeightsOffered((done,)))
            case SaveState(folder=folder, step=step, tier="snapshot"):
                self.world.reply(self.rank, wire.Saved(folder, step, 0.0, tier="snapshot"))
            case SaveState(folder=folder, step=step):
                self.world.tried.append(step)
                self.saving = SaveState(folder, step)
                if not self.slow:
                    self.saved()

    def saved(self) -> None:
        """The answer to the last request for a checkpoint."""
        folder, step = self.saving.folder, self.saving.step
        failed = wire.SaveFailed(folder, step, "no room")
        self.world.reply(self.rank, failed if self.full else wire.Saved(folder, step, 0.0, {str(self.rank): (1, 2)}))


class Snapshots:
    """The list of complete ones: step and position."""

    tier: wire.Tier = "snapshot"

    def __init__(self) -> None:
        self.listed: list[tuple[int, int]] = []
        self.dropped: list[str] = []
        self.full = False

    def folder(self, step: int, number: int) -> str:
        return f"step-{step}.{number}"

    async def complete(self, folder: str, manifest: Manifest, position: DataPosition) -> None:
        if self.full:
            raise OSError("no room")
        self.listed.append((position.step, position.low))

    async def discard(self, folder: str) -> None:
        self.dropped.append(folder)


class World(Outbox):
    """Also where checkpoints go."""

    tier: wire.Tier = "checkpoint"

    def __init__(
        self,
        *,
        steps: int = 9,
        step: int = 0,
        checkpoint_every: int = 0,
        storage_s: float = 900.0,
        core: tuple[int, ...] = (1,),
        nodes_per_replica: int = 1,
        from_checkpoint: bool = False,
        **algorithm: Any,
    ) -> None:
        super().__init__()
        self.core, self.nodes_per_replica = core, nodes_per_replica
        self.replicas: dict[int, Replica] = {}
        self.joining: dict[str, list[Replica]] = {}
        self.trained: list[tuple[int, int, list[str], tuple[int, ...]]] = []
        self.ahead: list[tuple[int, int, list[str]]] = []
        """Portions: node, number, samples."""
        self.no_position = False
        self.hangs = False
        self.carried: list[list[tuple[int, float | None]]] = []
        self.manifests: list[Manifest] = []
        self.discarded: list[str] = []
        self.snapshots = Snapshots()
        self.tried: list[int] = []
        self.now = 0.0
        self.saved: list[tuple[int, int, list[int]]] = []
        config = validate(
            {
                "run": {"steps": steps},
                "components": {"train": {"nodes": len(core)}, "hybrid": {"nodes_per_replica": nodes_per_replica}},
                "train": {"snapshot_every": 1, "pp": nodes_per_replica, "processes": 1, "micro_tokens": 64},
                "algorithm": algorithm,
                "checkpoint": {"every": checkpoint_every},
                "deadlines": {"storage_s": storage_s},
            }
        )

        stores = (self, self.snapshots)
        given = (config, core, step, DataOrder(2 * step), self.send, 3, lambda: (3,), stores, lambda: self.now)
        begins = "checkpoint" if from_checkpoint else None
        self.leader = TrainLeader(*given, rendezvous=Path("/rendezvous"), begins=begins)
        self.leader.changed = self.changed
        for rank in (*core, 3):
            self.leader.weights.on_here(agents.WeightsHere(rank, carrier=Peer(rank, ("127.0.0.1",), 7000 + rank)))

    def folder(self, step: int, number: int) -> str:
        return f"step-{step:06d}.{number}.partial"

    async def complete(self, folder: str, manifest: Manifest, position: DataPosition) -> None:
        self.carried.append([(record.step, record.metrics["reward"]) for record in position.reports])
        if self.hangs:
            await asyncio.sleep(60.0)
        if self.no_position:
            raise OSError("no room for the position")
        self.manifests.append(manifest)
        self.saved.append((position.step, position.low, list(position.extra)))

    async def discard(self, folder: str) -> None:
        self.discarded.append(folder)

    def send(self, rank: int, message: Any) -> None:
        super().send(rank, message)
        if isinstance(message, ToReplica) and rank in self.replicas:
            self.replicas[rank].take(message.message)

    def changed(self) -> None:
        self.sent.append((0, self.leader.report))

    def reply(self, rank: int, message: Any) -> None:
        asyncio.get_running_loop().call_soon(self.leader.on_reply, rank, message)

    @property
    def done(self) -> list[TrainReport]:
        return [report for report in self.of(TrainReport) if report.done is not None]

    @property
    def core_wanted(self) -> list[TrainReport]:
        return [report for report in self.of(TrainReport) if report.core_wanted]

    def asked(self, kind: type) -> list[tuple[int, Any]]:
        """Orders of a kind, with the rank that got each."""
        found = [(rank, m.message) for rank, m in self.sent if isinstance(m, ToReplica)]
        return [(rank, order) for rank, order in found if isinstance(order, kind)]

    def add(self, rank: int, step: int = 0) -> Replica:
        self.replicas[rank] = Replica(self, rank, step)
        return self.replicas[rank]

    def start(self, *ranks: int) -> World:
        """The leader runs, and generation 1 of these ranks is ordered. A rank is added unless it is there."""
        for rank in ranks:
            if rank not in self.replicas:
                self.add(rank)
        self.running = asyncio.create_task(self.leader.run())
        self.leader.on_generation(1, ranks)
        return self

    async def step(self, *numbers: int) -> None:
        """Each is committed before the next batch comes."""
        for number in numbers:
            self.leader.on_batch(batch(number))
            await until(lambda number=number: len(self.of(Committed)) == number)

    async def joined(self, count: int) -> None:
        """So many members have joined, in all generations."""
        await until(lambda: sum(map(len, {report.joined for report in self.of(TrainReport)})) == count)

    async def finish(self) -> None:
        await until(lambda: self.done)

    async def fatal(self) -> Fatal:
        await until(lambda: self.of(Fatal))
        return self.of(Fatal)[0]

    def published(self, rank: int = 3) -> list[tuple[int, int]]:
        """(version, base) of what was published to a node."""
        return [(m.version, m.base) for to, m in self.sent if to == rank and isinstance(m, Publish)]

    def joins(self) -> list[Join]:
        return [order for _, order in self.asked(Join)]
