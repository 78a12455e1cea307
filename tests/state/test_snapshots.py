"""The leader's snapshots, one at a time and complete, and from which state all ranks restart."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from libra_hpc.config.load import validate
from libra_hpc.config.run import RunConfig
from libra_hpc.facts.rundir import RunDir
from libra_hpc.protocol.agents import KeepSnapshot, SnapshotStored
from libra_hpc.protocol.layout import ResumePoint
from libra_hpc.state.attempt import metrics_until, source_of
from libra_hpc.state.data_order import DataOrder
from libra_hpc.state.snapshot_start import keep_listed, list_snapshot, newer_snapshot
from libra_hpc.state.snapshots import PATIENCE_S, Snapshots, holders
from libra_hpc.state.state_folders import DataPosition, StepRecord


class World:
    def __init__(self, core: tuple[int, ...] = (1, 2, 3), holders: tuple[int, ...] = ()) -> None:
        self.now = 0.0
        self.listed: list[tuple[int, int]] = []
        self.sent: list[tuple[int, KeepSnapshot]] = []
        self.events: list[tuple[str, Any]] = []
        self.full = False
        self.snapshots = Snapshots(
            core,
            2,
            complete=-1,
            holders=holders,
            index=self,
            send=lambda rank, message: self.sent.append((rank, message)),
            clock=lambda: self.now,
            log=lambda kind, **fields: self.events.append((kind, fields["step"])),
            changed=lambda: None,
        )

    async def add(self, position: DataPosition) -> None:
        if self.full:
            raise OSError("no room")
        self.listed.append((position.step, position.low))

    def take(self, step: int) -> bool:
        """Commit a step, and ask for a snapshot where one is due."""
        self.snapshots.committed(step)
        if not self.snapshots.possible():
            return False
        assert self.snapshots.ask(step, DataOrder(10 * step), ()).step == step
        return True

    async def stored(self, step: int, *parts: tuple[int, int]) -> None:
        for rank, part_of in parts:
            self.snapshots.on_stored(SnapshotStored(rank, part_of, step))
        await asyncio.sleep(0)
        await asyncio.sleep(0)


PARTS = ((1, 1), (2, 2), (3, 3), (2, 1), (3, 2), (1, 3))


async def test_a_snapshot_is_listed_with_its_own_position_once_every_part_and_copy_is_stored() -> None:
    world = World()

    assert [world.take(step) for step in (1, 2, 3)] == [False, True, False]
    await world.stored(2, *PARTS[:-1])
    assert not world.take(4), "one at a time"
    assert world.listed == []
    await world.stored(2, PARTS[-1])
    assert world.listed == [(2, 20)]
    assert world.sent == [(rank, KeepSnapshot(2)) for rank in (1, 2, 3)]
    assert world.take(5), "the one of step 4 is due"


async def test_a_part_that_cannot_be_stored_gives_the_snapshot_up_and_keeps_the_one_before() -> None:
    world = World()

    world.take(2)
    await world.stored(2, *PARTS)
    world.take(4)
    world.snapshots.on_stored(SnapshotStored(2, 1, 4, "no room"))
    await world.stored(4, *PARTS)
    assert world.listed == [(2, 20)]
    assert world.sent[-1] == (3, KeepSnapshot(2, 4))
    assert world.events == [("snapshot_failed", 4)]
    world.take(6)
    world.full = True
    await world.stored(6, *PARTS)
    assert world.listed == [(2, 20)]
    assert len(world.events) == 1, "one event a minute"
    assert world.take(8)


async def test_a_copy_that_never_comes_stops_no_later_snapshot() -> None:
    world = World()

    world.take(2)
    await world.stored(2, *PARTS[:-1])
    world.now = PATIENCE_S + 1.0
    assert world.take(4)
    await world.stored(2, PARTS[-1])
    assert world.listed == []
    await world.stored(4, *PARTS)
    assert world.listed == [(4, 40)]


async def test_a_node_that_had_parts_for_others_gives_them_up_with_the_next_snapshot() -> None:
    world = World(holders=(2, 5))

    world.take(2)
    await world.stored(2, *PARTS)
    assert world.sent == [(rank, KeepSnapshot(2)) for rank in (1, 2, 3, 5)]


async def test_one_node_has_its_part_alone_and_a_dead_core_takes_the_next_one() -> None:
    world = World((5,))

    world.take(2)
    world.snapshots.core_lost()
    assert world.take(4)
    await world.stored(4, (5, 5))
    assert world.listed == [(4, 40)]

    assert holders((5,)) == {}
    assert holders((1, 2, 3)) == {1: 2, 2: 3, 3: 1}


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
    list_snapshot(found, config(), "attempt-1-7", POSITION)
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
    list_snapshot(run, config(), "attempt-1-8", msgspec.structs.replace(POSITION, step=14))
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
