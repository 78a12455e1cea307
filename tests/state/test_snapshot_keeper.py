"""Snapshots on the nodes of a core: parts, copies in the ring, and what is left after a node lost its part."""

from __future__ import annotations

import asyncio
import shutil
import socket
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from libra_hpc.protocol.agents import FromReplica, SnapshotPart
from libra_hpc.protocol.carriers import Peer
from libra_hpc.protocol.trainer import KeepState, Saved, SaveFailed, SaveState
from libra_hpc.state import snapshot_keeper as module
from libra_hpc.state import state_folders as folders
from libra_hpc.state.snapshot_keeper import SnapshotKeeper, successors, whole_parts
from libra_hpc.weights.offers import OfferStore
from libra_hpc.weights.parts import pull_part
from libra_hpc.weights.server import CarrierServer, ImageSource
from libra_hpc.weights.wire import Caller
from tests.stage.waiting import until

from .saved import flip

CORE = (1, 2, 3)
SECRET = b"of the run"


def name_of(step: int) -> str:
    return f"step-{step:08d}.attempt-1-7.{step}"


class PartServer:
    """What a node's carrier does for parts of snapshots, in threads of this process."""

    def __init__(self, folder: Path, rank: int) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.peer: Peer | None = Peer(rank, ("127.0.0.1",), listener.getsockname()[1])
        CarrierServer(listener, SECRET, OfferStore(0), cast(ImageSource, None), folder, rank=rank).start()
        self._caller = Caller(rank, SECRET)

    async def pull_part(self, peer: Peer, source: str, target: Path) -> str:
        try:
            await asyncio.to_thread(pull_part, self._caller, peer, source, target)
        except OSError as error:
            return str(error)
        return ""


class Ring:
    """Three nodes and the messages between them; `stored` is what the leader gets, with the node."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stored: list[tuple[int, Saved | SaveFailed]] = []
        self.lost: set[int] = set()
        self.keepers = {
            rank: SnapshotKeeper(
                folder / str(rank),
                rank,
                leader=1,
                successor=successors(CORE)[rank],
                send=self.send,
                carrier=PartServer(folder / str(rank), rank),
            )
            for rank in CORE
        }

    def send(self, rank: int, message: Any) -> None:
        asyncio.get_running_loop().call_soon(self.deliver, rank, message)

    def deliver(self, rank: int, message: Any) -> None:
        if rank in self.lost:
            return
        match message:
            case FromReplica(rank=node, message=answer):
                self.stored.append((node, answer))
            case SnapshotPart():
                self.keepers[rank].on_part(message)

    async def take(self, step: int, rank: int, size: int = 100_000) -> None:
        order = self.keepers[rank].order(SaveState(name_of(step), step, "snapshot"))
        for process in (0, 1):
            (Path(order.folder) / f"snapshot-{process:05d}.safetensors").write_bytes(bytes([rank, process]) * size)
        state = folders.TrainerState(step, 2 * step)
        (Path(order.folder) / folders.STATE_FILE).write_bytes(msgspec.json.encode(state))
        self.keepers[rank].written(Saved(order.folder, step, 0.0, tier="snapshot"))

    async def take_all(self, step: int) -> None:
        for rank in CORE:
            await self.take(step, rank)
        await until(lambda: len([part for _, part in self.stored if part.step == step]) == 2 * len(CORE))

    def held(self) -> dict[int, tuple[str, ...]]:
        return {rank: whole_parts(self.folder / str(rank)) for rank in CORE}


def both(rank: int, *steps: int) -> tuple[str, ...]:
    """A node's own parts, and those of the one before it."""
    parts = sorted((rank, CORE[CORE.index(rank) - 1]))
    return tuple(f"{part}/{name_of(step)}" for part in parts for step in steps)


async def test_every_node_has_its_part_and_a_copy_of_the_one_before_it(tmp_path: Path) -> None:
    ring = Ring(tmp_path)

    await ring.take_all(4)
    await ring.take_all(8)
    assert ring.held() == {rank: both(rank, 4, 8) for rank in CORE}
    for keeper in ring.keepers.values():
        keeper.keep(KeepState(8))
    await until(lambda: ring.held() == {rank: both(rank, 8) for rank in CORE})

    assert all(isinstance(part, Saved) for _, part in ring.stored)
    name = name_of(8)
    for rank, holder in successors(CORE).items():
        own, copy = tmp_path / f"{rank}/{rank}" / name, tmp_path / f"{holder}/{rank}" / name
        assert {p.name: p.read_bytes() for p in own.iterdir()} == {p.name: p.read_bytes() for p in copy.iterdir()}
        assert folders.verify(copy) == ""
        assert folders.read_state(copy) == folders.TrainerState(8, 16)


