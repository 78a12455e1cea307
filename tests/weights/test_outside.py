"""Weights over HTTP: what a guest in another cluster gets of a run, to whom they are served, and at which rate."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

import numpy as np
import pytest

from libra_hpc.models.architecture import architecture
from libra_hpc.models.supported import in_float32
from libra_hpc.models.tensors import hf_shapes
from libra_hpc.protocol.callers import PROVE_S
from libra_hpc.protocol.carriers import CarrierReady, ImageHere, Peer, PieceRefused, Stalled, VersionHere
from libra_hpc.protocol.joining import FIRST_GUEST, guest_secret
from libra_hpc.weights.blocks import engine_slices
from libra_hpc.weights.image import IMAGE_FILE, Image
from libra_hpc.weights.offers import OfferStore
from libra_hpc.weights.outside import HttpStream, ImagePlaces, OutsideCaller, ServedWeights
from libra_hpc.weights.pieces import TensorBlock
from libra_hpc.weights.transport import http_server
from libra_hpc.weights.transport.http_proof import PART_BYTES, request_proof
from libra_hpc.weights.transport.http_server import HttpServer, Part, Resources
from libra_hpc.weights.transport.token_bucket import BURST_S, BandwidthPace, TokenBucket
from libra_hpc.weights.weightfile import file_header, tensor_bytes
from libra_hpc.weights.wire import BLOCK_BYTES, IMAGE, Absent, DamagedError, Fetch, WireError
from tests.weights.chain import COLUMNS, ROWS, Chain, here, passed
from tests.weights.nodes import SECRET as SECRET_OF_NODES
from tests.weights.nodes import CarrierNode, FaultyLink, bits, node_folders

pytestmark = pytest.mark.slow

SECRET = guest_secret(SECRET_OF_NODES)
SIZE = 4 * ROWS * COLUMNS
MODEL = {"model_type": "qwen3", "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4}
MODEL |= {"hidden_size": 256, "head_dim": 32, "intermediate_size": 1024, "vocab_size": 4096}
OF_EXPERTS = {"model_type": "glm4_moe", "n_routed_experts": 4, "moe_intermediate_size": 128, "num_experts_per_tok": 2}


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def folder(stack: ExitStack) -> Path:
    return stack.enter_context(node_folders())


class Run(NamedTuple):
    """The carrier of one node, and its port for another cluster."""

    stack: ExitStack
    chain: Chain
    port: int

    def guest(self, number: int, **faults: float) -> tuple[CarrierNode, FaultyLink]:
        """A guest in another cluster, and its way to the run; it has none to the run's carrier."""
        link = FaultyLink(self.port, **faults)  # type: ignore[arg-type]
        self.stack.callback(link.close)
        node = self.chain.node(FIRST_GUEST + number, secret=SECRET, source=f"http://127.0.0.1:{link.port}")
        self.chain.nodes.append(node)
        self.chain.link(node.rank, 0)
        return node, link

    def images(self) -> set[bytes]:
        assert not any(link.passed for link in self.chain.links.values())
        return {(node.folder / IMAGE_FILE).read_bytes() for node in self.chain.nodes}


@pytest.fixture
def run(stack: ExitStack, folder: Path) -> Run:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    return Run(stack, Chain(stack, folder, 1, http_port=port), port)


def test_guests_in_another_cluster_get_the_image_once_and_then_what_changed(run: Run) -> None:
    run.chain.write(0, -1)
    run.chain.write(1, 0)
    run.chain.nodes[0].wait(ImageHere, here(1))
    (first, http), (second, unused) = run.guest(0), run.guest(1)
    for guest in (first, second):
        run.chain.publish(1, 0, guest.rank)
        guest.wait(ImageHere, here(1))
    before = http.passed
    run.chain.write(2, 1)
    for guest in (first, second):
        guest.wait(ImageHere, here(2))
        assert [(message.version, message.base) for message in guest.all(VersionHere)] == [(1, -1), (2, 1)]
        assert not guest.all(Stalled) + guest.all(PieceRefused)
    assert SIZE < before < 1.01 * SIZE
    assert http.passed - before < 0.26 * SIZE
    assert not unused.passed, "the second one has all from the first"
    assert len(run.images()) == 1


@pytest.mark.parametrize("fault", ["cut_at", "flip_at"])
def test_what_came_before_a_fault_is_not_asked_for_again(run: Run, fault: str) -> None:
    run.chain.write(0, -1)
    run.chain.nodes[0].wait(ImageHere)
    joined, image = run.guest(0, **{fault: 3_000_000})
    run.chain.publish(0, -1, joined.rank)
    joined.wait(ImageHere)
    assert image.passed < SIZE + 5 * BLOCK_BYTES
    later, offers = run.guest(-1, **{fault: 3_000_000})
    run.chain.nodes.remove(joined)
    run.chain.write(1, -1)
    later.wait(ImageHere, here(1))
    assert offers.passed < SIZE + 1.1 * PART_BYTES
    run.chain.nodes[0].wait(ImageHere, here(1))
    assert len(run.images()) == 1


def test_versions_may_move_under_a_reader(run: Run) -> None:
    run.chain.write(0, -1)
    run.chain.nodes[0].wait(ImageHere)
    guest, link = run.guest(0, bytes_per_s=8e6)
    run.chain.publish(0, -1, guest.rank)
    for version in (1, 2, 3):
        passed(link, version * 1_000_000)
        run.chain.write(version, version - 1)
        run.chain.nodes[0].wait(ImageHere, here(version))
    assert link.passed < SIZE
    guest.wait(ImageHere, here(3))
    assert len(run.images()) == 1


