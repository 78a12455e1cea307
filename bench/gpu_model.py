"""Model folders of real size with random weights, for measurements of time and memory on a GPU.

The tensors of `libra_hpc.weights.names.hf_shapes`, bfloat16, drawn on the GPU and written to ``/dev/shm``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file

from libra_hpc.hardware.architecture import read_shape
from libra_hpc.hardware.models import ModelShape
from libra_hpc.weights.names import hf_shapes

SHARED_MEMORY = Path("/dev/shm")
SPREAD = 0.02
"""Standard deviation of the weights, as in an untrained transformer: activations neither vanish nor overflow."""
MAX_POSITIONS = 40960


def config_of(shape: ModelShape) -> dict[str, object]:
    """The ``config.json`` of a dense Qwen3 of this shape."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": MAX_POSITIONS,
        "attention_bias": False,
        "use_sliding_window": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied_embeddings,
    }


@contextmanager
def random_model(shape: ModelShape) -> Iterator[Path]:
    """A model folder, deleted at the end of the context."""
    folder = SHARED_MEMORY / f"bench-{shape.name}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        (folder / "config.json").write_text(json.dumps(config_of(shape)))
        tensors = {name: _draw(name, size) for name, size in hf_shapes(read_shape(folder)).items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        del tensors
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _draw(name: str, size: tuple[int, ...]) -> torch.Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(size, dtype=torch.bfloat16)
    return (torch.randn(size, device="cuda", dtype=torch.bfloat16) * SPREAD).cpu()