async def test_a_node_that_lost_its_part_gets_the_copy_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ASK_S", 0.01)
    name = name_of(4)

    await Ring(tmp_path).take_all(4)

    shutil.rmtree(tmp_path / "2")
    assert whole_parts(tmp_path / "2") == ()
    again = Ring(tmp_path)

    for rank in CORE:
        again.keepers[rank].begin(name)
    # The one that has the copy starts later.
    again.lost = {3}
    fetching = asyncio.create_task(again.keepers[2].restore(name, 3))
    await asyncio.sleep(0.05)
    assert not fetching.done()
    again.lost = set()
    async with asyncio.timeout(30.0):
        await fetching

    assert folders.verify(tmp_path / "2" / "2" / name) == ""
    assert (tmp_path / "2" / "2" / name / "snapshot-00001.safetensors").read_bytes() == bytes([2, 1]) * 100_000


async def test_a_part_that_is_damaged_is_fetched_again_and_one_without_a_copy_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ASK_S", 0.01)
    name = name_of(4)
    await Ring(tmp_path).take_all(4)
    part = tmp_path / "2" / "2" / name
    whole = (part / "snapshot-00001.safetensors").read_bytes()

    flip(part / "snapshot-00001.safetensors")
    again = Ring(tmp_path)
    assert f"2/{name}" in whole_parts(tmp_path / "2"), "its content is not read yet"
    async with asyncio.timeout(30.0):
        why = await again.keepers[2].restore(name, None)
    assert why == "snapshot-00001.safetensors has not the checksum with which it was written."
    assert (part / "snapshot-00001.safetensors").read_bytes() == whole
    assert await again.keepers[2].restore(name, None) == ""

    (part / folders.MANIFEST_FILE).unlink()
    assert whole_parts(tmp_path / "2") == (f"1/{name}",)
    alone = SnapshotKeeper(
        tmp_path / "2", 2, leader=2, successor=None, send=again.send, carrier=again.keepers[2]._carrier
    )
    with pytest.raises(OSError, match=r"is damaged: manifest\.json is missing"):
        await alone.restore(name, None)
    assert not part.exists()


async def test_a_copy_that_is_damaged_is_not_sent_and_counts_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ASK_S", 0.01)
    monkeypatch.setattr(module, "RESTORE_S", 0.05)
    name = name_of(4)
    await Ring(tmp_path).take_all(4)
    flip(tmp_path / "3" / "2" / name / "snapshot-00000.safetensors")
    again = Ring(tmp_path)
    with pytest.raises(OSError, match="did not come back"):
        await again.keepers[2].restore(name, 3)
    await until(lambda: f"2/{name}" not in whole_parts(tmp_path / "3"))
    assert f"2/{name}" not in whole_parts(tmp_path / "2")


async def test_a_start_removes_what_it_does_not_begin_with(tmp_path: Path) -> None:
    ring = Ring(tmp_path)

    await ring.take_all(4)
    await ring.take_all(8)
    ring.keepers[1].order(SaveState(name_of(12), 12, "snapshot"))

    again = Ring(tmp_path)
    again.keepers[1].begin(name_of(4))
    assert again.held()[1] == both(1, 4)
    assert len(list(tmp_path.glob("1/*/*"))) == 2
    again.keepers[1].begin("")
    assert again.held()[1] == ()


async def test_a_part_or_a_copy_that_fails_reaches_the_leader_and_leaves_the_others(tmp_path: Path) -> None:
    ring = Ring(tmp_path)

    order = ring.keepers[1].order(SaveState(name_of(4), 4, "snapshot"))
    ring.keepers[1].written(SaveFailed(order.folder, 4, "no room", "snapshot"))
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "2").write_text("no folder")
    await ring.take(4, 2)
    await until(lambda: len(ring.stored) == 3)
    assert [(rank, part.part_of, isinstance(part, SaveFailed)) for rank, part in ring.stored] == [
        (1, 1, True),
        (2, 2, False),
        (3, 2, True),
    ]
    for keeper in ring.keepers.values():
        keeper.keep(KeepState(-1, name_of(4)))
    await until(lambda: not list(tmp_path.glob("2/2/*")))


async def test_a_lost_successor_ends_the_copy_and_nothing_else(tmp_path: Path) -> None:
    ring = Ring(tmp_path)

    ring.lost = {2}
    await ring.take(4, 1)
    await until(lambda: not ring.keepers[1]._tasks)

    assert [(rank, part.part_of) for rank, part in ring.stored] == [(1, 1)]
