"""The streaming writer's files are what safetensors reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from libra_hpc.weights.safetensors_writer import write_safetensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_safetensors_reads_what_was_streamed_in_any_order(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "b.weight": torch.randn(7),
        "empty": torch.empty(0, 4),
        "scalar": torch.randn(()),
    }
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    path = tmp_path / "w.safetensors"
    write_safetensors(path, dtype, shapes, reversed(list(tensors.items())))
    read = load_file(path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == dtype
        assert torch.equal(read[name], tensor), name


def test_a_tensor_that_is_not_contiguous(tmp_path: Path) -> None:
    tensor = torch.randn(4, 6).t()
    write_safetensors(tmp_path / "w", torch.float32, {"t": (6, 4)}, [("t", tensor)])
    assert torch.equal(load_file(tmp_path / "w")["t"], tensor)


def test_a_full_file_system_is_an_error_and_no_crash() -> None:
    with pytest.raises(OSError, match=r"[Nn]o space|too large"):
        write_safetensors(Path("/dev/shm/libra-hpc-test-too-large"), torch.float32, {"t": (1 << 44,)}, [])
    Path("/dev/shm/libra-hpc-test-too-large").unlink(missing_ok=True)
