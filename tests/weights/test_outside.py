"""Weights served to another cluster over HTTP: to whom, what, and at which rate."""

from __future__ import annotations

import itertools
import math
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from libra_hpc.protocol.callers import PROVE_S
from libra_hpc.protocol.carriers import CarrierReady, ImageHere
from libra_hpc.weights.image import IMAGE_FILE
from libra_hpc.weights.pieces import TensorBlock
from libra_hpc.weights.served_weights import reading_secret
from libra_hpc.weights.transport import http_server
from libra_hpc.weights.transport.http_proof import VERSION, NotServed, Refused, request_proof
from libra_hpc.weights.transport.http_server import HttpServer, Part
from libra_hpc.weights.transport.token_bucket import BURST_S, TokenBucket
from tests.weights.chain import COLUMNS, SHAPES, Chain, here
from tests.weights.http_client import HttpCaller, Weights, image_target, pull, view
from tests.weights.nodes import SECRET as SECRET_OF_NODES
from tests.weights.nodes import node_folders

pytestmark = pytest.mark.slow

BLOCKS = [TensorBlock(name, 0, rows, cols, cols) for name, (rows, cols) in SHAPES.items()]
PART = TensorBlock("lm_head.weight", 5, 700, 1000, COLUMNS)
SECRET = reading_secret(SECRET_OF_NODES)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def folder(stack: ExitStack) -> Path:
    return stack.enter_context(node_folders())


class Served(NamedTuple):
    """The carrier of one node, and its port for another cluster."""

    chain: Chain
    port: int

    def write(self, version: int, base: int) -> None:
        self.chain.write(version, base)
        self.chain.nodes[0].wait(ImageHere, here(version))

    def equals(self, weights: Weights) -> bool:
        image = (self.chain.nodes[0].folder / IMAGE_FILE).read_bytes()
        return image.endswith(b"".join(values.tobytes() for values in weights.values()))


@pytest.fixture
def served(stack: ExitStack, folder: Path) -> Served:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    return Served(Chain(stack, folder, 1, http_port=port), port)


class Asking(HttpCaller):
    """Notes what it asks for, and may do something before."""

    before: Callable[[], object] = int

    def __init__(self, port: int) -> None:
        super().__init__(port, SECRET)
        self.asked: list[str] = []

    def read(self, target: str) -> tuple[int, bytes]:
        self.asked.append(target.split("?")[0])
        self.before()
        return super().read(target)


def nothing() -> Weights:
    return {name: np.zeros(math.prod(size), np.int16) for name, size in SHAPES.items()}


def test_another_cluster_gets_the_image_and_then_what_changed(served: Served) -> None:
    caller, weights = Asking(served.port), nothing()
    with pytest.raises(NotServed, match="image"):
        pull(caller, weights, BLOCKS)
    served.write(0, -1)
    assert pull(caller, weights, BLOCKS) == 0
    assert served.equals(weights)
    caller.asked.clear()
    for version in (1, 2, 3):
        served.write(version, version - 1)
    assert pull(caller, weights, BLOCKS, 0) == 3
    assert served.equals(weights)
    assert "/image" not in caller.asked, "the deltas were enough"
    # More than the node keeps.
    for version in range(4, 14):
        served.write(version, version - 1)
    with pytest.raises(NotServed, match=r"version 3 of t0\.0 is not stored"):
        caller.read("/offers/3/t0.0/manifest")
    assert pull(caller, weights, BLOCKS, 3) == 13
    assert served.equals(weights)
    assert "/image" in caller.asked
    _, part = caller.read(image_target(PART))
    assert part == view(weights, PART).tobytes()
    for begin, end in ((0, 2000), (5000, 9000), (1_399_999, 1_400_000)):
        assert caller._ask(image_target(PART), f"bytes={begin}-{end - 1}") == (13, part[begin:end], len(part))


