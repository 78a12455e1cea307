"""Carriers that are killed while versions pass: every node ends with the writers' bits, and never has a mixture.

Two writers, which are also receivers, and a node behind them; the train leader's own publisher speaks to them.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from libra_hpc.protocol.agents import WeightsHere, WeightsWanted
from libra_hpc.protocol.carriers import ImageHere, Peer, Publish, Stalled
from libra_hpc.protocol.joining import FIRST_GUEST, guest_secret, is_guest
from libra_hpc.train_leader.publisher import Published, WeightPublisher
from libra_hpc.weights.delta import dense
from libra_hpc.weights.image import IMAGE_FILE, reading
from libra_hpc.weights.pieces import WHOLE, TensorBlock, write_offer
from libra_hpc.weights.weightfile import WeightFileError, file_header
from tests.weights.nodes import SECRET, CarrierNode, FaultyLink, node_folders

ROWS, COLUMNS = 256, 1024
OWNERS = {"t0": (0, "model.embed_tokens.weight"), "t1": (1, "lm_head.weight")}
"""Node and tensor."""
SHAPES: dict[str, tuple[int, ...]] = {tensor: (ROWS, COLUMNS) for _, tensor in OWNERS.values()}
"""1 MiB."""
RANKS = WRITER, RELAY, RECEIVER = range(3)
LATE = (3, FIRST_GUEST, FIRST_GUEST + 1)
Bits = dict[str, np.ndarray[Any, Any]]


class Nodes:
    """The carriers, and what a train leader and trainers do."""

    def __init__(self, stack: ExitStack, folder: Path, bytes_per_s: float) -> None:
        self._stack, self._folder, self._rate = stack, folder, bytes_per_s
        self._draw = np.random.default_rng(0)
        self.links: dict[int, FaultyLink] = {}
        self.carriers: dict[int, CarrierNode] = {}
        self.bits: list[Bits] = []
        """Of every version."""
        self.ranks = list(RANKS)
        self._publisher = WeightPublisher((WRITER, RELAY), lambda: self.ranks, self._send)
        for rank in RANKS:
            self.start(rank)

    def _send(self, rank: int, message: Any) -> None:
        with contextlib.suppress(OSError):  # it was killed, and the next one gets it
            self.carriers[rank].send(message)

    def start(self, rank: int) -> None:
        secret = guest_secret(SECRET) if is_guest(rank) else SECRET
        node = self.carriers[rank] = CarrierNode(self._folder / str(rank), rank, SHAPES, secret=secret)
        self._stack.callback(node.close)
        link = self.links[rank] = FaultyLink(node.port, bytes_per_s=self._rate)
        self._stack.callback(link.close)
        self._publisher.on_here(WeightsHere(rank, carrier=Peer(rank, ("127.0.0.1",), link.port)))

    def kill(self, rank: int) -> None:
        self.carriers[rank].kill()
        self.links[rank].close()

    def restart(self, rank: int) -> None:
        self.kill(rank)
        self.start(rank)

    def join(self, rank: int) -> None:
        self.ranks.append(rank)
        shutil.rmtree(self._folder / str(rank), ignore_errors=True)
        self.start(rank)
        self._publisher.on_wanted(WeightsWanted(rank, -1))

    def leave(self, rank: int) -> None:
        self.ranks.remove(rank)
        self.kill(rank)
        self._publisher.lost(rank)

    def offer(self, share: float) -> int:
        """A version of which this share of rows is new; 1.0: whole tensors."""
        version, base = len(self.bits), WHOLE if share == 1.0 else len(self.bits) - 1
        old = self.bits[-1] if self.bits else {tensor: np.zeros((ROWS, COLUMNS), np.int16) for tensor in SHAPES}
        new = {tensor: rows.copy() for tensor, rows in old.items()}
        for writer, (rank, tensor) in OWNERS.items():
            changed = np.flatnonzero(self._draw.random(ROWS) < share)
            new[tensor][changed] += self._draw.integers(1, 1 << 15, (len(changed), COLUMNS), np.int16)
            blocks = [
                (TensorBlock(tensor, row * COLUMNS, 1, COLUMNS, COLUMNS), new[tensor][row]) for row in changed.tolist()
            ]
            encoded = [dense(block, "BF16", values) for block, values in blocks]
            write_offer(self._folder / str(rank), version, base, writer, encoded)
        self.bits.append(new)
        writers = tuple((writer, rank) for writer, (rank, _) in OWNERS.items())
        self._publisher.publish(Published(version, base, writers))
        return version

    def passed(self) -> int:
        return sum(link.passed for link in self.links.values())

    def everywhere(self, version: int) -> None:
        """Wait until every image has the version, and compare."""
        for rank in self.ranks:
            self.carriers[rank].wait(ImageHere, lambda message: message.version >= version)
            assert self.read(rank) == version

    def read(self, rank: int) -> int:
        """The version of a node's image, which has its bits and no others; -1: it has none at the moment."""
        path = self._folder / str(rank) / IMAGE_FILE
        try:
            with reading(path) as version:
                values = np.fromfile(path, np.int16, offset=len(file_header(SHAPES, "BF16")[0]))
        except WeightFileError:
            return -1
        expected = np.concatenate([self.bits[version][tensor].reshape(-1) for tensor in SHAPES])
        assert np.array_equal(values, expected), f"the image of node {rank} is not version {version}"
        return version


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with node_folders() as folder, ExitStack() as stack:
        yield Nodes(stack, folder, 4e6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "victim", [WRITER, *(pytest.param(rank, marks=pytest.mark.chaos) for rank in (RELAY, RECEIVER))]
)
def test_a_carrier_killed_at_any_byte_goes_on_and_all_get_every_version(nodes: Nodes, victim: int) -> None:
    draw = random.Random(victim)
    nodes.everywhere(nodes.offer(1.0))
    for share in (0.03, 1.0, 0.3):
        at = nodes.passed() + draw.randrange(int(2 * share * 2 * ROWS * COLUMNS))
        version = nodes.offer(share)
        while nodes.passed() < at:
            time.sleep(0.001)
        nodes.restart(victim)
        nodes.everywhere(version)


