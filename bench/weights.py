"""Offers of new weights to an image on this machine: random changes of a model folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from libra_hpc.models.architecture import read_shape
from libra_hpc.models.tensors import hf_shapes
from libra_hpc.protocol.engine import VersionFiles
from libra_hpc.weights.delta import dense, encoding_for, sparse
from libra_hpc.weights.image import Image
from libra_hpc.weights.pieces import WHOLE, Encoded, TensorBlock, offer_path, payload_path, write_offer


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

    def bring(self, version: int, share: float = 1.0) -> None:
        """Write an offer and bring the image to it."""
        payload_path(Path(self.offer(version, share).manifests[0])).unlink()

    def offer(self, version: int, share: float) -> VersionFiles:
        """Bring the image to a new offer, which is kept."""
        base = WHOLE if share == 1.0 else version - 1
        offer = write_offer(self._folder, version, base, "t0.0", pieces(self._values, share, version))
        manifest = offer_path(self._folder, version, "t0.0")
        self.image.apply(version, [(offer, payload_path(manifest).read_bytes())])
        return VersionFiles(version, base, (str(manifest),))
