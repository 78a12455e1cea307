"""Weights served to another cluster over HTTP: to whom, what, and at which rate."""

from __future__ import annotations

import math
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest

from libra_hpc.protocol.callers import PROVE_S
from libra_hpc.protocol.carriers import CarrierReady, ImageHere
from libra_hpc.weights.delta import dense, sparse
from libra_hpc.weights.image import Image
from libra_hpc.weights.offers import OfferStore, StoredOffer
from libra_hpc.weights.pieces import WHOLE, TensorBlock, elements, offer_path, write_offer
from libra_hpc.weights.served_weights import ServedDelta, ServedWeights, reading_secret
from libra_hpc.weights.transport import http_server
from libra_hpc.weights.transport.http_proof import VERSION, NotServed, Refused, request_proof
from libra_hpc.weights.transport.http_server import HttpServer, Part
from libra_hpc.weights.transport.token_bucket import BURST_S, TokenBucket
from tests.weights.chain import SHAPES as SHAPES_OF_CHAIN
from tests.weights.chain import Chain, here
from tests.weights.http_client import HttpCaller, Weights, image_target, pull, view
from tests.weights.nodes import SECRET as SECRET_OF_NODES
from tests.weights.nodes import bits, node_folders

pytestmark = pytest.mark.slow

COLUMNS = 2047
SHAPES = {"a.weight": (1500, COLUMNS), "b.weight": (3,)}
"""6 MB, so that the first tensor comes in several answers; one ends within a row."""
OFFERED = {
    "t0": [TensorBlock("a.weight", 0, 700, COLUMNS, COLUMNS)],
    "t1": [TensorBlock("a.weight", 700 * COLUMNS, 800, COLUMNS, COLUMNS), TensorBlock("b.weight", 0, 1, 3, 3)],
}
WANTED = [TensorBlock("a.weight", 5, 1500, COLUMNS - 7, COLUMNS), TensorBlock("b.weight", 1, 1, 2, 2)]
SECRET = b"of this run"