def test_the_image_may_go_on_while_it_is_pulled(served: Served) -> None:
    """Its parts then have several versions, and the deltas make them one."""
    caller, weights, versions = Asking(served.port), nothing(), itertools.count(1)
    served.write(0, -1)

    def train() -> None:
        if caller.asked[-1] == "/image":
            served.write(version := next(versions), version - 1)

    caller.before = train
    assert pull(caller, weights, BLOCKS) == len(BLOCKS)
    assert served.equals(weights)


def test_without_the_secret_nothing_is_served(served: Served) -> None:
    served.write(0, -1)
    served.write(1, 0)
    for path in ("/weights", "/offers/1/t0.0/manifest", "/offers/1/t0.0/payload", "/image?tensor=x", "/else"):
        for header in ("", "Libra", "Libra a b", "Bearer of this run", "Libra \xe9 \xe9"):
            request = urllib.request.Request(f"http://127.0.0.1:{served.port}{path}", headers={"Authorization": header})
            with pytest.raises(urllib.error.HTTPError) as raised:
                urllib.request.urlopen(request)
            assert raised.value.code == 401
            assert not raised.value.read()
            assert VERSION not in raised.value.headers
    with pytest.raises(Refused, match="has another secret"):
        HttpCaller(served.port, reading_secret(b"another")).read("/weights")


def test_a_request_cannot_be_repeated_on_another_connection(served: Served) -> None:
    served.write(0, -1)
    with ExitStack() as stack:
        address = ("127.0.0.1", served.port)
        first, second = (stack.enter_context(socket.create_connection(address)) for _ in range(2))
        nonce = re.search(rb"Libra (\w+)", exchange(first, "x y"))
        assert nonce
        proof = request_proof(SECRET, (nonce[1].decode(), "own"), "/weights", "")

        assert exchange(first, f"own {proof}").startswith(b"HTTP/1.1 206 ")
        assert exchange(second, f"own {proof}").startswith(b"HTTP/1.1 401 ")


def exchange(stream: socket.socket, words: str) -> bytes:
    """The first bytes of the answer to a request with this authorization."""
    stream.sendall(f"GET /weights HTTP/1.1\r\nAuthorization: Libra {words}\r\n\r\n".encode())
    return stream.recv(1 << 16)


def serving(stack: ExitStack, secret: bytes, data: bytes, bytes_per_s: float) -> int:
    """The port of a server with one resource."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    server = HttpServer(listener, secret, lambda target, begin, end: Part(0, len(data), data[begin:end]), bytes_per_s)
    server.start()
    stack.callback(server.shutdown)
    return int(listener.getsockname()[1])


def test_an_answer_proves_the_servers_secret(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "request_proof", lambda secret, *rest: request_proof(SECRET, *rest))
    with pytest.raises(Refused, match="without proof"):
        Asking(serving(stack, b"another", b"data", 1e9)).read("/")


def test_what_is_no_block_of_the_model_is_refused(served: Served) -> None:
    served.write(0, -1)
    wrong = ({"rows": 1025}, {"offset": -1}, {"rows": 0}, {"stride": 1}, {"tensor": "x"})
    for change in wrong:
        with pytest.raises(Refused, match="is no block of"):
            Asking(served.port).read(image_target(PART._replace(**change)))  # type: ignore[arg-type]


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
def test_callers_without_the_secret_keep_nobody_out(says: str, stack: ExitStack) -> None:
    port = serving(stack, SECRET, b"data", 1e9)
    for _ in range(2 * http_server.MOST_CALLERS):
        stranger = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        with suppress(OSError):
            stranger.sendall(says.encode())
    began = time.monotonic()
    assert Asking(port).read("/")[1] == b"data"
    assert time.monotonic() - began < PROVE_S / 2


def test_all_callers_share_the_budget(stack: ExitStack) -> None:
    port = serving(stack, SECRET, bytes(5_000_000), 20e6)
    callers = stack.enter_context(ThreadPoolExecutor(4))
    began = time.monotonic()
    read = list(callers.map(lambda _: Asking(port).read("/")[1], range(4)))
    assert [len(data) for data in read] == [5_000_000] * 4
    assert time.monotonic() - began >= 1.0 - BURST_S
