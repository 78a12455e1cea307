"""Weights for parameters that keep their addresses, on tensors of a CPU: the path of GPUs, but for pinned memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from libra_hpc.engine.update.in_place import InPlace
from libra_hpc.models.architecture import read_shape
from libra_hpc.weights.blocks import engine_slices

from .engine_harness import bring, make_model

Change = Callable[[torch.Tensor], torch.Tensor]


def one_of(values: torch.Tensor) -> torch.Tensor:
    values[5] += 1
    return values


def same_number(values: torch.Tensor) -> torch.Tensor:
    values[0] = -values[0]
    return values


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("change", [one_of, same_number, lambda values: values, lambda values: values + 1])
def test_a_parameter_has_every_bit_of_its_value_at_its_own_address(change: Change, dtype: torch.dtype) -> None:
    parameter = torch.nn.Parameter(torch.full((4, 16), 7.0, dtype=dtype), requires_grad=False)
    address, weights, value = parameter.data_ptr(), InPlace(), torch.zeros(64, dtype=dtype)
    for step in range(3):
        value = change(value.clone()) if step else value
        weights.stage("w", parameter, value.clone())
        weights.switch()
        assert parameter.data_ptr() == address
        assert torch.equal(parameter.view(-1).view(torch.int8), value.view(torch.int8))


def test_only_what_changed_is_copied() -> None:
    parameter, weights = torch.nn.Parameter(torch.zeros(64), requires_grad=False), InPlace()
    weights.stage("w", parameter, torch.zeros(64))
    weights.switch()
    parameter.data[:] = 3.0
    weights.stage("w", parameter, one_of(torch.zeros(64)))
    weights.switch()
    assert parameter[5] == 1.0
    assert parameter.sum() == 1.0 + 63 * 3.0


@pytest.mark.parametrize("when", ["before", "staged", "dropped"])
def test_what_the_device_lost_or_never_got_is_copied_whole(when: str) -> None:
    """Sleep frees the weights; a version that was staged for nothing is not on the device."""
    parameter, weights = torch.nn.Parameter(torch.zeros(64), requires_grad=False), InPlace()
    weights.stage("w", parameter, torch.ones(64))
    weights.switch()
    changed = one_of(torch.ones(64))
    if when == "before":
        weights.weights_lost()
    weights.stage("w", parameter, changed.clone())
    if when == "staged":
        weights.weights_lost()
    if when == "dropped":
        weights.drop()
        weights.stage("w", parameter, changed.clone())
    parameter.data[:] = 9.0
    weights.switch()
    assert torch.equal(parameter, changed)


@pytest.mark.vllm
@pytest.mark.parametrize("tp", [1, 2])
def test_an_image_reaches_the_parameters_as_it_would_by_exchange(tp: int, tmp_path: Path) -> None:
    """The whole way of a worker, without vLLM's model: version 3 is that of version 1 again."""
    from libra_hpc.engine.update.staging import Staging

    (tmp_path / "new").mkdir()
    old, new = make_model(tmp_path, 1), make_model(tmp_path / "new", 2)
    shape, image = read_shape(old.folder), old.image(tmp_path)
    few = {name: value.clone() for name, value in load_file(old.weights).items()}
    for value in few.values():
        value.view(-1)[:2] += 1.0
    versions = [load_file(old.weights), few, load_file(old.weights), load_file(new.weights)]
    ranks = [(_parameters(shape, tp, rank), _parameters(shape, tp, rank)) for rank in range(tp)]
    staged = [
        tuple(Staging(m, str(old.folder), (tp, rank), in_place=own) for m, own in zip(both, (True, False), strict=True))
        for rank, both in enumerate(ranks)
    ]
    addresses = [[p.data_ptr() for p in kept.parameters()] for kept, _ in ranks]
    for number, tensors in enumerate(versions, 1):
        update = bring(image, number, tensors, base=-1)
        for (kept, exchanged), both in zip(ranks, staged, strict=True):
            for one in both:
                one.start(update.path)
                while one.outcome() is None:
                    pass
                assert not one.outcome()
                one.switch()
            pairs = list(zip(kept.parameters(), exchanged.parameters(), strict=True))
            assert pairs
            assert all(torch.equal(a, b) for a, b in pairs)
    assert [[p.data_ptr() for p in kept.parameters()] for kept, _ in ranks] == addresses


def _parameters(shape: Any, tp: int, rank: int) -> torch.nn.Module:
    """A model with the parameters of a worker, by name, and nothing else."""
    sizes: dict[str, tuple[int, ...]] = {}
    for slices in engine_slices(shape, tp, rank).values():
        for one in slices:
            end = one.offset + (one.block.rows - 1) * one.stride + one.block.cols
            known = sizes.get(one.parameter, (0,))
            flat = one.parameter.endswith("bias") or "norm" in one.parameter
            rows = max(end, known[0] if flat else known[0] * one.stride) // (1 if flat else one.stride)
            sizes[one.parameter] = (rows,) if flat else (rows, one.stride)
    root = torch.nn.Module()
    for name, size in sizes.items():
        *folders, kind = name.split(".")
        place = root
        for folder in folders:
            if folder not in dict(place.named_children()):
                place.add_module(folder, torch.nn.Module())
            place = place.get_submodule(folder)
        place.register_parameter(kind, torch.nn.Parameter(torch.zeros(size), requires_grad=False))
    return root
