"""What the wire of new weights costs: encoding of a version by density, carriers beside plain sockets, the checksum.

Encoding is processor seconds of one core per dense GB of bf16. Carriers are real processes of this machine, with
checksums on and an image each, by TCP and, where its wheel is installed, by NIXL, which is shared memory here; *plain
sockets* send as many bytes to as many receivers.

    python -m bench.weight_wire [--mb 512] [--repeats 3]
"""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from bench.harness import Figures, Options, median, options, progress, report
from bench.weights import sockets
from libra_hpc.checksum import crc32
from libra_hpc.protocol.carriers import NIXL_WHEEL, ImageHere, Publish, VersionHere
from libra_hpc.weights.delta import dense, encoding_for, marked
from libra_hpc.weights.pieces import WHOLE, TensorBlock, write_offer
from tests.weights.nodes import CarrierNode, bits

SHARES = (0.0075, 0.03, 0.29, 0.52)
COLUMNS = 1 << 10
NAME, OWNER = "model.embed_tokens.weight", "t0.0"
TRANSPORTS = ("tcp", "nixl") if importlib.util.find_spec(NIXL_WHEEL) else ("tcp",)
WARM = 1
"""The first version makes files and pages that the next ones use again."""


def fastest(repeats: int, work: Callable[[], object]) -> float:
    """Processor seconds; others on the machine only add to them."""

    def took() -> float:
        began = time.process_time()
        work()
        return time.process_time() - began

    return min(took() for _ in range(repeats + 1))


def encoding(values: np.ndarray, repeats: int) -> Figures:
    block, size = TensorBlock(NAME, 0, 1, values.size, values.size), values.nbytes / 1e9
    out = {"crc32 s/GB": fastest(repeats, lambda: crc32(values.data)) / size}
    for share in SHARES:
        mask = np.random.default_rng(1).random(values.size, np.float32) < share
        marks, kind = np.packbits(mask, bitorder="little"), encoding_for(int(mask.sum()), values.size)
        seconds = fastest(repeats, lambda: marked(block, "BF16", kind, marks, values))  # noqa: B023
        out[f"encoding {share:.2%} ({kind}) s/GB"] = seconds / size
    return out


def carriers(folder: Path, values: np.ndarray, receivers: int, repeats: int, transport: str) -> Iterable[float]:
    """GB/s of whole versions, from their publication until the last node has verified all of it."""
    shape = (values.size // COLUMNS, COLUMNS)
    block = TensorBlock(NAME, 0, *shape, COLUMNS)
    with ExitStack() as stack:
        folders = [folder / f"{transport}-{receivers}-{rank}" for rank in range(receivers + 1)]
        nodes = [CarrierNode(path, rank, {NAME: shape}, transport=transport) for rank, path in enumerate(folders)]
        for node in nodes:
            stack.callback(node.close)
        chain = tuple(node.peer for node in nodes)
        for version in range(WARM + repeats):
            write_offer(nodes[0].folder, version, WHOLE, OWNER, [dense(block, "BF16", values)])
            began = time.monotonic()
            for node in nodes:
                node.publish(Publish(version, WHOLE, ((OWNER, 0),), chain))
            here = [node.wait(VersionHere, lambda found: found.version == version) for node in nodes]  # noqa: B023
            for node in nodes:
                node.wait(ImageHere, lambda found: found.version == version)  # noqa: B023
            seconds = max(node.when(message) for node, message in zip(nodes, here, strict=True)) - began
            if version >= WARM:
                yield values.nbytes / 1e9 / seconds


def main(given: Options) -> None:
    values = bits(0, (given.mb << 19) // COLUMNS * COLUMNS)
    progress("encoding")
    found = encoding(values, given.repeats)
    folder = Path(tempfile.mkdtemp(prefix="bench-weight-wire-", dir="/dev/shm"))
    try:
        for receivers in (1, 3):
            progress(f"to {receivers}")
            plain, rates = [sockets(values.nbytes, receivers)], {}
            for transport in TRANSPORTS:
                rates[transport] = median(carriers(folder, values, receivers, given.repeats, transport))
                plain.append(sockets(values.nbytes, receivers))
            found[f"to {receivers}: sockets GB/s"] = median(plain)
            for transport, rate in rates.items():
                found[f"to {receivers}: {transport} GB/s"] = rate
                found[f"to {receivers}: {transport} / sockets"] = rate / median(plain)
    finally:
        shutil.rmtree(folder)
    rows = [[name, f"{value:.3g}"] for name, value in found.items()]
    note = "Seconds and GB/s move with the load of the machine, ratios less."
    report(given, "The wire of new weights", columns=["", "value"], rows=rows, notes=[note], raw=found)


if __name__ == "__main__":
    main(options("weight_wire", __doc__, mb=512, repeats=3))
