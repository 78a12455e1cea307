"""A training node that serves its weights over HTTP, and a lender of another cluster that pulls them."""

from __future__ import annotations

import itertools
import math
import socket
import threading
from pathlib import Path

import numpy as np

from libra_hpc.models.architecture import Architecture
from libra_hpc.models.tensors import hf_shapes
from libra_hpc.weights.blocks import engine_slices, own_slices, within
from libra_hpc.weights.delta import dense, encoding_for, sparse
from libra_hpc.weights.image import Image, reading
from libra_hpc.weights.names import ReplicaPlace
from libra_hpc.weights.offers import HeldOffer, OfferStore
from libra_hpc.weights.pieces import WHOLE, Encoded, TensorBlock, offer_path, write_offer
from libra_hpc.weights.served_weights import ServedDelta, ServedWeights, reading_secret
from libra_hpc.weights.transport.http_server import HttpServer, Part
from tests.weights.http_caller import HttpSource
from tests.weights.http_pull import HttpPuller, PulledImage, wanted_blocks
from tests.weights.nodes import bits

SHAPE = Architecture(
    family="qwen3",
    layers=2,
    hidden=256,
    heads=8,
    groups=2,
    head_dim=32,
    ffn=640,
    vocab=8_200,
    tied=False,
    norm_eps=1e-6,
    rope={},
    qkv_bias=False,
    max_positions=64,
)
SHAPES = hf_shapes(SHAPE)
"""11.5 MB, of which the embedding's and the head's parts come in several answers."""
TP, RANK = 4, 3
SECRET = b"of this run"
DTYPE = "BF16"


class CountedWeights(ServedWeights):
    """Counts the bytes of weights that are read."""

    payload = image = 0

    def read(self, target: str, begin: int, end: int) -> Part:
        part = super().read(target, begin, end)
        if target.endswith("/payload"):
            self.payload += len(part.data)
        elif target.startswith("/image"):
            self.image += len(part.data)
        return part


class TrainNode:
    """The node that serves: processes of TP2 with two copies offer, its image follows."""

    def __init__(self, folder: Path, secret: bytes = SECRET, bytes_per_s: float = 1e12) -> None:
        folder.mkdir()
        self.folder = folder
        self.image = Image(folder, SHAPES, DTYPE)
        self.store = OfferStore(cap_bytes=1 << 40)
        self.weights = CountedWeights(folder, SHAPES, DTYPE, self.store)
        listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = listener.getsockname()[1]
        self._server = HttpServer(
            listener, reading_secret(secret), lambda *asked: self.weights.read(*asked), bytes_per_s
        )
        # Its own thread looks for the end every half second.
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        self.values = {name: bits(7, math.prod(size)) for name, size in SHAPES.items()}
        self.version = WHOLE
        self.step()

    def step(self, share: float = 0.03) -> list[HeldOffer]:
        """Train: a share of the elements changes, and is offered; the first version is whole."""
        base, self.version = self.version, self.version + 1
        changed = {name: np.random.default_rng(self.version).random(len(v)) < share for name, v in self.values.items()}
        for name, mask in changed.items():
            self.values[name][mask] ^= 1 + self.version
        places = [ReplicaPlace(2, tp, 1, 0, dp=2, dp_rank=copy) for copy, tp in itertools.product(range(2), range(2))]
        held = [self._offer(f"t{number}", base, place, changed) for number, place in enumerate(places)]
        for one in held:
            self.store.add(one)
        self.weights.add(ServedDelta(self.version, base, tuple(one.writer for one in held)))
        self.image.apply(self.version, [(one.offer, one.payload) for one in held])
        return held

    def _offer(self, writer: str, base: int, place: ReplicaPlace, changed: dict[str, np.ndarray]) -> HeldOffer:
        encoded = []
        for slices in own_slices(SHAPE, place).values():
            half = sum(one.block.rows * one.block.cols for one in slices) // 2
            for _, block in ((one.parameter, one.block) for one in within(slices, *half_of(half, place.dp_rank))):
                encoded += self._piece(block, base, changed[block.tensor])
        offer = write_offer(self.folder, self.version, base, writer, encoded)
        path = offer_path(self.folder, self.version, writer)
        return HeldOffer(offer, path.read_bytes(), path)

    def _piece(self, block: TensorBlock, base: int, changed: np.ndarray) -> list[Encoded]:
        values = region(self.values[block.tensor], block).reshape(-1)
        if base == WHOLE:
            return [dense(block, DTYPE, values)]
        index = np.flatnonzero(region(changed, block)).astype(np.int32)
        encoding = encoding_for(len(index), len(values))
        return [sparse(block, DTYPE, encoding, index, values[index])] if len(index) else []

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def half_of(half: int, number: int) -> tuple[int, int]:
    return (0, half) if not number else (half, 1 << 40)


def region(flat: np.ndarray, block: TensorBlock) -> np.ndarray:
    strides = (block.stride * flat.itemsize, flat.itemsize)
    return np.lib.stride_tricks.as_strided(flat[block.offset :], (block.rows, block.cols), strides)


def wanted() -> dict[str, np.ndarray]:
    """Which elements of each tensor the engine's rank has."""
    masks = {name: np.zeros(math.prod(size), np.bool_) for name, size in SHAPES.items()}
    for tensor, slices in engine_slices(SHAPE, TP, RANK).items():
        for one in slices:
            region(masks[tensor], one.block)[:] = True
    return masks


class Lender:
    """The other cluster."""

    def __init__(self, folder: Path, port: int, secret: bytes = SECRET) -> None:
        folder.mkdir(exist_ok=True)
        blocks = wanted_blocks(SHAPE, TP, [RANK])
        self.image = PulledImage(folder, SHAPES, DTYPE)
        self.puller = HttpPuller(HttpSource("127.0.0.1", port, reading_secret(secret)), self.image, blocks)

    def holds(self, node: TrainNode) -> bool:
        """Whether a reader finds all elements of the rank as a load of the whole weights would give them."""
        with reading(self.image.path) as version:
            found = np.fromfile(self.image.path, np.int16, offset=self.image.start)
        at, equal = 0, version == node.version
        for name, mask in wanted().items():
            equal &= bool(np.array_equal(found[at : at + len(mask)][mask], node.values[name][mask]))
            at += len(mask)
        return equal
