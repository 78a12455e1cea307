"""The weight relay over an in-memory mesh, with a clock of its own."""

from __future__ import annotations

import errno
import os
import zlib
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_hpc.process.deadlines import DeadlineSettings
from libra_hpc.protocol.agents import MeshMessage, WeightsChunk
from libra_hpc.weights import flow, incoming
from libra_hpc.weights.flow import IN_FLIGHT, halves
from libra_hpc.weights.relay import KEEP_VERSIONS, RETRY_MAX_S, RETRY_S, Publisher, Receiver

FLOOR_S = 60.0
DATA = bytes(range(256)) * 3
Posted = tuple[int, WeightsChunk, bytes, Callable[[bool], None]]


class Net:
    """Delivers chunks in order.  Dead ranks take nothing, ``lost`` ones have their chunks dropped."""

    def __init__(self, tmp_path: Path, ranks: list[int]) -> None:
        self.queue: list[Posted] = []
        self.dead: set[int] = set()
        self.lost: set[int] = set()
        self.done: dict[int, list[tuple[int, bytes]]] = {rank: [] for rank in ranks}
        self.asked: dict[int, list[int]] = {rank: [] for rank in ranks}
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.sent = 0
        self.now = 0.0
        self.folder, self.publisher = tmp_path, Publisher(self.send)
        self.folders = {rank: tmp_path / str(rank) for rank in ranks}
        self.receivers = {rank: self._receiver(rank) for rank in ranks}

    def _receiver(self, rank: int) -> Receiver:
        self.folders[rank].mkdir()
        return Receiver(
            self.folders[rank],
            self.send,
            complete=lambda file: self.done[rank].append((file.version, file.path.read_bytes())),
            request=self.asked[rank].append,
            log=lambda kind, **fields: self.events.append((kind, fields)),
            deadlines=DeadlineSettings(FLOOR_S, 900.0, 10.0),
        )

    def send(self, rank: int, message: MeshMessage, blob: bytes, done: Callable[[bool], None]) -> None:
        assert isinstance(message, WeightsChunk)
        if rank in self.lost:
            done(False)
            return
        self.sent += bool(blob)
        self.queue.append((rank, message, bytes(blob), done))

    def waiting(self, rank: int) -> list[Posted]:
        """Chunks with bytes that a rank has not taken."""
        return [posted for posted in self.queue if posted[0] == rank and posted[2]]

    def deliver(self, posted: Posted) -> None:
        self.queue.remove(posted)
        rank, message, blob, done = posted
        self.receivers[rank].chunk(message, blob, self.now)
        done(True)

    def publish(self, version: int, data: bytes, ranks: list[int], by: Publisher | None = None) -> None:
        path = self.folder / f"export-{version:08d}.safetensors"
        path.write_bytes(data)
        (by or self.publisher).publish(version, path, zlib.crc32(data), ranks)

    def answer(self, rank: int, have: int) -> bool:
        return self.publisher.answer(rank, have)

    def run(self) -> None:
        while moving := [posted for posted in self.queue if posted[0] not in self.dead]:
            self.deliver(moving[0])

    def watch(self, now: float) -> None:
        self.now = now
        for receiver in self.receivers.values():
            receiver.watch(now)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "CHUNK_BYTES", 100)


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


