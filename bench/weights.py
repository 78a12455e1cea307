"""What new weights cost a node: bytes of an offer, its write into the image, sockets, and the engine's pause.

A random Qwen3 policy of 344 million parameters in bf16 with a vocabulary of 152k (``--layers 16``), everything on this
machine. *plain sockets* is the yardstick of the wire, *memcpy* that of memory.

    python -m bench.weights [--layers 16]
"""

from __future__ import annotations

import json
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from bench.gpu_check_steps import SMALLER
from bench.gpu_model import random_model
from bench.harness import Figures, Options, child, median, options, progress, report
from libra_hpc.models.architecture import read_shape
from libra_hpc.models.tensors import hf_shapes
from libra_hpc.weights.delta import dense, encoding_for, sparse
from libra_hpc.weights.image import Image
from libra_hpc.weights.pieces import WHOLE, Encoded, TensorBlock, offer_path, payload_path, write_offer

CHANGED = (0.03, 0.29)
"""Shares of the elements: a usual step, and the largest of a normal one."""
CHUNK = 1 << 20
CONTEXTS, LENGTH = 4, 512
"""Running turns of the engine and their tokens when the update comes."""


def pieces(values: dict[str, np.ndarray], share: float, seed: int) -> Iterator[Encoded]:
    """Random elements with their lowest bit turned; a share of 1.0: all, as they are."""
    rng = np.random.default_rng(seed)
    for name, bits in values.items():
        block = TensorBlock(name, 0, 1, bits.size, bits.size)
        mask = rng.random(bits.size, np.float32) < share
        mask[0] = True
        index = np.flatnonzero(mask).astype(np.int32)
        encoding = encoding_for(len(index), bits.size)
        yield (
            dense(block, "BF16", bits)
            if encoding == "dense"
            else sparse(block, "BF16", encoding, index, bits[index] ^ np.int16(1))
        )


