"""Weight files: what safetensors reads, and every family's names for any number of tensor-parallel ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from libra_hpc.models.architecture import Architecture, hf_shapes, read_shape, stage_entries
from libra_hpc.models.shapes import model_shape
from libra_hpc.models.supported import FAMILIES, TRAINED, in_float32
from libra_hpc.weights.blocks import from_hf, to_hf
from libra_hpc.weights.names import ReplicaPlace
from libra_hpc.weights.safetensors_writer import write_safetensors
from libra_hpc.weights.weightfile import tensor_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_safetensors_reads_what_was_streamed_in_any_order(dtype: torch.dtype, tmp_path: Path) -> None:
    sizes = {"a": (3, 5), "b.weight": (7,), "empty": (0, 4), "scalar": ()}
    tensors = {name: torch.randn(size).to(dtype) for name, size in sizes.items()} | {
        "t": torch.ones(4, 6).to(dtype).t()
    }
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    path = tmp_path / "w.safetensors"
    write_safetensors(path, dtype, shapes, reversed(list(tensors.items())))
    read = load_file(path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == dtype
        assert torch.equal(read[name], tensor), name


def test_a_full_file_system_is_an_error_and_no_crash() -> None:
    with pytest.raises(OSError, match=r"[Nn]o space|too large"):
        write_safetensors(Path("/dev/shm/libra-hpc-test-too-large"), torch.float32, {"t": (1 << 44,)}, [])
    Path("/dev/shm/libra-hpc-test-too-large").unlink(missing_ok=True)


def architecture(folder: Path, kind: str, **keys: Any) -> Architecture:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "head_dim": 8, "vocab_size": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"model_type": kind, **sizes, **heads, **keys}
    (folder / "config.json").write_text(json.dumps(config))
    return read_shape(folder)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kind", TRAINED)
def test_cut_tensors_put_together_are_the_same_bits(kind: str, groups: int, tmp_path: Path) -> None:
    shape = architecture(tmp_path, kind, num_key_value_heads=groups)
    sizes = hf_shapes(shape)
    files = {name: torch.randn(size) for name, size in sizes.items()}
    for tp in (1, 2, 4):
        together: dict[str, torch.Tensor] = {}
        for pp_rank in range(2):
            for entry in stage_entries(shape, 2, pp_rank).values():
                places = [ReplicaPlace(tp, rank, 2, pp_rank) for rank in range(tp)]
                if entry.stacked:
                    places = [place._replace(ep=tp, etp=1) for place in places]
                parts = [from_hf(entry, files.__getitem__, shape, place) for place in places]
                assert len({part.shape for part in parts}) == 1
                together.update(zip(entry.hf, to_hf(entry, parts, shape, sizes), strict=True))
        assert together.keys() == files.keys()
        assert all(torch.equal(together[name], tensor) for name, tensor in files.items())


@pytest.mark.parametrize("kind", TRAINED)
def test_the_planner_counts_the_parameters_and_their_bytes(kind: str, tmp_path: Path) -> None:
    sizes, counted = hf_shapes(architecture(tmp_path, kind)), model_shape(tmp_path)
    assert counted.params == sum(torch.Size(size).numel() for size in sizes.values())
    assert counted.weight_bytes == tensor_bytes(sizes, "BF16")
    assert all(in_float32(name) == name.endswith(FAMILIES[kind].float32) for name in sizes)
