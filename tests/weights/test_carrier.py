"""Carriers of several nodes: versions arrive whole and in order over slow, faulty and broken links."""

from __future__ import annotations

import itertools
import os
import signal
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from libra_hpc.protocol.carriers import (
    Engines,
    ImageHere,
    NotStored,
    Peer,
    PieceRefused,
    PolicySaved,
    Publish,
    SavePolicy,
    Stalled,
    VersionHere,
)
from libra_hpc.weights.image import IMAGE_FILE
from libra_hpc.weights.offers import SPARE
from libra_hpc.weights.pieces import Encoded, TensorBlock, elements, offer_path, payload_path, write_offer
from libra_hpc.weights.wire import IDLE_S, WireError, call
from tests.weights.nodes import CarrierNode, FaultyLink, bits, node_folders

ROWS, COLUMNS = 1024, 2048
SHAPES: dict[str, tuple[int, int]] = {
    "model.embed_tokens.weight": (ROWS, COLUMNS),
    "model.norm.weight": (1, 3),
    "lm_head.weight": (ROWS, COLUMNS),
}
"""8 MiB, in tensors of which one leaves the next at an odd place."""
OWNER = "t0.0"


class Chain:
    """Node 0 writes offers; the others receive them in the order of their ranks."""

    def __init__(self, stack: ExitStack, folder: Path, nodes: int) -> None:
        self._stack, self._folder = stack, folder
        self.nodes = [self.node(rank) for rank in range(nodes)]
        self.links: dict[tuple[int, int], FaultyLink] = {}

    def node(self, rank: int, **options: bytes) -> CarrierNode:
        node = CarrierNode(self._folder / f"node{rank}-{time.monotonic_ns()}", rank, SHAPES, **options)
        self._stack.callback(node.close)
        return node

    def link(self, caller: int, server: int, **faults: float) -> FaultyLink:
        """What ``caller`` gets of ``server`` passes a link with these faults."""
        link = FaultyLink(self.nodes[server].port, **faults)  # type: ignore[arg-type]
        self._stack.callback(link.close)
        self.links[caller, server] = link
        return link

    def peers(self, caller: int) -> tuple[Peer, ...]:
        def port(node: CarrierNode) -> int:
            return self.links[caller, node.rank].port if (caller, node.rank) in self.links else node.port

        return tuple(Peer(node.rank, ("127.0.0.1",), port(node)) for node in self.nodes)

    def write(self, version: int, base: int, folder: Path | None = None, truncate: bool = False) -> None:
        """Offer all weights (base -1), or every other row of the first tensor, and publish; not in ``folder``."""
        data = bits(version, ROWS * COLUMNS)
        if base < 0:
            blocks = [TensorBlock(name, 0, rows, columns, columns) for name, (rows, columns) in SHAPES.items()]
            encoded = [(block, data[: elements(block)]) for block in blocks]
        else:
            encoded = [
                (TensorBlock("model.embed_tokens.weight", 0, ROWS // 2, COLUMNS, 2 * COLUMNS), data[: len(data) // 2])
            ]
        write_offer(
            folder or self.nodes[0].folder,
            version,
            base,
            OWNER,
            [Encoded(block, "BF16", "dense", values.size, (values,)) for block, values in encoded],
        )
        if truncate:
            os.truncate(payload_path(offer_path(self.nodes[0].folder, version, OWNER)), 1_000_000)
        if folder is None:
            self.publish(version, base)

    def keep_all(self) -> None:
        """The owner removes no version: an engine of its node needs all."""
        self.nodes[0].send(Engines(-1))

    def publish(self, version: int, base: int, *ranks: int) -> None:
        for node in self.nodes:
            if not ranks or node.rank in ranks:
                node.send(Publish(version, base, ((OWNER, 0),), self.peers(node.rank)))

    def payload(self, rank: int, version: int) -> bytes:
        return payload_path(offer_path(self.nodes[rank].folder, version, OWNER)).read_bytes()


@pytest.fixture
def chain() -> Iterator[Chain]:
    with node_folders() as folder, ExitStack() as stack:
        yield Chain(stack, folder, 3)


def wait_until(true: Callable[[], bool]) -> None:
    while not true():
        time.sleep(0.01)


def passed(link: FaultyLink, count: int) -> None:
    wait_until(lambda: link.passed >= count)


def here(version: int) -> Callable[[Any], bool]:
    return lambda message: message.version >= version


def test_versions_reach_every_node_whole_and_in_order(chain: Chain) -> None:
    chain.write(0, -1)
    for version in (1, 2, 3):
        chain.write(version, version - 1)
    for node in chain.nodes:
        node.wait(ImageHere, here(3))
        assert [message.version for message in node.all(VersionHere)] == [0, 1, 2, 3]
        assert not node.all(PieceRefused)
        assert not node.all(Stalled)
    for version in (2, 3):
        assert chain.payload(0, version) == chain.payload(1, version) == chain.payload(2, version)
    # What comes again or late is passed over.
    for version in (3, 1):
        chain.publish(version, version - 1)
    chain.write(4, 3)
    for node in chain.nodes:
        node.wait(ImageHere, here(4))
        assert [message.version for message in node.all(VersionHere)] == [0, 1, 2, 3, 4]
        assert [message.version for message in node.all(ImageHere)] == [0, 1, 2, 3, 4]


def test_whole_versions_arrive_in_the_pages_of_removed_ones_and_changes_free_them(chain: Chain) -> None:
    def spares() -> int:
        return len(list(chain.nodes[2].folder.glob(SPARE.format("*"))))

    for version in range(6):
        chain.write(version, -1)
        for node in chain.nodes:
            node.wait(ImageHere, here(version))
            node.send(Engines(version))
    assert chain.payload(2, 5) == chain.payload(0, 5)
    wait_until(lambda: spares() > 0)
    for version in (6, 7, 8):
        chain.write(version, version - 1)
        for node in chain.nodes:
            node.wait(ImageHere, here(version))
            node.send(Engines(version))
    assert spares() == 0


def test_a_node_sends_on_what_it_has_so_far(chain: Chain) -> None:
    chain.link(1, 0, bytes_per_s=8e6)
    onward = chain.link(2, 1)
    chain.write(0, -1)
    passed(onward, 4_000_000)

    assert not chain.nodes[1].all(VersionHere)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_those_behind_a_lost_node_go_on_where_they_were_with_the_one_before_it(
    chain: Chain, number: signal.Signals
) -> None:
    slow = chain.link(1, 0, bytes_per_s=8e6)
    direct = chain.link(2, 0)
    chain.write(0, -1)
    passed(slow, 4_000_000)
    lost = time.monotonic()
    os.kill(chain.nodes[1].process.pid, number)

    message = chain.nodes[2].wait(VersionHere)

    assert chain.nodes[2].when(message) - lost < IDLE_S, "a broken or silent connection was noticed"
    assert direct.passed < 6_000_000, "what had come of it was received again"
    assert chain.payload(2, 0) == chain.payload(0, 0)


def test_a_slow_node_holds_up_nobody_before_it(chain: Chain) -> None:
    slow = chain.link(2, 1, bytes_per_s=8e6)
    chain.write(0, -1)
    chain.nodes[1].wait(VersionHere)

    assert slow.passed < 6_000_000
    chain.nodes[2].wait(VersionHere)


def test_a_link_without_progress_is_given_up(chain: Chain) -> None:
    chain.link(1, 0, hold_at=3_000_000)
    chain.write(0, -1)
    stalled = chain.nodes[1].wait(Stalled)

    assert 0 < stalled.received < 3_000_000
    assert "rank 0" in stalled.reason
    assert chain.nodes[1].wait(VersionHere).version == 0, "asked again, the link had recovered"
    assert chain.payload(1, 0) == chain.payload(0, 0)


def test_a_flipped_bit_is_refused_by_name_and_comes_again_from_the_owner(chain: Chain) -> None:
    chain.link(2, 1, flip_at=5_000_000)
    chain.write(0, -1)
    refused = chain.nodes[2].wait(PieceRefused)
    chain.nodes[2].wait(VersionHere)

    assert (refused.version, refused.owner) == (0, OWNER)
    assert "lm_head.weight" in refused.reason
    assert chain.payload(2, 0) == chain.payload(0, 0)
    assert not chain.nodes[1].all(PieceRefused)


def test_a_manifest_that_was_changed_on_the_way_is_refused_and_asked_for_again(chain: Chain) -> None:
    chain.link(2, 1, flip_at=120)
    chain.write(0, -1)
    chain.nodes[2].wait(VersionHere)

    assert "of rank 1: The manifest has another checksum" in chain.nodes[2].wait(PieceRefused).reason
    assert chain.payload(2, 0) == chain.payload(0, 0)


def test_a_foreign_offer_under_a_published_name_is_refused(chain: Chain) -> None:
    chain.write(0, -1)
    for node in chain.nodes:
        node.wait(VersionHere)
    chain.write(1, 0)
    chain.nodes[1].wait(VersionHere, here(1))
    # The owner of version 3 has a manifest of version 1 in its place.
    source, target = (offer_path(chain.nodes[0].folder, version, OWNER) for version in (1, 3))
    target.write_bytes(source.read_bytes())
    payload_path(target).write_bytes(payload_path(source).read_bytes())
    chain.publish(3, 1)

    refused = chain.nodes[0].wait(PieceRefused)

    assert (refused.version, refused.own) == (3, True)
    assert "version 1 of" in refused.reason
    assert all(message.version < 3 for node in chain.nodes for message in node.all(VersionHere))


def test_a_truncated_offer_is_refused_by_its_own_node_and_replaced_by_whole_tensors(chain: Chain) -> None:
    chain.write(0, -1)
    for node in chain.nodes:
        node.wait(ImageHere)
    image = chain.nodes[2].folder / IMAGE_FILE
    before = image.read_bytes()
    chain.write(1, 0, truncate=True)
    refused = chain.nodes[0].wait(PieceRefused)
    assert refused.own
    assert "its payload has" in refused.reason
    assert image.read_bytes() == before, "the old version serves on"

    chain.write(1, -1)

    for node in chain.nodes:
        node.wait(ImageHere, here(1))
    assert chain.payload(2, 1) == chain.payload(0, 1)


def test_who_does_not_have_the_secret_gets_and_serves_nothing(chain: Chain) -> None:
    chain.write(0, -1)
    chain.nodes[1].wait(VersionHere)
    with pytest.raises((OSError, WireError)):
        call(chain.nodes[0].peer, 1, b"another secret")
    stranger = chain.node(3, secret=b"another secret")
    message = Publish(0, -1, ((OWNER, 0),), (chain.nodes[0].peer, stranger.peer))
    stranger.send(message)

    assert "rank 0" in stranger.wait(Stalled).reason
    assert not stranger.all(VersionHere)


@pytest.mark.parametrize(("whole", "rate"), [(False, 8e6), (True, 32e6)], ids=["changes", "whole tensors"])
def test_versions_keep_arriving_while_newer_ones_are_published_four_times_as_fast(
    chain: Chain, whole: bool, rate: float
) -> None:
    """A version that has begun is finished.  Who lacks more changes than an image has bytes takes an image."""
    chain.write(0, -1)
    receiver = chain.nodes[1]
    receiver.wait(ImageHere)
    chain.link(1, 0, bytes_per_s=rate)
    version = 0
    while len(receiver.all(VersionHere)) < 5:
        version += 1
        assert version < 200, "versions were published, and did not arrive"
        chain.write(version, -1 if whole else version - 1)
        time.sleep(0.06)
    chain.nodes[2].wait(ImageHere, here(version))

    found = receiver.all(VersionHere)
    assert [message.version for message in found[:2]] == [0, 1], "the first one that had begun"
    for earlier, later in itertools.pairwise(found):
        assert later.version > earlier.version
        assert later.base in (-1, earlier.version)
    assert not whole or len(found) <= version, "what had not begun was left out"
    assert not any(node.all(Stalled) for node in chain.nodes)


def test_a_node_that_joins_takes_the_image_of_another_and_then_what_changed(chain: Chain) -> None:
    chain.write(0, -1)
    chain.write(1, 0)
    chain.nodes[1].wait(ImageHere, here(1))
    chain.nodes[0].wait(ImageHere, here(1))
    chain.nodes.append(joined := chain.node(3))
    chain.publish(1, 0, 3)
    joined.wait(ImageHere, here(1))
    chain.write(2, 1)
    joined.wait(ImageHere, here(2))

    assert [(message.version, message.base) for message in joined.all(VersionHere)] == [(1, -1), (2, 1)]
    chain.nodes[1].wait(ImageHere, here(2))
    images = [np.fromfile(node.folder / "image.safetensors", np.int16) for node in (chain.nodes[1], joined)]
    assert np.array_equal(images[0], images[1])


def test_a_version_that_no_node_can_send_is_passed_over_for_one_that_needs_nothing(chain: Chain) -> None:
    receiver = chain.nodes[2]
    chain.publish(1, -1, 2)  # nobody wrote it
    receiver.wait(Stalled)
    chain.write(2, -1)
    receiver.wait(ImageHere, here(2))

    assert [message.version for message in receiver.all(VersionHere)] == [2]


def test_a_full_shared_memory_is_one_sentence_and_the_version_comes_later(chain: Chain) -> None:
    target = payload_path(offer_path(chain.nodes[1].folder, 0, OWNER))
    target.mkdir()
    (target / "in the way").touch()
    chain.write(0, -1)
    chain.nodes[1].wait(NotStored)
    (target / "in the way").unlink()
    target.rmdir()

    assert chain.nodes[1].wait(VersionHere).version == 0


def test_a_checkpoint_gets_the_weights_of_its_version_while_newer_ones_pass(chain: Chain, tmp_path: Path) -> None:
    """The order comes while its version has yet to arrive; several newer ones are already published behind it."""
    node, expected = chain.nodes[1], tmp_path / "expected.safetensors"
    chain.link(1, 0, bytes_per_s=16e6)
    path = tmp_path / "step-000002" / "policy" / "model.safetensors"
    chain.keep_all()
    node.send(SavePolicy(2, str(path)))
    for version in range(6):
        chain.write(version, version - 1)
    saved = node.wait(PolicySaved)
    node.wait(ImageHere, here(5))

    alone = chain.node(9)
    for version in range(3):
        chain.write(version, version - 1, folder=alone.folder)
        alone.send(Publish(version, version - 1, ((OWNER, 9),), (alone.peer,)))
    alone.wait(ImageHere, here(2))
    expected.write_bytes((alone.folder / IMAGE_FILE).read_bytes())

    data = path.read_bytes()
    assert data == expected.read_bytes()
    assert data != (node.folder / IMAGE_FILE).read_bytes()
    assert (saved.path, saved.size, saved.crc32, saved.reason) == (str(path), len(data), zlib.crc32(data), "")
    assert [message.version for message in node.all(ImageHere)] == list(range(6))


def test_the_version_of_a_checkpoint_does_not_give_way_to_newer_ones(chain: Chain, tmp_path: Path) -> None:
    node = chain.nodes[1]
    link = chain.link(1, 0, bytes_per_s=16e6)
    chain.write(0, -1)
    passed(link, 1_000_000)
    chain.keep_all()
    node.send(SavePolicy(2, str(tmp_path / "model.safetensors")))
    for version in range(1, 5):
        chain.write(version, -1)
    node.wait(ImageHere, here(4))
    assert node.wait(PolicySaved).reason == ""
    assert [message.version for message in node.all(ImageHere)] == [0, 2, 4]


def test_a_version_that_has_passed_and_one_that_is_not_needed_any_more_are_answered(
    chain: Chain, tmp_path: Path
) -> None:
    node, path = chain.nodes[0], tmp_path / "model.safetensors"
    node.send(SavePolicy(7, f"{path}.7"))
    node.send(SavePolicy(-1, ""))
    chain.write(0, -1)
    chain.write(1, 0)
    node.wait(ImageHere, here(1))
    node.send(SavePolicy(0, str(path)))
    reasons = {
        answer.path: answer.reason
        for answer in (
            node.wait(PolicySaved, lambda answer: answer.path == f"{path}.7"),
            node.wait(PolicySaved, lambda answer: answer.path == str(path)),
        )
    }
    assert "not needed any more" in reasons[f"{path}.7"]
    assert "has version 1, not 0" in reasons[str(path)]
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_named_and_the_image_goes_on(chain: Chain, tmp_path: Path) -> None:
    node = chain.nodes[0]
    (tmp_path / "file").write_text("no folder")
    chain.write(0, -1)
    node.send(SavePolicy(0, str(tmp_path / "file" / "model.safetensors")))
    assert str(tmp_path / "file") in node.wait(PolicySaved).reason
    chain.write(1, 0)
    node.wait(ImageHere, here(1))