def test_every_rank_gets_the_file_once_and_the_sender_sends_two_copies(tmp_path: Path) -> None:
    ranks = [2, 3, 5, 7, 11]
    net = Net(tmp_path, ranks)
    net.publish(1, DATA, ranks)
    net.run()
    assert all(net.done[rank] == [(1, DATA)] for rank in ranks)
    assert net.sent == len(ranks) * -(-len(DATA) // 100)


def test_a_slow_child_holds_four_chunks_and_slows_only_its_own_subtree(tmp_path: Path) -> None:
    ranks = [2, 3, 5, 7]
    net = Net(tmp_path, ranks)
    net.dead = {2}
    net.publish(1, DATA, ranks)
    net.run()
    assert len(net.waiting(2)) == IN_FLIGHT
    assert [rank for rank in ranks if net.done[rank]] == [5, 7]
    net.dead = set()
    net.run()
    assert all(net.done[rank] == [(1, DATA)] for rank in ranks), "nothing is lost while the peer lives"


def test_newer_weights_drop_the_unsent_chunks_of_older_ones(tmp_path: Path) -> None:
    net = Net(tmp_path, [2])
    for version in (1, 2, 3):
        net.publish(version, bytes([version]) * 1000, [2])
    assert [message.version for _, message, _, _ in net.waiting(2)] == [1] * IN_FLIGHT, "over all versions"
    net.run()
    assert net.done[2] == [(3, bytes([3]) * 1000)]
    assert not list(net.folders[2].glob(".incoming-*"))


def test_a_dead_inner_node_costs_its_subtree_until_it_asks(tmp_path: Path) -> None:
    ranks = [2, 3, 4, 5]
    net = Net(tmp_path, ranks)
    net.dead = {2}
    net.publish(1, b"one", ranks)
    net.run()
    assert [rank for rank in ranks if not net.done[rank]] == [2, 3]
    assert net.answer(3, have=0)
    net.run()
    assert net.done[3] == [(1, b"one")]
    assert not net.answer(3, have=1)


def test_a_subtree_that_gets_nothing_of_an_announced_version_asks_for_it(tmp_path: Path) -> None:
    ranks = [2, 3, 4, 5]
    net = Net(tmp_path, ranks)
    net.dead = {2}
    for version, now in ((1, 0.0), (2, 40.0)):
        net.now = now
        net.publish(version, DATA, ranks)
        net.run()
    net.watch(FLOOR_S)
    assert net.events == []
    net.watch(FLOOR_S + 1.0)
    assert [(kind, fields["version"]) for kind, fields in net.events] == [("weights_stalled", 1)]
    assert net.asked == {2: [], 3: [-1], 4: [], 5: []}
    net.answer(3, have=-1)
    net.run()
    net.watch(1e6)
    assert net.done[3] == [(2, DATA)]
    assert net.asked[3] == [-1]


def test_a_lost_child_ends_its_stream_and_gets_the_file_from_its_beginning_when_it_asks(tmp_path: Path) -> None:
    net = Net(tmp_path, [2])
    net.publish(1, DATA, [2])
    net.lost = {2}
    net.run()
    assert net.sent == IN_FLIGHT, "the first dropped chunk ends it"
    net.lost = set()
    net.receivers[2].reset()
    net.answer(2, have=-1)
    net.run()
    assert net.done[2] == [(1, DATA)]


def test_a_version_that_comes_on_two_paths_is_taken_once_and_passed_on_to_both_subtrees(tmp_path: Path) -> None:
    ranks = [2, 3]
    net = Net(tmp_path, ranks)
    net.publish(1, DATA, [])
    net.answer(2, have=0)
    net.deliver(net.queue[0])
    net.publish(1, DATA, [2, 3], by=Publisher(net.send))
    net.run()
    assert net.done == {2: [(1, DATA)], 3: [(1, DATA)]}
    assert net.events == []


def test_a_late_chunk_of_the_newest_complete_version_does_not_disturb_the_next_one(tmp_path: Path) -> None:
    ranks = [2, 3]
    net = Net(tmp_path, ranks)
    net.publish(1, DATA, [2])
    late = net.queue[0]
    net.run()
    net.publish(2, DATA[::-1], [2])
    net.deliver(net.queue[0])
    net.receivers[2].chunk(WeightsChunk(1, 0, len(DATA), late[1].crc32, (3,)), late[2], 0.0)
    assert not net.waiting(3)
    net.run()
    assert net.done[2] == [(1, DATA), (2, DATA[::-1])]


def test_a_file_that_was_cut_short_ends_the_stream(tmp_path: Path) -> None:
    net = Net(tmp_path, [2])
    net.publish(1, DATA, [2])
    os.truncate(tmp_path / "export-00000001.safetensors", 450)
    net.run()
    assert (net.sent, net.done[2]) == (IN_FLIGHT, [])


def test_newest_wins_and_old_files_go(tmp_path: Path) -> None:
    net = Net(tmp_path, [2])
    stale = None
    for version in range(1, 8):
        net.publish(version, f"weights {version}".encode(), [2])
        stale = stale or net.queue[0]
        net.run()
        assert len(list(net.folders[2].glob("weights-*"))) == min(version, KEEP_VERSIONS + 1)
    assert [v for v, _ in net.done[2]] == list(range(1, 8))
    assert stale is not None
    net.receivers[2].chunk(stale[1], stale[2], 0.0)
    assert net.receivers[2].version == 7
    for folder, prefix in ((net.folders[2], "weights"), (tmp_path, "export")):
        versions = sorted(int(path.stem.split("-")[1]) for path in folder.glob(f"{prefix}-*"))
        assert versions == list(range(7 - KEEP_VERSIONS, 8))


def test_a_corrupt_file_is_not_handed_on_and_is_asked_for_again(tmp_path: Path) -> None:
    net = Net(tmp_path, [2])
    net.publish(1, b"good bytes", [2])
    rank, message, _, done = net.queue.pop(0)
    net.queue.append((rank, message, b"evil bytes", done))
    net.run()
    assert net.done[2] == []
    assert net.events == [("weights_corrupt", {"version": 1, "size": 10, "retry_s": RETRY_S})]
    net.watch(RETRY_S - 0.1)
    assert net.asked[2] == []
    net.watch(RETRY_S)
    assert net.asked[2] == [-1]
    net.answer(2, have=-1)
    net.run()
    assert net.done[2] == [(1, b"good bytes")]


def test_a_version_that_stalls_is_abandoned_and_asked_for_again_until_something_comes(tmp_path: Path) -> None:
    net = Net(tmp_path, [2])
    net.publish(1, DATA, [2])
    net.deliver(net.queue[0])
    net.watch(FLOOR_S)
    assert (net.events, net.asked[2]) == ([], [])
    net.watch(FLOOR_S + 1.0)
    ((kind, fields),) = net.events
    assert (kind, fields["version"], fields["received"]) == ("weights_stalled", 1, 100)
    assert "61 s" in fields["reason"]
    assert not list(net.folders[2].iterdir())
    net.watch(2 * FLOOR_S + 2.0)
    assert net.asked[2] == [-1, -1], "an unanswered request is repeated"
    net.answer(2, have=-1)
    net.run()
    assert net.done[2] == [(1, DATA)]
    net.watch(1e6)
    assert len(net.asked[2]) == 2


def test_time_in_which_the_agent_was_stopped_counts_for_no_chunk(tmp_path: Path) -> None:
    net = Net(tmp_path, [2])
    net.publish(1, DATA, [2])
    net.deliver(net.queue[0])
    net.receivers[2].discount(3600.0)
    net.watch(3600.0 + FLOOR_S)
    assert net.events == []


def test_a_request_waits_while_weights_arrive(tmp_path: Path) -> None:
    net = Net(tmp_path, [2])
    net.publish(1, DATA, [2])
    net.deliver(net.queue[0])
    net.receivers[2].ask(0, 0.0)
    assert net.asked[2] == []
    net.run()
    net.receivers[2].ask(1, 0.0)
    net.receivers[2].answered()
    net.watch(1e6)
    assert net.asked[2] == [1]


Usage = namedtuple("Usage", "total used free")


def test_a_full_disk_is_noticed_before_the_first_byte_and_tried_again_later_and_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = Net(tmp_path, [2])
    monkeypatch.setattr(incoming.shutil, "disk_usage", lambda folder: Usage(0, 0, len(DATA) - 1))
    net.publish(1, DATA, [2])
    net.run()
    waits = []
    for _ in range(5):
        kind, fields = net.events[-1]
        assert (kind, fields["version"]) == ("weights_not_stored", 1)
        assert "MiB free" in fields["reason"]
        waits.append(fields["retry_s"])
        asked, events = len(net.asked[2]), len(net.events)
        net.watch(net.now + fields["retry_s"] - 0.1)
        assert (len(net.asked[2]), len(net.events)) == (asked, events), "nothing is written or asked for meanwhile"
        net.watch(net.now + 0.1)
        assert len(net.asked[2]) == asked + 1
        net.answer(2, have=-1)
        net.run()
    assert waits == [RETRY_S, 2 * RETRY_S, 4 * RETRY_S, RETRY_MAX_S, RETRY_MAX_S]
    monkeypatch.undo()
    net.watch(net.now + RETRY_MAX_S)
    net.answer(2, have=-1)
    net.run()
    assert net.done[2] == [(1, DATA)]


def test_a_full_disk_is_relieved_of_all_but_the_newest_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net(tmp_path, [2])
    for version in (1, 2, 3):
        net.publish(version, DATA, [2])
        net.run()
    monkeypatch.setattr(incoming.shutil, "disk_usage", lambda folder: Usage(0, 0, 0))
    net.publish(4, DATA, [2])
    net.run()
    assert [path.name for path in net.folders[2].iterdir()] == ["weights-00000003.safetensors"]


def test_a_disk_that_fills_up_in_between_leaves_no_file_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = Net(tmp_path, [2])
    net.publish(1, DATA, [2])
    net.deliver(net.queue[0])

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    net.run()
    facts = {"version": 1, "reason": "No space left on device", "retry_s": RETRY_S}
    assert net.events == [("weights_not_stored", facts)]
    assert not list(net.folders[2].iterdir())


def test_a_reset_receiver_has_no_files_and_takes_the_same_version_again(tmp_path: Path) -> None:
    net = Net(tmp_path, [2])
    net.publish(1, DATA, [2])
    net.run()
    net.receivers[2].reset()
    assert (net.receivers[2].version, list(net.folders[2].iterdir())) == (-1, [])
    net.answer(2, have=-1)
    net.run()
    assert net.done[2] == [(1, DATA)] * 2
