"""Carriers of several nodes in a row, of which the first one writes the versions."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from libra_hpc.protocol.carriers import Engines, Peer, Publish
from libra_hpc.weights.pieces import Encoded, TensorBlock, elements, offer_path, payload_path, write_offer
from tests.weights.nodes import CarrierNode, FaultyLink, bits

ROWS, COLUMNS = 1024, 2048
SHAPES: dict[str, tuple[int, int]] = {
    "model.embed_tokens.weight": (ROWS, COLUMNS),
    "model.norm.weight": (1, 3),
    "lm_head.weight": (ROWS, COLUMNS),
}
"""8 MiB, in tensors of which one leaves the next at an odd place."""
WRITER = "t0.0"


class Chain:
    """Node 0 writes offers; the others receive them in the order of their ranks."""

    def __init__(self, stack: ExitStack, folder: Path, nodes: int, **options: Any) -> None:
        """``options``: of every node."""
        self._stack, self._folder, self._options = stack, folder, options
        self.nodes = [self.node(rank) for rank in range(nodes)]
        self.links: dict[tuple[int, int], FaultyLink] = {}

    def node(self, rank: int, **options: Any) -> CarrierNode:
        own = {**self._options, **options}
        node = CarrierNode(self._folder / f"node{rank}-{time.monotonic_ns()}", rank, SHAPES, **own)
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
            WRITER,
            [Encoded(block, "BF16", "dense", values.size, (values,)) for block, values in encoded],
        )
        if truncate:
            os.truncate(payload_path(offer_path(self.nodes[0].folder, version, WRITER)), 1_000_000)
        if folder is None:
            self.publish(version, base)

    def keep_all(self) -> None:
        """The writer removes no version: an engine of its node needs all."""
        self.nodes[0].send(Engines(-1))

    def publish(self, version: int, base: int, *ranks: int) -> None:
        for node in self.nodes:
            if not ranks or node.rank in ranks:
                node.send(Publish(version, base, ((WRITER, 0),), self.peers(node.rank)))

    def payload(self, rank: int, version: int) -> bytes:
        return payload_path(offer_path(self.nodes[rank].folder, version, WRITER)).read_bytes()


def wait_until(true: Callable[[], bool]) -> None:
    while not true():
        time.sleep(0.01)


def passed(link: FaultyLink, count: int) -> None:
    wait_until(lambda: link.passed >= count)


def here(version: int) -> Callable[[Any], bool]:
    return lambda message: message.version >= version
