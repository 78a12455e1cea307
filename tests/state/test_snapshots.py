"""The leader's snapshots, one at a time and complete, and from which state all ranks restart."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from libra_hpc.config.load import validate
from libra_hpc.config.run import RunConfig
from libra_hpc.facts.rundir import RunDir
from libra_hpc.protocol.layout import ResumePoint
from libra_hpc.protocol.trainer import KeepState, Saved, SaveFailed
from libra_hpc.state.attempt import keep_listed, list_snapshot, metrics_until, newer_snapshot, source_of
from libra_hpc.state.snapshot_keeper import successors
from libra_hpc.state.state_folders import DataOrder, DataPosition, StepRecord
from libra_hpc.state.store import states
from libra_hpc.train_leader import train_leader_setup
from libra_hpc.train_leader.saves import COPIES_S, Saves
from libra_hpc.train_leader.train_leader_setup import SnapshotStore
from tests.train_leader.world import Snapshots


class World:
    """The leader's snapshots, and where they are."""

    def __init__(self, core: tuple[int, ...] = (1, 2, 3)) -> None:
        self.now = 0.0
        self.store = Snapshots()
        self.events: list[tuple[str, Any]] = []
        self.saves = Saves(
            core,
            0,
            2,
            complete=False,
            store=self.store,
            storage_s=60.0,
            clock=lambda: self.now,
            log=lambda kind, **fields: self.events.append((kind, fields["step"])),
            changed=lambda: None,
        )
        self.name = ""

    def take(self, step: int) -> bool:
        """Commit a step, and ask for a snapshot where one is due."""
        self.saves.committed(step)
        if not self.saves.possible():
            return False
        order = self.saves.ask(step, DataOrder(10 * step), ())
        self.name = order.folder
        assert (order.step, order.tier) == (step, "snapshot")
        return True

    async def stored(self, step: int, *parts: tuple[int, int], name: str = "") -> None:
        for rank, part_of in parts:
            self.saves.on_answer(rank, Saved(name or self.name, step, 0.0, tier="snapshot", part_of=part_of))
        await asyncio.sleep(0.005)


PARTS = ((1, 1), (2, 2), (3, 3), (2, 1), (3, 2), (1, 3))


async def test_a_snapshot_is_listed_with_its_own_position_once_every_part_and_copy_is_stored() -> None:
    world = World()

    assert [world.take(step) for step in (1, 2, 3)] == [False, True, False]
    await world.stored(2, *PARTS[:2])
    assert world.saves.taking
    await world.stored(2, *PARTS[2:-1])
    assert not world.saves.taking
    assert not world.take(4), "one at a time"
    assert world.store.listed == []
    await world.stored(2, PARTS[-1])
    assert world.store.listed == [(2, 20)]
    assert world.take(5), "the one of step 4 is due"
    assert world.events == []


async def test_a_part_that_cannot_be_stored_gives_the_snapshot_up_and_keeps_the_one_before() -> None:
    world = World()

    world.take(2)
    await world.stored(2, *PARTS)
    world.take(4)
    world.saves.on_answer(2, SaveFailed(world.name, 4, "no room", "snapshot", 1))
    assert world.saves.writing, "others still write their own parts"
    await world.stored(4, *PARTS)
    assert world.store.listed == [(2, 20)]
    assert world.store.dropped == [world.name]
    assert world.events == [("snapshot_failed", 4)]
    assert not world.take(6), "after a pause"
    world.now, world.store.full = 10.0, True
    assert world.take(8)
    await world.stored(8, *PARTS)
    assert world.store.listed == [(2, 20)]
    world.now, world.store.full = 30.0, False
    assert world.take(10)
    await world.stored(10, *PARTS)
    assert world.store.listed == [(2, 20), (10, 100)]


async def test_a_copy_that_never_comes_stops_no_later_snapshot() -> None:
    world = World()

    world.take(2)
    late = world.name
    await world.stored(2, *PARTS[:-1])
    world.now = COPIES_S + 1.0
    assert not world.take(4)
    world.now += 10.0
    assert world.take(4)
    await world.stored(2, PARTS[-1], name=late)
    assert world.store.listed == []
    await world.stored(4, *PARTS)
    assert (world.store.listed, world.store.dropped) == ([(4, 40)], [late])


async def test_one_node_has_its_part_alone_and_a_dead_core_takes_another_one_at_once() -> None:
    world = World((5,))

    world.take(2)
    world.saves.core_lost("process t5.0 ended with 1")
    assert world.take(3)
    await world.stored(3, (5, 5))
    assert (world.store.listed, world.events) == ([(3, 30)], [("snapshot_failed", 2)])

    assert successors((5,)) == {}
    assert successors((1, 2, 3)) == {1: 2, 2: 3, 3: 1}


CORE = (1, 2)
NAME = "step-00000012.attempt-1-7"
FIRST, SECOND = f"1/{NAME}", f"2/{NAME}"
WHOLE = ((), (FIRST, SECOND), (FIRST, SECOND), ())
POSITION = DataPosition(12, 96, (98,), (StepRecord(11, 5.0, {"loss": 0.5}), StepRecord(12, 6.0, {"loss": 0.25})))


