"""Weights pulled by another cluster over HTTP: a trainer of two tensor ranks and two copies, an engine of TP 4."""

from __future__ import annotations

import itertools
import math
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from libra_hpc.protocol.carriers import CarrierReady, ImageHere, Publish
from libra_hpc.weights.image import reading
from libra_hpc.weights.offers import OfferStore
from libra_hpc.weights.pieces import TensorBlock, payload_path
from libra_hpc.weights.served_weights import ServedWeights, reading_secret
from libra_hpc.weights.transport import http_server
from libra_hpc.weights.transport.http_proof import PART_BYTES, VERSION, NotServed, Refused, request_proof
from libra_hpc.weights.transport.http_server import HttpServer, Part
from libra_hpc.weights.transport.token_bucket import BURST_S, TokenBucket
from libra_hpc.weights.weightfile import WeightFileError
from tests.weights import http_caller, http_pull
from tests.weights.http_caller import HttpSource
from tests.weights.http_pull import HttpPuller, PulledImage, image_target, wanted_blocks
from tests.weights.nodes import SECRET as SECRET_OF_NODES
from tests.weights.nodes import CarrierNode, FaultyLink, node_folders
from tests.weights.outside_nodes import DTYPE, SECRET, SHAPE, SHAPES, TP, Lender, TrainNode, region, wanted

pytestmark = pytest.mark.slow


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def folder(stack: ExitStack) -> Path:
    return stack.enter_context(node_folders())


@pytest.fixture
def node(stack: ExitStack, folder: Path) -> TrainNode:
    node = TrainNode(folder / "node")
    stack.callback(node.close)
    return node


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_caller, "RETRY_S", 0.01)


def test_an_engine_of_another_tp_takes_what_its_rank_needs_and_equals_a_full_load(
    node: TrainNode, folder: Path
) -> None:
    lender = Lender(folder / "lender", node.port)

    assert lender.puller.pull() == 0
    assert node.weights.image == sum(int(mask.sum()) for mask in wanted().values()) * 2
    assert lender.holds(node)

    seen = node.weights.image
    offers = [one for share in (0.002, 0.03, 0.3) for one in node.step(share)]
    assert lender.puller.pull() == 3
    assert lender.holds(node)
    assert node.weights.image == seen, "the deltas were enough"
    masks = wanted()
    met = [p for o in offers for p in o.offer.pieces if region(masks[p.block.tensor], p.block).any()]
    needed = sum(piece.size for piece in met)
    assert needed <= node.weights.payload < needed + 8 * len(met), "and of them the pieces with elements of the rank"
    assert node.weights.payload < 0.5 * sum(one.size for one in offers)


def test_ranks_of_one_node_share_an_image(node: TrainNode, folder: Path) -> None:
    (folder / "lender").mkdir()
    blocks = wanted_blocks(SHAPE, TP, range(TP))
    image = PulledImage(folder / "lender", SHAPES, DTYPE)
    HttpPuller(HttpSource("127.0.0.1", node.port, reading_secret(SECRET)), image, blocks).pull()

    assert image.path.read_bytes() == node.image.path.read_bytes()
    assert node.weights.image == sum(map(math.prod, SHAPES.values())) * 2, "what all have came once"


def test_without_the_secret_nothing_is_served(node: TrainNode, folder: Path) -> None:
    node.step()
    for path in ("/weights", "/offers/1/t0/manifest", "/offers/1/t0/payload", "/image?tensor=x", "/else"):
        for header in ("", "Libra", "Libra a b", "Bearer of this run", "Libra \xe9 \xe9"):
            request = urllib.request.Request(f"http://127.0.0.1:{node.port}{path}", headers={"Authorization": header})
            with pytest.raises(urllib.error.HTTPError) as raised:
                urllib.request.urlopen(request)
            assert raised.value.code == 401
            assert not raised.value.read()
            assert VERSION not in raised.value.headers
    with pytest.raises(Refused, match="has another secret"):
        Lender(folder / "lender", node.port, b"another").puller.pull()
    assert not node.weights.image


def test_a_request_cannot_be_repeated_on_another_connection(node: TrainNode) -> None:
    with ExitStack() as stack:
        address = ("127.0.0.1", node.port)
        first, second = (stack.enter_context(socket.create_connection(address)) for _ in range(2))
        nonce = re.search(rb"Libra (\w+)", exchange(first, "x y"))
        assert nonce
        proof = request_proof(reading_secret(SECRET), (nonce[1].decode(), "own"), "/weights", "")

        assert exchange(first, f"own {proof}").startswith(b"HTTP/1.1 206 ")
        assert exchange(second, f"own {proof}").startswith(b"HTTP/1.1 401 ")


