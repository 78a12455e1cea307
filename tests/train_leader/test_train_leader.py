"""The train leader against nodes that only count: membership, commits, deaths, replay, stop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from libra_hpc.config.run import RunConfig
from libra_hpc.protocol.codec import pack_f32, pack_i32
from libra_hpc.protocol.mesh import (
    Batch,
    Committed,
    Fatal,
    Group,
    Log,
    MemberJoined,
    Publish,
    SnapshotStored,
    StepReport,
    ToReplica,
    TrainingFinished,
)
from libra_hpc.protocol.trainer import (
    Alive,
    Export,
    Exported,
    ExportFailed,
    Join,
    Joined,
    Sample,
    SaveCheckpoint,
    Saved,
    SaveFailed,
    StepDone,
    StepFailed,
    TakeSnapshot,
    TrainStep,
    WorkerError,
)
from libra_hpc.state.state_folders import DataPosition, Manifest
from libra_hpc.train_leader import members, saves
from libra_hpc.train_leader import train_leader as leader
from libra_hpc.train_leader.train_leader import DataOrder, TrainLeader
from tests.protocol.step_reports import batch_stats


def sample(uid: str, tokens: int = 4, advantage: float = 1.0) -> Sample:
    return Sample(uid, pack_i32(range(tokens)), b"\0" + b"\1" * (tokens - 1), pack_f32([0.0] * tokens), advantage)


def batch(step: int) -> Batch:
    return Batch(
        step,
        tuple(Group(i, (sample(f"{i}.0"), sample(f"{i}.1", 6))) for i in (2 * step - 2, 2 * step - 1)),
        batch_stats(reward=0.5),
    )


class Replica:
    """A node whose state is the list of its steps; by default it answers at once."""

    def __init__(self, world: World, rank: int, step: int = 0) -> None:
        self.world, self.rank, self.history = world, rank, [f"step{s}" for s in range(1, step + 1)]
        self.silent = False
        self.skipped = 0
        self.full = False
        self.slow = False
        """Whether a checkpoint is answered only by `saved`."""
        self.bad_exports = 0

    def take(self, message: Any) -> None:
        if self.silent:
            return
        match message:
            case Join(generation=generation, size=size, rendezvous=rendezvous, attempt=attempt):
                members = self.world.joining.setdefault(rendezvous, [])
                members.append(self)
                if len(members) == len(self.world.core) + (size - 1) * self.world.nodes_per_replica:
                    truth = next(member for member in members if member.rank == self.world.core[0])
                    for member in members:
                        member.history = list(truth.history)
                        self.world.reply(member.rank, Joined(generation, len(member.history), 0, 0.0, attempt))
            case TrainStep(step=step, generation=generation, minibatches=minibatches, total_tokens=totals):
                assert step == len(self.history) + 1
                self.history.append(f"step{step}")
                self.world.trained.append((self.rank, step, sorted(s.uid for m in minibatches for s in m), totals))
                self.world.reply(
                    self.rank,
                    StepDone(step, generation, 0.1, 1.0, 1.0, 0.0, 0.0, 0.5, 8, 4, 0.1, 0.0, 0.0, self.skipped),
                )
            case Export(version=version):
                self.bad_exports -= 1
                self.world.reply(
                    self.rank,
                    ExportFailed(version, "no room") if self.bad_exports >= 0 else Exported(version, 77, 100, 0.0),
                )
            case TakeSnapshot(step=step):
                if self.rank in self.world.core:
                    stored = SnapshotStored(self.rank, self.rank, step)
                    asyncio.get_running_loop().call_soon(self.world.leader.on_snapshot_stored, stored)
            case SaveCheckpoint(folder=folder, step=step):
                self.world.tried.append(step)
                self.saving = SaveCheckpoint(folder, step)
                if not self.slow:
                    self.saved()

    def saved(self) -> None:
        """The answer to the last request for a checkpoint."""
        folder, step = self.saving.folder, self.saving.step
        answer = (
            SaveFailed(folder, step, "no room") if self.full else Saved(folder, step, 0.0, {str(self.rank): (1, 2)})
        )
        self.world.reply(self.rank, answer)


class Index:
    """The list of complete snapshots: step and position."""

    def __init__(self) -> None:
        self.listed: list[tuple[int, int]] = []

    async def add(self, position: DataPosition) -> None:
        self.listed.append((position.step, position.low))


class World:
    """Also where checkpoints go: `complete` and `discard`."""

    def __init__(
        self,
        steps: int = 3,
        step: int = 0,
        checkpoint_every: int = 0,
        storage_s: float = 900.0,
        core: tuple[int, ...] = (1,),
        nodes_per_replica: int = 1,
        from_checkpoint: bool = False,
    ) -> None:
        self.core, self.nodes_per_replica = core, nodes_per_replica
        self.replicas: dict[int, Replica] = {}
        self.joining: dict[str, list[Replica]] = {}
        self.trained: list[tuple[int, int, list[str], tuple[int, ...]]] = []
        self.no_position = False
        self.hangs = False
        self.carried: list[list[tuple[int, float | None]]] = []
        self.manifests: list[Manifest] = []
        self.discarded: list[str] = []
        self.index = Index()
        self.tried: list[int] = []
        self.now = 0.0
        self.sent: list[tuple[int, Any]] = []
        self.saved: list[tuple[int, int, list[int]]] = []
        config = RunConfig.model_validate(
            {
                "run": {"steps": steps},
                "components": {"train": {"nodes": len(core)}, "hybrid": {"nodes_per_replica": nodes_per_replica}},
                "train": {"snapshot_every": 1, "pp": nodes_per_replica, "processes": 1},
                "checkpoint": {"every": checkpoint_every},
                "deadlines": {"storage_s": storage_s},
            }
        )

        self.leader = TrainLeader(
            config,
            core,
            step,
            DataOrder(2 * step),
            self.send,
            3,
            lambda: (3,),
            self,
            lambda: self.now,
            rendezvous=Path("/rendezvous"),
            checkpoints=Path("/checkpoints"),
            from_checkpoint=from_checkpoint,
            index=self.index,
        )

    async def complete(self, folder: Path, manifest: Manifest, position: DataPosition) -> None:
        self.carried.append([(record.step, record.metrics["reward"]) for record in position.reports])
        if self.hangs:
            await asyncio.sleep(60.0)
        if self.no_position:
            raise OSError("no room for the position")
        self.manifests.append(manifest)
        self.saved.append((position.step, position.low, list(position.extra)))

    async def discard(self, folder: Path) -> None:
        self.discarded.append(folder.name)

    def send(self, rank: int, message: Any) -> None:
        self.sent.append((rank, message))
        if isinstance(message, ToReplica) and rank in self.replicas:
            self.replicas[rank].take(message.message)

    def reply(self, rank: int, message: Any) -> None:
        asyncio.get_running_loop().call_soon(self.leader.on_reply, rank, message)

    def of(self, kind: type) -> list[Any]:
        return [message for _, message in self.sent if isinstance(message, kind)]

    def asked(self, kind: type) -> list[tuple[int, Any]]:
        """Orders of a kind, with the rank that got each."""
        found = [(rank, m.message) for rank, m in self.sent if isinstance(m, ToReplica)]
        return [(rank, order) for rank, order in found if isinstance(order, kind)]

    def add(self, rank: int, step: int = 0) -> Replica:
        self.replicas[rank] = Replica(self, rank, step)
        return self.replicas[rank]


async def until(condition: Callable[[], object]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("never happened")


async def pair_with_a_silent_second(world: World) -> None:
    """Replicas 1 and 2 are members of generation 1; 2 never answers again."""
    for rank in (1, 2):
        world.add(rank)
    world.leader.on_generation(1, (1, 2))
    await until(lambda: len(world.of(MemberJoined)) == 2)
    world.replicas[2].silent = True


def play(world: World, script: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        task = asyncio.create_task(world.leader.run())
        await script()
        task.cancel()

    asyncio.run(main())


def test_trains_every_batch_once_and_finishes_with_a_checkpoint() -> None:
    world = World(steps=3, checkpoint_every=2)
    world.add(1)

    async def script() -> None:
        world.leader.on_generation(1, (1,))
        for step in (1, 2, 3):
            world.leader.on_batch(batch(step))
            world.leader.on_batch(batch(step))
        await until(lambda: world.of(TrainingFinished))

    play(world, script)
    assert [(rank, step) for rank, step, _, _ in world.trained] == [(1, 1), (1, 2), (1, 3)]
    assert [c.indices for c in world.of(Committed)] == [(0, 1), (2, 3), (4, 5)]
    assert [p.version for p in world.of(Publish)] == [0, 1, 2, 3]
    assert world.saved == [(2, 4, []), (3, 6, [])]
    assert [r.metrics["reward"] for r in world.of(StepReport)] == [0.5, 0.5, 0.5]


def test_a_newcomer_joins_at_a_step_boundary_and_shares_the_next_batch() -> None:
    world = World(steps=3)
    world.add(1)

    async def script() -> None:
        world.leader.on_generation(1, (1,))
        world.leader.on_batch(batch(1))
        await until(lambda: len(world.trained) == 1)
        world.add(2)
        world.leader.on_generation(2, (1, 2))
        await until(lambda: len(world.of(MemberJoined)) == 3)
        world.leader.on_batch(batch(2))
        await until(lambda: len(world.trained) == 3)

    play(world, script)
    second = [entry for entry in world.trained if entry[1] == 2]
    assert {rank for rank, *_ in second} == {1, 2}
    assert sorted(uid for _, _, uids, _ in second for uid in uids) == ["2.0", "2.1", "3.0", "3.1"]
    assert {totals for *_, totals in second} == {(16,)}, "both divide by the tokens of the whole batch"
    assert world.replicas[2].history == ["step1", "step2"]


def test_hybrid_nodes_that_are_one_replica_are_one_member() -> None:
    world = World(steps=1, nodes_per_replica=2)

    async def script() -> None:
        for rank in range(1, 6):
            world.add(rank)
        world.leader.on_generation(1, (1, 2, 3, 4, 5))
        world.leader.on_batch(batch(1))
        await until(lambda: world.of(TrainingFinished))

    play(world, script)
    joins = [(rank, join.rank, join.size) for rank, join in world.asked(Join)]
    assert joins == [(1, 0, 3), (2, 1, 3), (3, 1, 3), (4, 2, 3), (5, 2, 3)]
    uids = {rank: found for rank, _, found, _ in world.trained}
    assert uids[2] == uids[3]
    assert uids[4] == uids[5]
    assert sorted(uids[1] + uids[2] + uids[4]) == ["0.0", "0.1", "1.0", "1.1"]
    (report,) = world.of(StepReport)
    assert (report.metrics["train_nodes"], report.metrics["replicas"]) == (5, 3)


def test_all_nodes_of_the_core_are_one_member_and_get_the_same_samples() -> None:
    world = World(steps=2, core=(1, 2))

    async def script() -> None:
        for rank in (1, 2, 3):
            world.add(rank)
        world.leader.on_generation(1, (1, 2, 3))
        world.leader.on_batch(batch(1))
        await until(lambda: world.of(Committed))
        world.leader.on_generation(2, (1, 3))
        world.leader.on_batch(batch(2))
        await asyncio.sleep(0.02)
        assert len(world.of(Committed)) == 2, "a part of the core forms no generation"
        world.leader.on_generation(3, (1, 2))
        await until(lambda: world.of(TrainingFinished))

    play(world, script)
    joins = [(rank, join.generation, join.rank, join.size) for rank, join in world.asked(Join)]
    assert joins[:3] == [(1, 1, 0, 2), (2, 1, 0, 2), (3, 1, 1, 2)]
    uids = {rank: found for rank, step, found, _ in world.trained if step == 1}
    assert uids[1] == uids[2]
    assert uids[1] == ["0.1", "1.1"], "the shares of two of three data-parallel ranks"
    assert sorted(uids[1] + uids[3]) == ["0.0", "0.1", "1.0", "1.1"]
    (first, second) = world.of(StepReport)
    assert first.metrics["replicas"] == 3
    assert first.metrics["trained_tokens"] == 2 * 8, "the core answers once"
    assert [rank for rank, order in world.asked(Export) if order.version == 1] == [1, 2]
    assert [rank for rank, _ in world.asked(SaveCheckpoint)] == [1, 2]
    assert len(world.saved) == 1
    assert world.manifests == [{"1": (1, 2), "2": (1, 2)}], "the files of all nodes"
    assert second.step == 2


def test_a_death_in_a_step_redoes_that_step_with_the_survivor() -> None:
    world = World(steps=2)

    async def script() -> None:
        await pair_with_a_silent_second(world)
        world.replicas[1].take = lambda message: world.reply(1, StepFailed(1, 1, "peer closed"))  # type: ignore[method-assign]
        world.leader.on_batch(batch(1))
        await asyncio.sleep(0.02)
        del world.replicas[1].take
        world.leader.on_replica_down(2, "killed")
        world.leader.on_generation(2, (1,))
        await until(lambda: world.of(Committed))

    play(world, script)
    assert [(rank, step, uids) for rank, step, uids, _ in world.trained] == [(1, 1, ["0.0", "0.1", "1.0", "1.1"])]


def test_a_step_that_the_core_committed_is_not_trained_again() -> None:
    world = World(steps=2)

    async def script() -> None:
        await pair_with_a_silent_second(world)
        world.leader.on_batch(batch(1))
        await until(lambda: len(world.trained) == 1)
        world.leader.on_replica_down(2, "killed after the all-reduce")
        world.leader.on_generation(2, (1,))
        await until(lambda: [p for p in world.of(Publish) if p.version == 1])

    play(world, script)
    assert len(world.trained) == 1
    assert [c.step for c in world.of(Committed)] == [1]
    assert world.replicas[1].history == ["step1"]


def test_a_rebuilt_core_that_is_behind_replays_the_retained_batches() -> None:
    world = World(steps=4)
    world.add(1)

    async def script() -> None:
        world.leader.on_generation(1, (1,))
        for step in (1, 2):
            world.leader.on_batch(batch(step))
        await until(lambda: len(world.of(Publish)) == 3)
        world.leader.on_replica_down(1, "killed while idle")
        world.add(1, step=1)
        world.leader.on_generation(2, (1,))
        world.leader.on_batch(batch(3))
        await until(lambda: len(world.of(Committed)) == 3)

    play(world, script)
    assert [(step, uids) for _, step, uids, _ in world.trained if step == 2] == [(2, ["2.0", "2.1", "3.0", "3.1"])] * 2
    assert [c.step for c in world.of(Committed)] == [1, 2, 3], "a replay commits nothing twice"


def test_a_state_too_old_to_replay_ends_the_run_with_a_reason() -> None:
    world = World(steps=9, step=5)
    world.add(1, step=2)

    async def script() -> None:
        world.leader.on_generation(1, (1,))
        await until(lambda: world.of(Fatal))

    play(world, script)
    assert "step 2" in world.of(Fatal)[0].reason
    assert "step 5" in world.of(Fatal)[0].reason
    assert world.of(Fatal)[0].restart, "the attempt started from a checkpoint, from which it can go on"


def test_stop_saves_at_the_next_boundary() -> None:
    world = World(steps=100)
    world.add(1)

    async def script() -> None:
        world.leader.on_generation(1, (1,))
        world.leader.on_batch(batch(1))
        await until(lambda: world.of(Committed))
        world.leader.on_stop("SIGTERM")
        await until(lambda: world.of(TrainingFinished))

    play(world, script)
    assert world.saved == [(1, 2, [])]


def test_a_stop_after_a_step_waits_for_its_batch() -> None:
    world = World(steps=100)
    world.add(1)

    async def script() -> None:
        world.leader.on_generation(1, (1,))
        world.leader.on_batch(batch(1))
        await until(lambda: world.of(Committed))
        world.leader.on_stop("time limit", after=2)
        await asyncio.sleep(0.01)
        assert not world.of(TrainingFinished)
        for step in (2, 3):
            world.leader.on_batch(batch(step))
        await until(lambda: world.of(TrainingFinished))

    play(world, script)
    assert [step for step, *_ in world.saved] == [2]


def test_members_that_failed_without_a_death_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "RETRY_S", 0.02)
    world = World(steps=1)
    replica = world.add(1)
    replica.take = lambda message: world.reply(
        1, WorkerError("a connection broke", False, message.generation, message.attempt)
    )  # type: ignore[method-assign]

    async def script() -> None:
        world.leader.on_generation(1, (1,))
        await until(lambda: world.of(ToReplica))
        await asyncio.sleep(0)
        del replica.take
        world.leader.on_batch(batch(1))
        await until(lambda: world.of(TrainingFinished))

    play(world, script)
    joins = [message.message for message in world.of(ToReplica) if isinstance(message.message, Join)]
    assert [join.generation for join in joins] == [1, 1]
    assert joins[0].rendezvous != joins[1].rendezvous, "a meeting point serves once"


def test_a_failure_that_stays_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "RETRY_S", 0.01)
    world = World(steps=1)
    replica = world.add(1)

    def take(message: Any) -> None:
        if isinstance(message, TrainStep):
            world.reply(1, StepFailed(1, 1, "a sample has no tokens"))
        else:
            Replica.take(replica, message)

    replica.take = take  # type: ignore[method-assign]

    async def script() -> None:
        world.leader.on_generation(1, (1,))
        world.leader.on_batch(batch(1))
        await until(lambda: len([m for m in world.of(ToReplica) if isinstance(m.message, Join)]) == 3)
        assert not world.of(Fatal)
        world.now = members.NEW_GENERATION_S
        await until(lambda: world.of(Fatal))

    play(world, script)
    assert world.of(Fatal)[0].reason == "training failed and no node died: replica 1: a sample has no tokens"


def test_a_generation_that_forms_gives_way_to_a_newer_order_at_once() -> None:
    world = World(steps=1)
    world.add(1)
    world.add(2).silent = True

    async def script() -> None:
        world.leader.on_generation(1, (1, 2))
        await until(lambda: len(world.of(ToReplica)) == 2)
        world.leader.on_generation(2, (1,))
        await until(lambda: len(world.of(ToReplica)) >= 3)
        # The answer to the order that was given up is not one to the newer order.
        world.reply(1, WorkerError("generation 1 did not form", False, 1))
        world.leader.on_batch(batch(1))
        await until(lambda: world.of(TrainingFinished))

    play(world, script)
    joins = [message.message for message in world.of(ToReplica) if isinstance(message.message, Join)]
    assert [join.generation for join in joins] == [1, 1, 2]


def test_a_checkpoint_that_fails_is_tried_again_at_a_later_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(steps=9, checkpoint_every=2)
    replica = world.add(1)

    async def step(number: int) -> None:
        world.leader.on_batch(batch(number))
        await until(lambda: len(world.of(Committed)) == number)
        await asyncio.sleep(0.005)

    async def script() -> None:
        world.leader.on_generation(1, (1,))
        replica.full = True
        await step(1)
        await step(2)
        world.now = 9.0
        await step(3)
        assert world.tried == [2], "after a pause"
        world.now = 10.0
        await step(4)
        assert world.tried == [2, 4]
        replica.full, world.no_position = False, True
        world.now = 30.0
        await step(5)
        assert world.tried == [2, 4, 5]
        world.no_position, world.now = False, 70.0
        await step(6)
        await step(7)

    play(world, script)
    assert world.tried == [2, 4, 5, 6]
    assert [step for step, *_ in world.saved] == [6]
    events = [(log.fields["step"], log.fields["reason"]) for log in world.of(Log) if log.kind == "checkpoint_failed"]
    assert events == [(2, "no room"), (4, "no room"), (5, "no room for the position")]
    assert not world.of(Fatal)


def test_a_checkpoint_carries_the_reports_that_are_not_recorded_yet() -> None:
    world = World(steps=4, checkpoint_every=2)
    world.add(1)

    async def script() -> None:
        world.leader.on_generation(1, (1,))
        for step in (1, 2, 3, 4):
            world.leader.on_batch(batch(step))
            await until(lambda step=step: len(world.of(Committed)) == step and len(world.carried) == step // 2)
            world.leader.on_recorded(1)

    play(world, script)
    assert world.carried == [[(2, 0.5)], [(2, 0.5), (3, 0.5), (4, 0.5)]]
    assert all(report.t > 1e9 for report in world.of(StepReport))


@pytest.mark.parametrize("freed", [True, False])
def test_a_stopped_run_tries_its_last_checkpoint_four_times(monkeypatch: pytest.MonkeyPatch, freed: bool) -> None:
    monkeypatch.setattr(leader, "LAST_PAUSE_S", 0.001)
    world = World(steps=9, storage_s=1e9)
    world.add(1).full = True

    async def script() -> None:
        world.leader.on_generation(1, (1,))
        world.leader.on_batch(batch(1))
        await until(lambda: world.of(Committed))
        world.leader.on_stop("SIGTERM")
        await until(lambda: len(world.tried) >= 2)
        world.replicas[1].full = not freed
        await until(lambda: world.of(TrainingFinished) or world.of(Fatal))

    play(world, script)
    if freed:
        assert [step for step, *_ in world.saved] == [1]
    else:
        assert world.tried == [1] * 4
        assert [fatal.reason for fatal in world.of(Fatal)] == ["the last step could not be saved: no room"]


@pytest.mark.parametrize("freed", [True, False])
def test_a_run_at_its_end_waits_for_room_as_long_as_the_run_directory_may_lack_it(
    monkeypatch: pytest.MonkeyPatch, freed: bool
) -> None:
    monkeypatch.setattr(saves, "SAVE_LONGEST_S", 0.001)
    world = World(steps=1, storage_s=900.0)
    world.add(1).full = True

    async def script() -> None:
        world.leader.on_generation(1, (1,))
        world.leader.on_batch(batch(1))
        await until(lambda: len(world.tried) >= 10)
        world.now = 899.0
        tried = len(world.tried)
        await until(lambda: len(world.tried) > tried + 1)
        assert not world.of(Fatal)
        world.replicas[1].full, world.now = not freed, 900.0
        await until(lambda: world.of(TrainingFinished) or world.of(Fatal))

    play(world, script)
    assert [step for step, *_ in world.saved] == [1] * freed
    assert [fatal.reason for fatal in world.of(Fatal)] == ["the last step could not be saved: no room"] * (not freed)


def test_an_export_is_asked_for_at_a_step_boundary_never_while_a_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader.Exports, "FIRST_S", 0.01)
    world = World(steps=9)
    replica = world.add(1)
    replica.bad_exports = 1

    def orders() -> list[str]:
        return [type(message.message).__name__ for message in world.of(ToReplica)]

    async def script() -> None:
        world.leader.on_generation(1, (1,))
        await until(lambda: [log for log in world.of(Log) if log.kind == "export_failed"])
        replica.take = lambda message: None  # type: ignore[method-assign]
        world.leader.on_batch(batch(1))
        await until(lambda: "TrainStep" in orders())
        world.now = 1.0
        await asyncio.sleep(0.05)
        assert orders() == ["Join", "Export", "TrainStep"]
        del replica.take
        replica.take(world.of(ToReplica)[-1].message)
        await until(lambda: [p for p in world.of(Publish) if p.version == 1])

    play(world, script)
    assert [p.version for p in world.of(Publish)] == [1]


def test_an_answer_to_an_earlier_attempt_does_not_fail_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "RETRY_S", 0.01)
    world = World(steps=1)
    for rank in (1, 2):
        world.add(rank)
    world.replicas[1].silent = True
    world.replicas[2].take = lambda message: world.reply(2, WorkerError("1 did not appear", False, 1, message.attempt))  # type: ignore[method-assign]

    def joins() -> list[Join]:
        return [m.message for m in world.of(ToReplica) if isinstance(m.message, Join)]

    async def script() -> None:
        world.leader.on_generation(1, (1, 2))
        await until(lambda: len(joins()) == 2)
        world.replicas[2].silent = True
        del world.replicas[2].take
        await until(lambda: len(joins()) == 4)
        world.leader.on_reply(1, WorkerError("a newer order came", False, 1, joins()[0].attempt))
        world.leader.on_reply(1, StepFailed(1, 1, "of a step that was given up"))
        for rank in (1, 2):
            world.replicas[rank].silent = False
            world.replicas[rank].take([join for join in joins() if join.rank == rank - 1][1])
        await until(lambda: len(world.of(MemberJoined)) == 2)

    play(world, script)
    assert len(joins()) == 4, "two attempts of two members"


def test_time_in_which_a_member_writes_its_state_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "RETRY_S", 0.01)
    world = World(steps=1)
    replica = world.add(1)
    attempts: list[int] = []

    def take(message: Any) -> None:
        attempts.append(message.attempt)
        world.reply(1, WorkerError("2 did not appear", False, 1, message.attempt))

    replica.take = take  # type: ignore[method-assign]
    world.add(2).silent = True

    async def script() -> None:
        world.leader.on_generation(1, (1, 2))
        for _ in range(8):
            world.now += members.NEW_GENERATION_S / 2
            world.leader.on_reply(2, Alive("snapshot", 30.0))
            tried = len(attempts)
            await until(lambda tried=tried: len(attempts) > tried + 1)
        assert not world.of(Fatal)
        world.now += members.NEW_GENERATION_S
        await until(lambda: world.of(Fatal))

    play(world, script)
    assert "2 did not appear" in world.of(Fatal)[0].reason


def test_a_file_system_that_never_answers_fails_the_checkpoint_and_training_goes_on() -> None:
    world = World(steps=9, checkpoint_every=1, storage_s=0.01)
    world.add(1)
    world.hangs = True

    async def script() -> None:
        world.leader.on_generation(1, (1,))
        for step in (1, 2):
            world.leader.on_batch(batch(step))
        await until(lambda: len(world.of(Committed)) == 2)
        await until(lambda: [log for log in world.of(Log) if log.kind == "checkpoint_failed"])

    play(world, script)
    (failed,) = [log for log in world.of(Log) if log.kind == "checkpoint_failed"]
    assert failed.fields["reason"] == "the checkpoint was not completed within 0 s"


def test_training_goes_on_while_a_checkpoint_is_written_and_the_next_one_waits_for_its_end() -> None:
    world = World(steps=9, checkpoint_every=1)
    world.add(1).slow = True

    async def step(number: int) -> None:
        world.leader.on_batch(batch(number))
        await until(lambda: len(world.of(Committed)) == number)

    async def script() -> None:
        world.leader.on_generation(1, (1,))
        for number in (1, 2, 3):
            await step(number)
        assert world.tried == [1]
        world.leader.on_recorded(2)
        world.replicas[1].saved()
        await until(lambda: world.tried == [1, 3])
        await step(4)
        world.leader.on_stop("SIGTERM")
        await asyncio.sleep(0.01)
        assert world.tried == [1, 3], "the last checkpoint waits too"
        world.replicas[1].slow = False
        world.replicas[1].saved()
        await until(lambda: world.of(TrainingFinished))

    play(world, script)
    assert world.saved == [(1, 2, []), (3, 6, []), (4, 8, [])], "each with the position of its own step"
    assert [[step for step, _ in reports] for reports in world.carried] == [[1], [3], [3, 4]]


def test_a_snapshot_is_taken_at_the_boundary_of_its_step_after_the_export() -> None:
    world = World(steps=9)

    async def script() -> None:
        world.add(1), world.add(2)
        world.leader.on_generation(1, (1, 2))
        for number in (1, 2):
            world.leader.on_batch(batch(number))
            await until(lambda number=number: world.index.listed == [(s, 2 * s) for s in range(1, number + 1)])

    play(world, script)
    orders = [type(m.message).__name__ for rank, m in world.sent if rank == 1 and isinstance(m, ToReplica)]
    assert orders == ["Join", "Export", *["TrainStep", "Export", "TakeSnapshot"] * 2]
    assert {rank for rank, _ in world.asked(TakeSnapshot)} == {1}, "the core alone has a state"


def test_batches_stay_until_a_newer_state_is_complete_and_at_most_four_times_as_long() -> None:
    world = World(steps=99)
    world.add(1).slow = True

    async def script() -> None:
        world.leader.on_generation(1, (1,))
        for number in range(1, 20):
            if number == 3:
                # Nothing comes of the snapshot of this step.
                world.leader.on_snapshot_stored = lambda message: None  # type: ignore[method-assign]
            world.leader.on_batch(batch(number))
            await until(lambda number=number: len(world.of(Committed)) == number)
            retained.append(len(world.leader._batches))

    retained: list[int] = []
    play(world, script)
    assert retained[:3] == [1, 2, 3]
    assert retained[6] > 4, "more than the steps between two snapshots"
    assert retained[-3:] == [12, 12, 12]


def test_a_core_that_dies_while_it_writes_a_checkpoint_leaves_none_and_saves_again_at_once() -> None:
    world = World(steps=9, checkpoint_every=2)
    world.add(1).slow = True

    async def script() -> None:
        world.leader.on_generation(1, (1,))
        for number in (1, 2, 3):
            world.leader.on_batch(batch(number))
            await until(lambda number=number: len(world.of(Committed)) == number)
        dead = world.replicas[1]
        world.leader.on_replica_down(1, "killed")
        world.add(1, step=2)
        world.leader.on_generation(2, (1,))
        await until(lambda: world.saved)
        dead.saved()
        await asyncio.sleep(0.01)

    play(world, script)
    assert world.tried == [2, 3]
    assert world.saved == [(3, 6, [])]
    assert world.discarded == ["step-000002.rendezvous.1.partial"]


def test_a_run_that_stops_where_it_started_keeps_its_checkpoint() -> None:
    world = World(steps=9, step=5, from_checkpoint=True)
    world.add(1, step=5)

    async def script() -> None:
        world.leader.on_generation(1, (1,))
        await until(lambda: world.of(MemberJoined))
        world.leader.on_stop("SIGTERM")
        await until(lambda: world.of(TrainingFinished))

    play(world, script)
    assert world.tried == []


def test_only_the_core_answers_for_the_checkpoint() -> None:
    world = World(steps=9, checkpoint_every=1)

    async def script() -> None:
        for rank in (1, 2):
            world.add(rank)
        world.leader.on_generation(1, (1, 2))
        await until(lambda: len(world.of(MemberJoined)) == 2)
        world.replicas[1].slow = True
        world.leader.on_batch(batch(1))
        await until(lambda: [m for m in world.of(ToReplica) if isinstance(m.message, SaveCheckpoint)])
        world.leader.on_reply(2, Saved(world.replicas[1].saving.folder, 1, 0.0))
        world.leader.on_reply(1, Saved("of an earlier request", 1, 0.0))
        await asyncio.sleep(0.01)
        assert world.saved == []
        world.replicas[1].saved()
        await until(lambda: world.saved)

    play(world, script)
    assert world.saved == [(1, 2, [])]


def test_a_step_that_a_join_commits_is_saved_like_any_other() -> None:
    world = World(steps=9, checkpoint_every=1)

    async def script() -> None:
        await pair_with_a_silent_second(world)
        world.leader.on_batch(batch(1))
        await until(lambda: len(world.trained) == 1)
        world.leader.on_replica_down(2, "killed after the all-reduce")
        world.leader.on_generation(2, (1,))
        await until(lambda: world.saved)

    play(world, script)
    assert world.saved == [(1, 2, [])]


def test_an_export_that_fails_is_asked_for_again_and_five_failures_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader.Exports, "FIRST_S", 0.0)
    world = World(steps=9)
    replica = world.add(1)

    async def script() -> None:
        replica.bad_exports = 2
        world.leader.on_generation(1, (1,))
        # Nothing else happens: with a staleness bound of 0 no batch comes before the version is out.
        await until(lambda: world.of(Publish))
        replica.bad_exports = 9
        world.leader.on_batch(batch(1))
        await until(lambda: world.of(Fatal))

    play(world, script)
    assert [p.version for p in world.of(Publish)] == [0]
    assert [log.fields["step"] for log in world.of(Log)] == [0] * 2 + [1] * 5
    assert world.of(Fatal)[0].reason == "the weights of step 1 could not be written for the rollout engines: no room"


def test_three_steps_in_a_row_without_an_update_end_the_run() -> None:
    world = World(steps=9)
    replica = world.add(1)

    async def script() -> None:
        world.leader.on_generation(1, (1,))
        for step, skipped in enumerate((1, 1, 0, 1, 1, 1), 1):
            replica.skipped = skipped
            world.leader.on_batch(batch(step))
            await until(lambda step=step: len(world.of(StepReport)) == step)
        await until(lambda: world.of(Fatal))

    play(world, script)
    assert [r.metrics["skipped"] for r in world.of(StepReport)] == [1, 1, 0, 1, 1, 1]
    assert [log.fields["step"] for log in world.of(Log) if log.kind == "update_skipped"] == [1, 2, 4, 5, 6]
    assert [fatal.reason for fatal in world.of(Fatal)] == ["gradients were not finite in 3 steps in a row"]


def test_a_batch_without_loss_tokens_is_never_trained() -> None:
    world = World(steps=9)
    world.add(1)
    silent = Sample("0.0", pack_i32([1, 2]), b"\0\0", pack_f32([0.0, 0.0]), 1.0)

    async def script() -> None:
        world.leader.on_generation(1, (1,))
        world.leader.on_batch(Batch(1, (Group(0, (silent,)),), batch_stats()))
        await until(lambda: world.of(Fatal))

    play(world, script)
    assert not world.trained
    assert not world.of(Committed)
    assert world.of(Fatal)[0].reason == "the batch of step 1 has no token to train on"


def test_prompts_that_were_given_up_are_done_with_when_the_step_is_committed() -> None:
    world = World(steps=1)
    world.add(1)

    async def script() -> None:
        world.leader.on_generation(1, (1,))
        whole = batch(1)
        world.leader.on_batch(Batch(1, whole.groups, whole.stats, (2, 5)))
        await until(lambda: world.of(TrainingFinished))

    play(world, script)
    assert [c.indices for c in world.of(Committed)] == [(0, 1, 2, 5)]
    assert world.saved == [(1, 3, [5])]


def test_the_data_order_refuses_to_count_twice() -> None:
    order = DataOrder(4, (6,))
    order.trained([5])
    assert (order.low, order.extra) == (4, {5, 6})
    order.trained([4])
    assert (order.low, order.extra) == (7, set())
    with pytest.raises(ValueError, match="prompt 5"):
        order.trained([5])