@pytest.mark.slow
def test_an_owner_killed_before_a_version_has_come_still_sends_it_and_the_next_one(nodes: Nodes) -> None:
    nodes.everywhere(nodes.offer(1.0))
    nodes.offer(0.3)
    nodes.kill(WRITER)
    version = nodes.offer(0.03)
    nodes.start(WRITER)
    nodes.everywhere(version)


def test_a_node_without_others_that_lacks_a_base_says_so_and_takes_the_next_whole_version() -> None:
    with node_folders() as folder:
        alone = CarrierNode(folder / "0", 0, SHAPES)
        try:
            alone.send(Publish(5, 4, (("t0", 0),), (alone.peer,)))
            assert "no other node has an image" in alone.wait(Stalled).reason
            block = TensorBlock("", 0, 1, ROWS * COLUMNS, ROWS * COLUMNS)
            values = np.ones(ROWS * COLUMNS, np.int16)
            write_offer(
                folder / "0", 6, WHOLE, "t0", [dense(block._replace(tensor=name), "BF16", values) for name in SHAPES]
            )
            alone.send(Publish(6, WHOLE, (("t0", 0),), (alone.peer,)))
            assert alone.wait(ImageHere).version == 6
        finally:
            alone.close()


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_nodes_that_join_leave_and_are_killed_have_the_writers_bits_over_200_versions() -> None:
    """At any time: while bytes come, while an image is written, before or after a version is published.

    A reader of every image finds whole versions alone, each with the writers' bits, and none older than the one before.
    """
    draw = random.Random(0)
    with node_folders() as folder, ExitStack() as stack:
        nodes = Nodes(stack, folder, 20e6)
        nodes.everywhere(nodes.offer(1.0))
        ended, seen, faults = threading.Event(), {rank: [0] for rank in RANKS}, []

        def watch() -> None:
            try:
                while not ended.is_set():
                    for rank in RANKS:
                        if (version := nodes.read(rank)) >= 0:
                            seen[rank].append(version)
            except BaseException as error:
                faults.append(error)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            for number in range(1, 201):
                version = nodes.offer(draw.choice((0.0, 0.001, 0.03, 0.1, 1.0)))
                for rank in LATE if number % 3 == 0 else ():
                    if rank not in nodes.ranks:
                        nodes.join(rank)
                    elif draw.random() < 0.3:
                        nodes.leave(rank)
                time.sleep(draw.uniform(0.0, 0.1))
                if number % 5 == 0:
                    nodes.restart(draw.choice(RANKS))
                if number % 20 == 0:
                    nodes.everywhere(version)
        finally:
            ended.set()
            watcher.join()
        assert not faults
        for rank, versions in seen.items():
            assert versions == sorted(versions), f"node {rank} went back"
            assert len(set(versions)) > 20