class ServingNode:
    """Two trainers offer, the image follows, and the server reads both."""

    def __init__(self, folder: Path, bytes_per_s: float = 1e12) -> None:
        self.folder, self.image = folder, Image(folder, SHAPES, "BF16")
        self.store = OfferStore(cap_bytes=1 << 40)
        self.weights = ServedWeights(folder, SHAPES, "BF16", self.store)
        self.asked: list[str] = []
        self.before_read: Callable[[str], object] = self.asked.append
        listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = listener.getsockname()[1]
        self.server = HttpServer(listener, reading_secret(SECRET), self._read, bytes_per_s)
        # Its own thread looks for the end every half second.
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.values = {name: bits(7, math.prod(size)) for name, size in SHAPES.items()}
        self.version = WHOLE

    def _read(self, target: str, begin: int, end: int) -> Part:
        self.before_read(target)
        return self.weights.read(target, begin, end)

    def step(self) -> list[StoredOffer]:
        """Every 31st element of each block changes, and is offered; the first version is whole."""
        base, self.version = self.version, self.version + 1
        offers = []
        for writer, blocks in OFFERED.items():
            encoded = []
            for block in blocks:
                own, index = view(self.values, block), np.arange(0, elements(block), 31, np.int32)
                own[index // block.cols, index % block.cols] += 1
                flat = own.reshape(-1)
                changed = sparse(block, "BF16", "gap8", index, flat[index])
                encoded.append(dense(block, "BF16", flat) if base == WHOLE else changed)
            offer = write_offer(self.folder, self.version, base, writer, encoded)
            path = offer_path(self.folder, self.version, writer)
            offers.append(StoredOffer(offer, path.read_bytes(), path))
            self.store.add(offers[-1])
        self.weights.add(ServedDelta(self.version, base, tuple(OFFERED)))
        self.image.apply(self.version, [(one.offer, one.payload) for one in offers])
        return offers

    def equals(self, weights: Weights) -> bool:
        return all(np.array_equal(view(weights, block), view(self.values, block)) for block in WANTED)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def folder(stack: ExitStack) -> Path:
    return stack.enter_context(node_folders())


@pytest.fixture
def node(stack: ExitStack, folder: Path) -> ServingNode:
    node = ServingNode(folder)
    stack.callback(node.server.server_close)
    stack.callback(node.server.shutdown)
    return node


def caller_of(node: ServingNode, secret: bytes = SECRET) -> HttpCaller:
    return HttpCaller(node.port, reading_secret(secret))


def nothing() -> Weights:
    return {name: np.zeros(math.prod(size), np.int16) for name, size in SHAPES.items()}


def test_another_cluster_gets_blocks_of_the_image_and_then_what_changed(node: ServingNode) -> None:
    caller, weights = caller_of(node), nothing()
    with pytest.raises(NotServed, match="no whole version"):
        pull(caller, weights, WANTED)
    node.step()
    assert pull(caller, weights, WANTED) == 0
    assert node.equals(weights)
    node.asked.clear()
    for _ in range(3):
        offers = node.step()
    assert pull(caller, weights, WANTED, 0) == 3
    assert node.equals(weights)
    assert not any(target.startswith("/image") for target in node.asked), "the deltas were enough"
    node.store.drop(offers[0])
    node.step()
    with pytest.raises(NotServed, match="version 3 of t0 is not stored"):
        caller.read("/offers/3/t0/manifest")
    assert pull(caller, weights, WANTED, 2) == 4
    assert node.equals(weights)
    assert any(target.startswith("/image") for target in node.asked), "no deltas lead from 2 to 4"


def test_the_image_may_go_on_while_it_is_pulled(node: ServingNode) -> None:
    """Its parts then have several versions, and the deltas make them one."""
    node.step()
    node.before_read = lambda target: target.startswith("/image") and node.step()
    weights = nothing()
    assert pull(caller_of(node), weights, WANTED) == node.version == 3
    assert node.equals(weights)


def test_without_the_secret_nothing_is_served(node: ServingNode) -> None:
    node.step()
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
        caller_of(node, b"another").read("/weights")
    assert not node.asked


def test_a_request_cannot_be_repeated_on_another_connection(node: ServingNode) -> None:
    node.step()
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


def test_an_answer_proves_the_servers_secret(node: ServingNode, monkeypatch: pytest.MonkeyPatch) -> None:
    node.step()
    own = reading_secret(SECRET)
    monkeypatch.setattr(http_server, "request_proof", lambda secret, *rest: request_proof(own, *rest))
    monkeypatch.setattr(node.server, "secret", b"another")
    with pytest.raises(Refused, match="without proof"):
        caller_of(node).read("/weights")


def test_what_is_no_block_of_the_model_is_refused(node: ServingNode) -> None:
    node.step()
    block = TensorBlock("a.weight", 0, 1, 1, COLUMNS)
    wrong = ({"rows": 1501}, {"offset": -1}, {"rows": 0}, {"rows": 2, "cols": 3, "stride": 1}, {"tensor": "x"})
    for change in wrong:
        with pytest.raises(Refused, match="is no block of"):
            caller_of(node).read(image_target(block._replace(**change)))  # type: ignore[arg-type]


def test_a_carrier_serves_another_cluster_what_it_received(folder: Path, stack: ExitStack) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    chain = Chain(stack, folder, 1, http_port=port)
    caller = HttpCaller(port, reading_secret(SECRET_OF_NODES))
    blocks = [TensorBlock(name, 0, rows, cols, cols) for name, (rows, cols) in SHAPES_OF_CHAIN.items()]
    weights = {name: np.zeros(math.prod(size), np.int16) for name, size in SHAPES_OF_CHAIN.items()}
    with pytest.raises(NotServed):
        pull(caller, weights, blocks)
    for version in range(3):
        chain.write(version, version - 1)
        chain.nodes[0].wait(ImageHere, here(version))
        assert pull(caller, weights, blocks, version - 1) == version
        image = (chain.nodes[0].folder / "image.safetensors").read_bytes()
        assert image.endswith(b"".join(values.tobytes() for values in weights.values()))


def test_a_port_that_is_taken_is_reported_and_the_carrier_works(folder: Path, stack: ExitStack) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        (carrier,) = Chain(stack, folder, 1, http_port=port).nodes
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


@pytest.mark.parametrize("says", ["", "G", "GET / HTTP/1.1\r\n\r\n", f"GET /{'x' * 100_000}", "GET / HTTP/1.1\r\nX: y"])
def test_callers_without_the_secret_keep_nobody_out(says: str, node: ServingNode, stack: ExitStack) -> None:
    node.step()
    for _ in range(2 * http_server.MOST_CALLERS):
        stranger = stack.enter_context(socket.create_connection(("127.0.0.1", node.port)))
        with suppress(OSError):
            stranger.sendall(says.encode())
    began = time.monotonic()
    assert pull(caller_of(node), nothing(), WANTED) == 0
    assert time.monotonic() - began < PROVE_S / 2


def test_all_callers_share_the_budget(folder: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """In seconds that the server was told to wait, not in those that passed."""
    node = ServingNode(folder, bytes_per_s=20e6)
    node.step()
    stack.callback(node.server.server_close)
    stack.callback(node.server.shutdown)
    taken: list[tuple[int, float]] = []
    delay_s = TokenBucket.delay_s

    def noted(bucket: TokenBucket, count: int, now: float) -> float:
        taken.append((count, now))
        return delay_s(bucket, count, now)

    monkeypatch.setattr(TokenBucket, "delay_s", noted)
    callers = stack.enter_context(ThreadPoolExecutor(4))
    target = image_target(WANTED[0])
    read = list(callers.map(lambda _: caller_of(node).read(target)[1], range(4)))
    assert sum(count for count, _ in taken) >= sum(map(len, read))
    seconds = taken[-1][1] - taken[0][1]
    assert sum(count for count, _ in taken[:-4]) <= 20e6 * (seconds + BURST_S) + 65536