def exchange(stream: socket.socket, words: str) -> bytes:
    """The first bytes of the answer to a request with this authorization."""
    stream.sendall(f"GET /weights HTTP/1.1\r\nAuthorization: Libra {words}\r\n\r\n".encode())
    return stream.recv(1 << 16)


def test_a_server_without_the_secret_is_not_believed(
    node: TrainNode, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = reading_secret(SECRET)
    monkeypatch.setattr(http_server, "request_proof", lambda secret, *rest: request_proof(own, *rest))
    monkeypatch.setattr(node._server, "secret", b"another")
    stranger = Lender(folder / "lender", node.port)
    with pytest.raises(ConnectionError, match="without proof"):
        stranger.puller.pull()
    with pytest.raises(WeightFileError, match="no whole version"), reading(stranger.image.path):
        pass


@pytest.mark.parametrize("fault", ["flip_at", "cut_at"])
@pytest.mark.parametrize("at", [200, 300_000, 2_000_000])
def test_what_broke_or_changed_on_the_way_comes_again_and_only_that(
    node: TrainNode, folder: Path, stack: ExitStack, fault: str, at: int
) -> None:
    link = FaultyLink(node.port, **{fault: at})
    stack.callback(link.close)
    lender = Lender(folder / "lender", link.port)
    lender.puller.pull()

    assert lender.holds(node)
    assert link.passed > at
    needed = sum(int(mask.sum()) for mask in wanted().values()) * 2
    assert node.weights.image <= needed + http_pull.STREAMS * min(PART_BYTES, needed // 2)


def test_a_call_that_failed_goes_on_where_it_was(
    node: TrainNode, folder: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_caller, "TRIES", 1)
    monkeypatch.setattr(http_pull, "STREAMS", 1)
    link = FaultyLink(node.port, cut_at=1_200_000)
    stack.callback(link.close)
    lender = Lender(folder / "lender", link.port)
    with pytest.raises(ConnectionError):
        lender.puller.pull()
    first = node.weights.image
    with pytest.raises(WeightFileError), reading(lender.image.path):
        pass
    node.step()
    lender.puller.pull()

    assert lender.holds(node)
    needed = sum(int(mask.sum()) for mask in wanted().values()) * 2
    assert first < needed, "it broke within"
    assert node.weights.image < needed + first, "what had come did not come again"
    assert node.weights.payload, "and was brought up to date by what changed since"


def test_the_image_may_go_on_while_it_is_pulled(node: TrainNode, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parts then have several versions, and the deltas make them one."""
    monkeypatch.setattr(http_pull, "STREAMS", 1)
    lender = Lender(folder / "lender", node.port)
    read, count = node.weights.read, itertools.count()

    def trained_beside(target: str, begin: int, end: int) -> Part:
        if target.startswith("/image") and next(count) % 5 == 0:
            node.step()
        return read(target, begin, end)

    monkeypatch.setattr(node.weights, "read", trained_beside)
    version = lender.puller.pull()

    assert version > 2
    assert lender.holds(node)


def test_a_delta_that_is_not_held_any_more_means_whole_weights(node: TrainNode, folder: Path) -> None:
    lender = Lender(folder / "lender", node.port)
    lender.puller.pull()
    once = node.weights.image
    for offer in node.step():
        node.store.drop(offer)
    node.step()
    lender.puller.pull()

    assert lender.holds(node)
    assert node.weights.image == 2 * once


@pytest.mark.parametrize("harm", ["flip", "truncate", "manifest"])
def test_a_damaged_offer_is_refused_and_the_weights_come_whole(
    node: TrainNode, folder: Path, caplog: pytest.LogCaptureFixture, harm: str
) -> None:
    lender = Lender(folder / "lender", node.port)
    lender.puller.pull()
    once = node.weights.image
    masks = wanted()
    hurt = next(
        (one, piece)
        for one in node.step()
        for piece in one.offer.pieces
        if piece.block.tensor.endswith("up_proj.weight") and region(masks[piece.block.tensor], piece.block).any()
    )
    offer, piece = hurt
    data = bytearray(payload_path(offer.path).read_bytes())
    if harm == "flip":
        data[piece.at] ^= 1
        payload_path(offer.path).write_bytes(data)
    elif harm == "truncate":
        payload_path(offer.path).write_bytes(data[: piece.at])
    else:
        offer.manifest = offer.manifest[:-5]
    lender.puller.pull()

    assert lender.holds(node)
    assert node.weights.image > once
    if harm == "flip":
        assert node.weights.image < 1.2 * once, "one tensor"
        assert piece.block.tensor in caplog.text


def test_another_start_of_the_run_has_other_versions(node: TrainNode, folder: Path, stack: ExitStack) -> None:
    Lender(folder / "lender", node.port).puller.pull()
    second = TrainNode(folder / "second", b"of the next start")
    stack.callback(second.close)
    second.step()
    again = Lender(folder / "lender", second.port, b"of the next start")
    again.puller.pull()

    assert again.holds(second)
    assert not second.weights.payload, "its delta does not change what is here"


def test_a_lender_that_was_stopped_goes_on_with_its_image(node: TrainNode, folder: Path) -> None:
    Lender(folder / "lender", node.port).puller.pull()
    once = node.weights.image
    node.step()
    again = Lender(folder / "lender", node.port)
    again.puller.pull()

    assert again.holds(node)
    assert node.weights.image == once


def test_before_the_first_version_there_is_none(folder: Path, stack: ExitStack) -> None:
    (folder / "empty").mkdir()
    listener = socket.create_server(("127.0.0.1", 0))
    server = HttpServer(
        listener, reading_secret(SECRET), ServedWeights(folder / "empty", SHAPES, DTYPE, OfferStore(0)).read, 1e9
    )
    server.start()
    stack.callback(server.server_close)
    stack.callback(server.shutdown)
    with pytest.raises(NotServed, match="image"):
        Lender(folder / "lender", listener.getsockname()[1]).puller.pull()


@pytest.mark.parametrize(
    "block",
    [
        TensorBlock("lm_head.weight", 0, 8_201, 256, 256),
        TensorBlock("lm_head.weight", -1, 1, 1, 256),
        TensorBlock("lm_head.weight", 0, 0, 1, 256),
        TensorBlock("lm_head.weight", 0, 2, 256, 1),
        TensorBlock("another.weight", 0, 1, 1, 256),
    ],
)
def test_a_block_of_another_model_is_refused(node: TrainNode, folder: Path, block: TensorBlock) -> None:
    lender = Lender(folder / "lender", node.port)
    with pytest.raises(Refused, match="is no block of"):
        lender.puller._caller.read(image_target(block))


def test_a_carrier_serves_another_cluster_what_it_received(folder: Path, stack: ExitStack) -> None:
    node = TrainNode(folder / "node")
    stack.callback(node.close)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    carrier = CarrierNode(folder / "carrier", 0, SHAPES, http_port=port)
    stack.callback(carrier.close)
    lender = Lender(folder / "lender", port, SECRET_OF_NODES)
    with pytest.raises(NotServed):
        lender.puller.pull()
    for version in range(3):
        writers = [f"t{number}" for number in range(4)]
        for path in node.folder.glob(f"offer-{version:08d}-*"):
            path.rename(carrier.folder / path.name)
        base = version - 1
        carrier.send(Publish(version, base, tuple((writer, 0) for writer in writers), (carrier.peer,)))
        carrier.wait(ImageHere, lambda message: message.version == node.version)
        assert lender.puller.pull() == version
        assert lender.holds(node)
        node.step()


def test_a_port_that_is_taken_is_reported_and_the_carrier_works(folder: Path, stack: ExitStack) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        carrier = CarrierNode(folder / "carrier", 0, SHAPES, http_port=port)
        stack.callback(carrier.close)

    assert carrier.wait(CarrierReady).http_fault == f"rollout.weights_port = {port}: Address already in use"


def test_a_budget_is_kept_over_time_and_pauses_are_not_saved_up() -> None:
    bucket, now, sent = TokenBucket(1000.0), 10.0, 0
    for _ in range(100):
        now += bucket.delay_s(100, now)
        sent += 100
    assert sent / 1000.0 - BURST_S - 0.1 <= now - 10.0 <= sent / 1000.0
    now += 100.0
    burst = 0
    while not bucket.delay_s(100, now):
        burst += 100
    assert burst <= 1000 * BURST_S + 100


def test_all_callers_share_the_budget(folder: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """In seconds that the server was told to wait, not in those that passed."""
    node = TrainNode(folder / "node", bytes_per_s=20e6)
    stack.callback(node.close)
    taken: list[tuple[int, float]] = []
    delay_s = TokenBucket.delay_s

    def noted(bucket: TokenBucket, count: int, now: float) -> float:
        taken.append((count, now))
        return delay_s(bucket, count, now)

    monkeypatch.setattr(TokenBucket, "delay_s", noted)
    lender = Lender(folder / "lender", node.port)
    lender.puller.pull()

    assert lender.holds(node)
    assert sum(count for count, _ in taken) >= node.weights.image
    seconds = taken[-1][1] - taken[0][1]
    assert sum(count for count, _ in taken[: -http_pull.STREAMS]) <= 20e6 * (seconds + BURST_S) + 65536
