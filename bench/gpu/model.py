"""Model folders of real size with random weights, for measurements of time and memory.

The tensors of `libra_hpc.weights.names.hf_shapes`, bfloat16, drawn on the device and written to ``/dev/shm``.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file

from bench.tabulate import hf_config
from libra_hpc.models.architecture import hf_shapes, read_shape
from libra_hpc.models.shapes import ModelShape

SHARED_MEMORY = Path("/dev/shm")
ROOM = 3.5
"""Free space over the size of the weights: the folder, a node's image, an offer of all weights, and some more."""
SPREAD = 0.02
"""Standard deviation of the weights, as in an untrained transformer: activations neither vanish nor overflow."""
MAX_POSITIONS = 40960


def write_config(shape: ModelShape, folder: Path) -> Path:
    """Make the folder of a dense Qwen3 of this shape, without weights."""
    rest = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "attention_bias": False, "use_sliding_window": False}
    tokens = {"max_position_embeddings": MAX_POSITIONS, "bos_token_id": 1, "eos_token_id": 2}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(hf_config(shape) | rest | tokens))
    return folder


@contextmanager
def random_model(shape: ModelShape, device: str = "cuda") -> Iterator[Path]:
    """A model folder, deleted at the end of the context.

    It is in shared memory; on disk where that has no room for it, as in many containers.
    """
    roomy = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > ROOM * shape.weight_bytes
    with tempfile.TemporaryDirectory(prefix="libra-gpu-", dir=SHARED_MEMORY if roomy else None) as name:
        folder = write_config(shape, Path(name, shape.name))
        tensors = {name: _draw(name, size, device) for name, size in hf_shapes(read_shape(folder)).items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        del tensors
        yield folder


def _draw(name: str, size: tuple[int, ...], device: str) -> torch.Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(size, dtype=torch.bfloat16)
    return (torch.randn(size, device=device, dtype=torch.bfloat16) * SPREAD).cpu()