def config(**sections: Any) -> RunConfig:
    return validate({"train": {"snapshot_every": 2}, **sections})


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path)
    list_snapshot(found, config(), NAME, POSITION)
    return found


def start(run: RunDir, parts: tuple[tuple[str, ...], ...] = WHOLE, step: int = 10, **changes: Any) -> ResumePoint:
    checkpoint = ResumePoint(step, "/checkpoints/step", 8 * step, ())
    settings = changes.get("config", config())
    found, passed = newer_snapshot(run, settings, point=checkpoint, core=CORE, parts=parts)
    assert all(why for _, why in passed.damaged)
    keep_listed(run, found.snapshot)
    return found


def test_a_newer_snapshot_is_taken_with_its_data_position(run: RunDir) -> None:
    found = start(run)
    assert found == ResumePoint(12, "/checkpoints/step", 96, (98,), snapshot=NAME, saved_step=10)
    assert source_of(found) == ("from step 12, whose snapshot in shared memory is newer than the checkpoint of step 10")
    assert start(run) == found, "it stays listed"


def test_a_part_that_was_lost_comes_from_the_node_that_has_a_copy(run: RunDir) -> None:
    assert start(run, ((), (), (FIRST, SECOND), ())).restore == {1: 2}
    assert start(run, ((), (SECOND,), (FIRST, SECOND), ())).restore == {1: 2}
    assert start(run, ((), (SECOND, FIRST), (), (FIRST,))).restore == {2: 1}


def test_parts_are_found_where_the_ranks_are_on_other_nodes_than_before(run: RunDir) -> None:
    assert start(run, ((), (), (), (FIRST, SECOND))).restore == {1: 3, 2: 3}
    assert start(run, ((), (SECOND,), (FIRST,), ())).restore == {1: 2, 2: 1}


@pytest.mark.parametrize(
    ("parts", "step", "changes"),
    [
        (((), (), (SECOND,), ()), 10, {}),
        (((), (FIRST,), (FIRST,), ()), 10, {}),
        (((), ("1/step-00000012.attempt-1-6",), (SECOND,), ()), 10, {}),
        (WHOLE, 12, {}),
        (WHOLE, 10, {"config": config(train={"tp": 2})}),
    ],
    ids=["a part is gone", "the second part is gone", "no part", "the checkpoint is as new", "layout"],
)
def test_otherwise_the_checkpoint_is_taken_and_the_snapshot_listed_no_longer(
    run: RunDir, parts: tuple[tuple[str, ...], ...], step: int, changes: dict[str, Any]
) -> None:
    found = start(run, parts, step, **changes)
    assert found == ResumePoint(step, "/checkpoints/step", 8 * step, ())
    assert source_of(found) == f"from step {step}, the newest checkpoint"
    assert not start(run, WHOLE).snapshot, "its steps were trained again"


def test_the_newest_snapshot_alone_is_listed_and_an_altered_entry_is_none(run: RunDir) -> None:
    list_snapshot(run, config(), "step-00000014.attempt-1-8.1", msgspec.structs.replace(POSITION, step=14))
    (folder,) = run.snapshots.iterdir()
    position = folder / "state.json"
    position.write_bytes(position.read_bytes().replace(b"96", b"97"))
    assert not start(run).snapshot


def test_metrics_up_to_the_snapshot_stay_once_each_and_later_ones_go(run: RunDir) -> None:
    lines = [{"t": float(step), "step": step} for step in (*range(1, 12), 13, 14)]
    run.metrics.write_text("".join(f"{msgspec.json.encode(line).decode()}\n" for line in lines))
    content = metrics_until(run, ResumePoint(12, "", 96, (98,), snapshot=NAME))
    assert content is not None
    kept = [msgspec.json.decode(line) for line in content.splitlines()]
    assert [line["step"] for line in kept] == list(range(1, 13))
    assert kept[10] == lines[10], "a line that was written wins"
    assert kept[11] == {"t": 6.0, "step": 12, "loss": 0.25}


async def test_nodes_keep_no_part_of_a_snapshot_that_is_not_listed_and_of_none_before_the_newest(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[int, KeepState]] = []
    context = SimpleNamespace(
        run=run,
        config=config(),
        start_name="attempt-1-8",
        layout=SimpleNamespace(core=CORE),
        resume_point=ResumePoint(12, "/checkpoints/step", 96, (), snapshot=NAME, restore={1: 5}),
        send=lambda rank, message: sent.append((rank, message.message)),
    )
    store = SnapshotStore(cast(Any, context))
    first, second = store.folder(14, 1), store.folder(14, 2)
    position = msgspec.structs.replace(POSITION, step=14)

    with monkeypatch.context() as patch:
        patch.setattr(train_leader_setup, "list_snapshot", lambda *_: os.stat(run.path / "gone"))
        with pytest.raises(OSError, match="gone"):
            await store.complete(first, {}, position)
    assert sent == [(rank, KeepState(12, first)) for rank in (1, 2, 5)], "node 5 had a part for node 1"
    assert [state.folder.name for state in states(run.snapshots)] == [NAME]

    sent.clear()
    await store.complete(second, {}, position)
    assert sent == [(rank, KeepState(14)) for rank in (1, 2, 5)]
    assert [state.folder.name for state in states(run.snapshots)] == [second]
