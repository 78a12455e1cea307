"""Every family's Hugging Face tensors, cut for any number of tensor-parallel ranks and put together again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from libra_hpc.models.architecture import Architecture, read_shape
from libra_hpc.models.shapes import model_shape
from libra_hpc.models.supported import TRAINED
from libra_hpc.weights.names import ReplicaPlace, from_hf, hf_shapes, stage_entries, to_hf


def architecture(folder: Path, kind: str, **keys: Any) -> Architecture:
    config = {
        "model_type": kind,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 32,
        "sliding_window": None,
        **keys,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return read_shape(folder)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("kind", TRAINED)
def test_cut_tensors_put_together_are_the_same_bits(kind: str, groups: int, tmp_path: Path) -> None:
    shape = architecture(tmp_path, kind, num_key_value_heads=groups)
    files = {name: torch.randn(size) for name, size in hf_shapes(shape).items()}
    for tp in (1, 2, 4):
        together: dict[str, torch.Tensor] = {}
        for pp_rank in range(2):
            for entry in stage_entries(shape, 2, pp_rank).values():
                parts = [
                    from_hf(entry, files.__getitem__, shape, ReplicaPlace(tp, rank, 2, pp_rank)) for rank in range(tp)
                ]
                assert len({part.shape for part in parts}) == 1
                together.update(zip(entry.hf, to_hf(entry, parts, shape), strict=True))
        assert together.keys() == files.keys()
        assert all(torch.equal(together[name], tensor) for name, tensor in files.items())


@pytest.mark.parametrize("kind", TRAINED)
def test_the_planner_counts_the_parameters_that_are_trained(kind: str, tmp_path: Path) -> None:
    shape = architecture(tmp_path, kind)
    sizes = hf_shapes(shape).values()
    assert model_shape(tmp_path).params == sum(torch.Size(size).numel() for size in sizes)
