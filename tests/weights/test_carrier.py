"""Carriers of several nodes: versions arrive whole and in order over slow, faulty and broken links."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time

import numpy as np
import pytest

from libra_hpc.config.run import RunConfig
from libra_hpc.protocol.carriers import Engines, ImageHere, NotStored, PieceRefused, Publish, Stalled, VersionHere
from libra_hpc.protocol.joining import FIRST_GUEST, guest_secret
from libra_hpc.weights.carrier import CarrierConfig, NodeImage
from libra_hpc.weights.image import IMAGE_FILE, Image
from libra_hpc.weights.offers import SPARE
from libra_hpc.weights.pieces import offer_path, payload_path
from libra_hpc.weights.receiver import ArrivingImage
from libra_hpc.weights.wire import BLOCK_BYTES, BURST_S, IDLE_S, call
from tests.weights.chain import COLUMNS, ROWS, WRITER, Chain, here, passed, wait_until
from tests.weights.nodes import SECRET, node_folders

pytestmark = pytest.mark.slow
SIZE = 4 * ROWS * COLUMNS


def test_versions_reach_every_node_whole_and_in_order(chain: Chain) -> None:
    # Who finds that a version was removed takes the image of a newer one.
    chain.keep_all()
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


def test_a_link_without_progress_is_given_up(chain: Chain) -> None:
    chain.link(1, 0, hold_at=3_000_000)
    chain.write(0, -1)
    stalled = chain.nodes[1].wait(Stalled)

    assert 0 < stalled.received < 3_000_000
    assert "rank 0" in stalled.reason
    assert chain.nodes[1].wait(VersionHere).version == 0, "asked again, the link had recovered"
    assert chain.payload(1, 0) == chain.payload(0, 0)


@pytest.mark.parametrize(
    ("at", "reason"), [(5_000_000, "lm_head.weight"), (120, "of rank 1: The manifest has another checksum")]
)
def test_a_flipped_bit_is_refused_by_name_and_comes_again_from_the_writer(chain: Chain, at: int, reason: str) -> None:
    chain.link(2, 1, flip_at=at)
    chain.write(0, -1)
    chain.nodes[2].wait(VersionHere)
    refused = chain.nodes[2].wait(PieceRefused)

    assert (refused.version, refused.writer) == (0, WRITER)
    assert reason in refused.reason
    assert chain.payload(2, 0) == chain.payload(0, 0)
    assert not chain.nodes[1].all(PieceRefused)


@pytest.mark.parametrize("bytes_per_s", [4e6, 32e6])
def test_a_pull_takes_at_least_the_time_of_its_budget(chain: Chain, bytes_per_s: float) -> None:
    chain.nodes.append(guest := chain.node(3, pull_mb_s=bytes_per_s / 1e6))
    chain.write(0, -1)
    came = guest.wait(VersionHere)
    assert came.wire_s >= came.bytes / bytes_per_s - BURST_S
    guest.wait(ImageHere)
    assert chain.payload(0, 0) == chain.payload(3, 0)
    assert not guest.all(PieceRefused) + guest.all(Stalled)


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
    with pytest.raises(OSError, match=r"closed|reset"):
        call(chain.nodes[0].peer, 1, b"another secret")
    stranger = chain.node(3, secret=b"another secret")
    message = Publish(0, -1, ((WRITER, 0),), (chain.nodes[0].peer, stranger.peer))
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


def test_no_image_waits_for_a_node_that_joins_over_a_slow_link(chain: Chain) -> None:
    chain.write(0, -1)
    chain.write(1, 0)
    for node in chain.nodes:
        node.wait(ImageHere, here(1))
    chain.nodes.append(joined := chain.node(3))
    slow = chain.link(3, 2, bytes_per_s=4e6)
    chain.publish(1, 0, 3)
    passed(slow, 1_000_000)
    for version in (2, 3):
        chain.write(version, version - 1)
        chain.nodes[2].wait(ImageHere, here(version))
    assert slow.passed < 7_000_000, "its blocks are still on their way"
    joined.wait(ImageHere, here(3))

    assert [message.version for message in joined.all(ImageHere)][-1] == 3
    assert all(message.version in (1, 2) for message in joined.all(VersionHere) if message.base < 0)
    images = [(node.folder / IMAGE_FILE).read_bytes() for node in chain.nodes]
    assert len(set(images)) == 1


def test_an_image_that_is_cut_off_goes_on_where_it_was(chain: Chain) -> None:
    chain.write(0, -1)
    chain.write(1, 0)
    for node in chain.nodes:
        node.wait(ImageHere, here(1))
    chain.nodes.append(joined := chain.node(3))
    links = [chain.link(3, 2, cut_at=3_000_000), chain.link(3, 1, cut_at=3_000_000), chain.link(3, 0)]
    chain.publish(1, 0, 3)
    joined.wait(ImageHere, here(1))

    whole = (joined.folder / IMAGE_FILE).stat().st_size
    assert sum(link.passed for link in links) < whole + 3 * BLOCK_BYTES


def test_a_writer_waits_for_one_block_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    copied, copying, goes_on = [], threading.Event(), threading.Event()

    def copy(image: Image, begin: int, end: int) -> tuple[int, bytes]:
        copied.append(begin)
        copying.set()
        goes_on.wait()
        return 0, bytes(end - begin)

    monkeypatch.setattr(Image, "block", copy)
    with node_folders() as folder:
        run = RunConfig().changed(model={"dtype": "bfloat16"})
        shapes = {"a.weight": (BLOCK_BYTES,)}
        image = NodeImage(CarrierConfig(run=run, rank=0, folder=str(folder), addresses=(), secret=b"", shapes=shapes))
        blocks = ArrivingImage(folder, image.size)
        blocks.versions[:] = 0
        image.write(0, [blocks])
        reader = threading.Thread(target=image.block, args=(0, 0, BLOCK_BYTES))
        reader.start()
        copying.wait()
        blocks.versions[:] = 1
        writer = threading.Thread(target=image.write, args=(1, [blocks]))
        writer.start()
        wait_until(lambda: image._writes)
        assert image.block(0, BLOCK_BYTES, 2 * BLOCK_BYTES) is None, "who comes later waits"
        goes_on.set()
        writer.join()
        reader.join()
        assert (copied, image.version) == ([0], 1)


def test_a_version_that_no_node_can_send_is_passed_over_for_one_that_needs_nothing(chain: Chain) -> None:
    receiver = chain.nodes[2]
    chain.publish(1, -1, 2)  # nobody wrote it
    receiver.wait(Stalled)
    chain.write(2, -1)
    receiver.wait(ImageHere, here(2))

    assert [message.version for message in receiver.all(VersionHere)] == [2]


def test_a_full_shared_memory_is_one_sentence_and_the_version_comes_later(chain: Chain) -> None:
    target = payload_path(offer_path(chain.nodes[1].folder, 0, WRITER))
    target.mkdir()
    (target / "in the way").touch()
    chain.write(0, -1)
    chain.nodes[1].wait(NotStored)
    (target / "in the way").unlink()
    target.rmdir()

    assert chain.nodes[1].wait(VersionHere).version == 0


def test_guests_get_versions_and_images_of_each_other_over_one_link(chain: Chain) -> None:
    chain.keep_all()
    chain.write(0, -1)
    chain.write(1, 0)
    for node in chain.nodes:
        node.wait(ImageHere, here(1))
    guests = range(FIRST_GUEST, FIRST_GUEST + 4)
    for rank in guests:
        chain.nodes.append(chain.node(rank, secret=guest_secret(SECRET)))
    for rank, own in itertools.product(guests, range(3)):
        chain.link(rank, own, bytes_per_s=8e6)
    chain.publish(1, 0, *guests)
    for node in chain.nodes[3:]:
        node.wait(ImageHere, here(1))
    carried = sum(link.passed for link in chain.links.values())
    assert carried < 2 * SIZE, "not one transfer a guest"
    chain.write(2, -1)
    for node in chain.nodes:
        node.wait(ImageHere, here(2))
    assert sum(link.passed for link in chain.links.values()) - carried < 2 * SIZE
    assert len({(node.folder / IMAGE_FILE).read_bytes() for node in (chain.nodes[0], *chain.nodes[3:])}) == 1


def test_a_guest_that_leaves_harms_nobody_behind_it(chain: Chain) -> None:
    for rank in (guests := (FIRST_GUEST, FIRST_GUEST + 1)):
        chain.nodes.append(chain.node(rank, secret=guest_secret(SECRET)))
    slow = chain.link(guests[0], 2, bytes_per_s=8e6)
    chain.write(0, -1)
    passed(slow, 4_000_000)
    chain.nodes[3].kill()
    chain.nodes[4].wait(ImageHere)
    assert chain.payload(0, 0) == chain.payload(4, 0)
