"""The leader's snapshots: complete once every part and every copy is stored, one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from libra_hpc.protocol.mesh import KeepSnapshot, SnapshotStored
from libra_hpc.state.data_order import DataOrder
from libra_hpc.state.snapshots import PATIENCE_S, Snapshots, holders
from libra_hpc.state.state_folders import DataPosition


class World:
    def __init__(self, core: tuple[int, ...] = (1, 2, 3)) -> None:
        self.now = 0.0
        self.listed: list[tuple[int, int]] = []
        self.sent: list[tuple[int, KeepSnapshot]] = []
        self.events: list[tuple[str, Any]] = []
        self.full = False
        self.snapshots = Snapshots(
            core,
            2,
            complete=-1,
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
        for rank, owner in parts:
            self.snapshots.on_stored(SnapshotStored(rank, owner, step))
        await asyncio.sleep(0)
        await asyncio.sleep(0)


PARTS = ((1, 1), (2, 2), (3, 3), (2, 1), (3, 2), (1, 3))


def play(script: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(script())  # type: ignore[arg-type]


def test_a_snapshot_is_listed_with_its_own_position_once_every_part_and_copy_is_stored() -> None:
    world = World()

    async def script() -> None:
        assert [world.take(step) for step in (1, 2, 3)] == [False, True, False]
        await world.stored(2, *PARTS[:-1])
        assert not world.take(4), "one at a time"
        assert world.listed == []
        await world.stored(2, PARTS[-1])
        assert world.listed == [(2, 20)]
        assert world.sent == [(rank, KeepSnapshot(2)) for rank in (1, 2, 3)]
        assert world.take(5), "the one of step 4 is due"

    play(script)


def test_a_part_that_cannot_be_stored_gives_the_snapshot_up_and_keeps_the_one_before() -> None:
    world = World()

    async def script() -> None:
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

    play(script)


def test_a_copy_that_never_comes_stops_no_later_snapshot() -> None:
    world = World()

    async def script() -> None:
        world.take(2)
        await world.stored(2, *PARTS[:-1])
        world.now = PATIENCE_S + 1.0
        assert world.take(4)
        await world.stored(2, PARTS[-1])
        assert world.listed == []
        await world.stored(4, *PARTS)
        assert world.listed == [(4, 40)]

    play(script)


def test_one_node_has_its_part_alone_and_a_dead_core_takes_the_next_one() -> None:
    world = World((5,))

    async def script() -> None:
        world.take(2)
        world.snapshots.core_lost()
        assert world.take(4)
        await world.stored(4, (5, 5))
        assert world.listed == [(4, 40)]

    play(script)
    assert holders((5,)) == {}
    assert holders((1, 2, 3)) == {1: 2, 2: 3, 3: 1}