@pytest.mark.parametrize(("keys", "tp", "rank", "share"), [({}, 4, 1, 0.3), ({}, 2, 0, 0.52), (OF_EXPERTS, 2, 0, 0.52)])
def test_a_rank_gets_its_own_part_of_an_image_alone(
    stack: ExitStack, folder: Path, keys: dict[str, Any], tp: int, rank: int, share: float
) -> None:
    shape = architecture(MODEL | keys)
    shapes = hf_shapes(shape)
    values = bits(7, tensor_bytes(shapes, "BF16") // 2)
    Image(folder, shapes, "BF16").fill(5, 5, memoryview(values).cast("B"))
    weights, sent = ServedWeights(folder, shapes, "BF16", OfferStore(0), b""), [0]

    def read(target: str, begin: int, end: int) -> Part:
        part = weights.read(target, begin, end)
        sent[0] += len(part.data)
        return part

    own = {name: [one.block for one in found] for name, found in engine_slices(shape, tp, rank).items()}
    caller = OutsideCaller(
        f"http://127.0.0.1:{serving(stack, SECRET, read)}",
        FIRST_GUEST,
        SECRET,
        BandwidthPace(0.0),
        ImagePlaces(shapes, "BF16", own),
    )
    got, expected = np.zeros_like(values), np.zeros_like(values)
    fetch = Fetch(5, IMAGE, 0, values.nbytes)
    caller.receive(lambda: Peer(0, (), 0), fetch, memoryview(got).cast("B"), lambda *came: None, pytest.fail)
    for name, (begin, end) in file_header(shapes, "BF16")[1].items():
        kind = np.int32 if in_float32(name) else np.int16
        for block in own.get(name, ()):
            index = block.offset + np.arange(block.rows)[:, None] * block.stride + np.arange(block.cols)
            expected[begin // 2 : end // 2].view(kind)[index] = values[begin // 2 : end // 2].view(kind)[index]
    assert np.array_equal(got, expected)
    assert sent[0] <= share * values.nbytes


def test_another_cluster_gets_the_configuration_without_secrets(run: Run) -> None:
    _, config = HttpStream(f"http://127.0.0.1:{run.port}", SECRET).whole("/config")
    assert b"sk-private" not in config
    assert b"(hidden)" in config


def test_without_the_secret_nothing_is_served(run: Run) -> None:
    run.chain.write(0, -1)
    for path in ("/config", "/offers/0/t0.0/manifest", "/offers/0/t0.0/payload", "/image?tensor=x", "/else"):
        for words in ("", "a b", "\xe9 \xe9"):
            with socket.create_connection(("127.0.0.1", run.port)) as stream:
                assert re.fullmatch(rb"HTTP/1.1 401 .*\r\n\r\n", exchange(stream, words, path), re.DOTALL)
    for secret in (SECRET_OF_NODES, b""):
        with pytest.raises(WireError, match="another secret"):
            HttpStream(f"http://127.0.0.1:{run.port}", secret).whole("/config")


def test_a_request_cannot_be_repeated_on_another_connection(stack: ExitStack) -> None:
    address = ("127.0.0.1", serving(stack, SECRET, resource(b"data")))
    first, second = (stack.enter_context(socket.create_connection(address)) for _ in range(2))
    nonce = re.search(rb"Libra (\w+)", exchange(first, "x y"))
    assert nonce
    proof = request_proof(SECRET, (nonce[1].decode(), "own"), "/config", "")
    assert exchange(first, f"own {proof}").startswith(b"HTTP/1.1 206 ")
    assert exchange(second, f"own {proof}").startswith(b"HTTP/1.1 401 ")


def exchange(stream: socket.socket, words: str, path: str = "/config") -> bytes:
    """The first bytes of the answer to a request with this authorization."""
    stream.sendall(f"GET {path} HTTP/1.1\r\nAuthorization: Libra {words}\r\n\r\n".encode("latin-1"))
    return stream.recv(1 << 16)


def resource(data: bytes) -> Resources:
    return lambda target, begin, end: Part(0, len(data), data[begin:end])


def serving(stack: ExitStack, secret: bytes, resources: Resources, bytes_per_s: float = 1e9) -> int:
    """The port of a server."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    server = HttpServer(listener, secret, resources, bytes_per_s)
    server.start()
    stack.callback(server.shutdown)
    return int(listener.getsockname()[1])


def asked(port: int, target: str = "/") -> bytes:
    return HttpStream(f"http://127.0.0.1:{port}", SECRET).whole(target)[1]


def test_an_answer_proves_the_servers_secret(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "request_proof", lambda secret, *rest: request_proof(SECRET, *rest))
    with pytest.raises(DamagedError, match="no proof"):
        asked(serving(stack, b"another", resource(b"data")))


def test_what_is_not_there_or_no_block_of_the_model_is_refused(run: Run) -> None:
    block = TensorBlock("lm_head.weight", 5, 700, 1000, COLUMNS)
    with pytest.raises(Absent, match="image"):
        asked(run.port, "/image?" + urlencode(block._asdict()))
    run.chain.write(0, -1)
    run.chain.nodes[0].wait(ImageHere)
    for change in ({"rows": 1025}, {"offset": -1}, {"rows": 0}, {"stride": 1}, {"tensor": "x"}):
        with pytest.raises(WireError, match="is no block of"):
            asked(run.port, "/image?" + urlencode({**block._asdict(), **change}))
    with pytest.raises(Absent, match="was not published here"):
        asked(run.port, "/offers/9/t0.0/manifest")


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
    port = serving(stack, SECRET, resource(b"data"))
    for _ in range(2 * http_server.MOST_CALLERS):
        stranger = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        with suppress(OSError):
            stranger.sendall(says.encode())
    began = time.monotonic()
    assert asked(port) == b"data"
    assert time.monotonic() - began < PROVE_S / 2
