"""The weight relay over an in-memory mesh."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_hpc.protocol.mesh import MeshMessage, WeightsChunk
from libra_hpc.weights import relay
from libra_hpc.weights.relay import KEEP_VERSIONS, Publisher, Receiver, halves


class Net:
    """Delivers chunks in order, except to ranks that are dead."""

    def __init__(self, tmp_path: Path, ranks: list[int]) -> None:
        self.queue: list[tuple[int, WeightsChunk, bytes]] = []
        self.dead: set[int] = set()
        self.done: dict[int, list[tuple[int, bytes]]] = {rank: [] for rank in ranks}
        self.sent = 0
        self.receivers = {}
        for rank in ranks:
            folder = tmp_path / str(rank)
            folder.mkdir()
            self.receivers[rank] = Receiver(folder, self.send, lambda v, p, _, r=rank: self.done[r].append((v, p.read_bytes())))

    def send(self, rank: int, message: MeshMessage, blob: memoryview) -> None:
        assert isinstance(message, WeightsChunk)
        self.sent += 1
        self.queue.append((rank, message, bytes(blob)))

    def run(self) -> None:
        while self.queue:
            rank, message, blob = self.queue.pop(0)
            if rank not in self.dead:
                self.receivers[rank].chunk(message, blob)


def publish(publisher: Publisher, folder: Path, version: int, data: bytes, ranks: list[int]) -> None:
    path = folder / f"export-{version:08d}.safetensors"
    path.write_bytes(data)
    publisher.publish(version, path, zlib.crc32(data), ranks)


@given(st.lists(st.integers(0, 1000), unique=True, max_size=70))
def test_the_tree_reaches_everyone_once_in_logarithmic_depth(ranks: list[int]) -> None:
    reached: list[int] = []
    level, depth = halves(ranks), 0
    while level:
        depth += 1
        reached += [head for head, _ in level]
        level = [child for _, rest in level for child in halves(rest)]
    assert sorted(reached) == sorted(ranks)
    assert depth <= max(1, len(ranks)).bit_length()


def test_every_rank_gets_the_file_through_two_copies_of_the_sender(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "CHUNK_BYTES", 100)
    ranks = [2, 3, 5, 7, 11]
    net = Net(tmp_path, ranks)
    publisher = Publisher(net.send)
    data = bytes(range(256)) * 3
    publish(publisher, tmp_path, 1, data, ranks)
    assert net.sent == 2 * -(-len(data) // 100)
    net.run()
    assert all(net.done[rank] == [(1, data)] for rank in ranks)


def test_a_dead_inner_node_costs_its_subtree_until_it_asks(tmp_path: Path) -> None:
    ranks = [2, 3, 4, 5]
    net = Net(tmp_path, ranks)
    publisher = Publisher(net.send)
    net.dead = {2}
    publish(publisher, tmp_path, 1, b"one", ranks)
    net.run()
    missed = [rank for rank in ranks if not net.done[rank] and rank != 2]
    assert missed == [3]
    assert publisher.answer(3, have=0)
    net.run()
    assert net.done[3] == [(1, b"one")]
    assert not publisher.answer(3, have=1)


def test_newest_wins_and_old_files_go(tmp_path: Path) -> None:
    net = Net(tmp_path, [2])
    publisher = Publisher(net.send)
    for version in range(1, 8):
        publish(publisher, tmp_path, version, f"weights {version}".encode(), [2])
    stale = net.queue[0]
    net.run()
    assert [v for v, _ in net.done[2]] == list(range(1, 8))
    net.receivers[2].chunk(stale[1], stale[2])
    assert net.receivers[2].newest == 7
    assert len(list((tmp_path / "2").glob("weights-*"))) <= KEEP_VERSIONS + 1
    assert len(list(tmp_path.glob("export-*"))) <= KEEP_VERSIONS + 1


def test_a_corrupt_file_is_not_handed_on_and_can_be_sent_again(tmp_path: Path) -> None:
    net = Net(tmp_path, [2])
    publisher = Publisher(net.send)
    publish(publisher, tmp_path, 1, b"good bytes", [2])
    rank, message, _ = net.queue.pop()
    net.queue.append((rank, message, b"evil bytes"))
    net.run()
    assert net.done[2] == []
    assert net.receivers[2].corrupt == 1
    publisher.answer(2, have=-1)
    net.run()
    assert net.done[2] == [(1, b"good bytes")]