def tensor_bits(file: Path) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a file in bf16, flat."""
    import torch
    from safetensors import safe_open

    with safe_open(file, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - not a mapping
            yield name, tensors.get_tensor(name).bfloat16().view(torch.int16).numpy().reshape(-1)


class Versions:
    """An image in bf16, and offers that change it."""

    def __init__(self, folder: Path, model: Path) -> None:
        self._shapes, self._folder = hf_shapes(read_shape(model)), folder
        self.image = Image(folder, self._shapes, "BF16")
        self._values = {name: bits for file in model.glob("*.safetensors") for name, bits in tensor_bits(file)}
        self.dense = sum(bits.nbytes for bits in self._values.values())

    def bring(self, version: int, share: float = 1.0) -> tuple[int, float]:
        """Write an offer and bring the image to it; (bytes of the offer, seconds of the image)."""
        base = WHOLE if share == 1.0 else version - 1
        offer = write_offer(self._folder, version, base, "t0.0", pieces(self._values, share, version))
        payload = payload_path(offer_path(self._folder, version, "t0.0"))
        began = time.monotonic()
        self.image.apply(version, [(offer, payload)])
        seconds = time.monotonic() - began
        payload.unlink()
        return offer.size, seconds


def offers(folder: Path, model: Path) -> Figures:
    """Bytes relative to dense, and seconds until the image has them."""
    versions = Versions(folder, model)
    _, first = versions.bring(0)
    out = {"dense GB": versions.dense / 1e9, "image dense s": first}
    source = np.ones(versions.dense, np.uint8)
    target = source.copy()
    began = time.monotonic()
    np.copyto(target, source)
    out["memcpy s"] = time.monotonic() - began
    began = time.monotonic()
    zlib.crc32(source.data)
    out["crc32 s"] = time.monotonic() - began
    for number, share in enumerate(CHANGED):
        size, seconds = versions.bring(number + 1, share)
        out |= {f"bytes at {share:.0%}": size / versions.dense, f"image at {share:.0%} s": seconds}
    return out


def sockets(size: int, receivers: int) -> float:
    """GB/s of plain sockets, one thread per link, to the slowest receiver."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        source = memoryview(bytes(CHUNK))

        def send() -> None:
            stream, _ = listener.accept()
            with stream:
                for _ in range(size // CHUNK):
                    stream.sendall(source)

        def receive() -> None:
            with socket.create_connection(listener.getsockname()) as stream:
                buffer = bytearray(CHUNK)
                while stream.recv_into(buffer):
                    pass

        threads = [threading.Thread(target=work) for work in [send, receive] * receivers]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return size / 1e9 / (time.monotonic() - began)


def engine(folder: Path, model: Path) -> Figures:
    """Pauses, steps and tokens lost, while turns run; in this process."""
    from libra_hpc.engine.offline import OfflineEngine
    from libra_hpc.engine.settings import EngineConfig
    from libra_hpc.protocol.codec import pack_i32
    from libra_hpc.protocol.engine import Generate, UpdateWeights

    versions = Versions(folder, model)
    limits = {"max_model_len": 4096, "max_num_seqs": 8, "kv_cache_mb": 1024, "threads": 1}
    config = EngineConfig(model=str(model), dtype="bfloat16", device="cpu", **limits)  # type: ignore[arg-type]
    out: Figures = {}
    with OfflineEngine(config) as offline:
        served = offline.engine
        rng = np.random.default_rng(0)
        for turn in range(CONTEXTS):
            offline.submit(Generate(str(turn), pack_i32(rng.integers(0, 150_000, LENGTH).tolist()), 3000))

        def steps(until: Callable[[], bool]) -> list[float]:
            """Seconds of each step up to ``until``."""
            took = []
            while not until():
                began = time.monotonic()
                served.step()
                took.append(time.monotonic() - began)
            return took

        def usual() -> list[float]:
            left = iter(range(10))
            return steps(lambda: next(left, None) is None)

        steps(lambda: served.stats().generated_tokens >= 5 * CONTEXTS)
        out["usual step s"] = median(usual())
        for name, update in (
            ("staged dense", UpdateWeights(str(versions.image.path), 2)),
            ("staged 3 %", UpdateWeights(str(versions.image.path), 3)),
        ):
            versions.bring(update.version, 1.0 if update.version == 2 else CHANGED[0])
            checking = threading.Thread(target=served.check, args=(update,))
            began = time.monotonic()
            checking.start()
            beside = steps(lambda: not checking.is_alive() and served.staged())  # noqa: B023
            out[f"{name}: beside s"] = time.monotonic() - began
            out[f"{name}: longest step beside s"] = max(beside, default=0.0)
            while not served.settled():
                served.step()
            applied = served.apply(update)
            out |= {f"{name}: pause s": applied.seconds, f"{name}: tokens lost": applied.recomputed}
            after = usual()
            out[f"{name}: longest step after s"] = max(after)
    return out


def measure(part: str, layers: int) -> Figures:
    if part == "sockets":
        return {f"GB/s to {count}": sockets(1 << 30, count) for count in (1, 3)}
    measured = {"offers": offers, "engine": engine}[part]
    shape = replace(SMALLER[1], name="weights", layers=layers, head_dim=64, intermediate=2816)
    with random_model(shape, "cpu") as model:
        (folder := model / "image").mkdir()
        return measured(folder, model)


PARTS = ("offers", "sockets", "engine")


def main(given: Options) -> None:
    if given.one:
        print(json.dumps(measure(given.one, given.layers)))
        return
    found: Figures = {}
    for part in PARTS:
        progress(part)
        # A process for each: vLLM must be imported first, and memory is free again.
        own = child("-m", "bench.weights", "--one", part, "--layers", str(given.layers))
        found |= {f"{part}: {name}": value for name, value in own.items()}
    rows = [[name, f"{value:.4g}"] for name, value in found.items()]
    note = "One run; GB/s and seconds move with the load of the machine, their ratios less."
    report(given, "New weights on one node", columns=["", "value"], rows=rows, notes=[note], raw=found)


if __name__ == "__main__":
    main(options("weights", __doc__, one="", layers=16))
