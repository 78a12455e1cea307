"""Weights for parameters that keep their addresses, on tensors of a CPU: the path of GPUs, but for pinned memory."""

from __future__ import annotations

import math
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from libra_hpc.engine.update.in_place import InPlace
from libra_hpc.engine.update.landing import landed, tensor_places
from libra_hpc.engine.update.staged_update import StagedUpdate
from libra_hpc.models.architecture import Architecture, hf_shapes, read_shape
from libra_hpc.protocol.engine import UpdateWeights, VersionFiles
from libra_hpc.weights.blocks import Slice, engine_slices, own_slices
from libra_hpc.weights.delta import DENSE, dense, marked
from libra_hpc.weights.image import Image
from libra_hpc.weights.names import ReplicaPlace
from libra_hpc.weights.pieces import (
    VALUES,
    WHOLE,
    TensorBlock,
    elements,
    offer_path,
    payload_path,
    read_offer,
    write_offer,
)
from libra_hpc.weights.weightfile import tensor_type
from tests.trainer.support import make_model as make_trained

Tensors = dict[str, npt.NDArray[np.int16 | np.int32]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_parameter_has_every_bit_of_its_value_at_its_own_address(dtype: torch.dtype) -> None:
    parameter = torch.nn.Parameter(torch.full((4, 16), 7.0, dtype=dtype), requires_grad=False)
    address, weights, value = parameter.data_ptr(), InPlace(), torch.zeros(64, dtype=dtype)
    weights.stage(parameter, value)
    weights.stage(parameter, torch.tensor([5.0, -0.0], dtype=dtype), torch.tensor([63, 1], dtype=torch.int32))
    assert float(parameter.data.sum()) == 64 * 7.0, "nothing changes before the switch"
    weights.switch()
    value[63], value[1] = 5.0, -0.0
    assert parameter.data_ptr() == address
    assert torch.equal(parameter.view(-1).view(torch.int8), value.view(torch.int8))
    weights.stage(parameter, value + 1)
    weights.drop()
    weights.switch()
    assert torch.equal(parameter.view(-1), value)


@given(st.data())
def test_each_changed_element_lands_where_the_slice_has_it(data: st.DataObject) -> None:
    rows, width = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    tensor = np.arange(rows * width)

    def rectangle() -> TensorBlock:
        row, col = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, width - 1))
        count, cols = data.draw(st.integers(1, rows - row)), data.draw(st.integers(1, width - col))
        return TensorBlock("t", row * width + col, count, cols, width)

    piece, own = rectangle(), rectangle()
    stride = own.cols + data.draw(st.integers(0, 2))
    where = Slice(own, "p", data.draw(st.integers(0, 3)), stride)
    positions = data.draw(st.lists(st.integers(0, elements(piece) - 1), unique=True).map(sorted))
    places = tensor_places(piece, np.array(positions, np.int64))
    found, chosen = landed(places, where)
    expected = {}
    for r in range(own.rows):
        for c in range(own.cols):
            expected[own.offset + r * width + c] = where.offset + r * stride + c
    assert dict(zip(tensor[places][chosen].tolist(), found.tolist(), strict=True)) == {
        one: expected[one] for one in places.tolist() if one in expected
    }


TRAINERS = (ReplicaPlace(1, 0, 1, 0), ReplicaPlace(2, 0, 1, 0), ReplicaPlace(2, 0, 2, 0))
"""One place of each layout of the trainers."""


def offered(shape: Architecture, image: Image, version: int, old: Tensors, share: float, seed: int) -> VersionFiles:
    """A version in which about ``share`` of the elements of ``old`` changes, as all ranks of a trainer offer it."""
    chance, layout = np.random.default_rng(seed), TRAINERS[0 if shape.stacked_experts else seed % len(TRAINERS)]
    manifests, base = [], version - 1 if version > 1 else WHOLE
    for tp_rank, pp_rank in product(range(layout.tp), range(layout.pp)):
        writer, encoded = f"t{tp_rank}.{pp_rank}", []
        for slices in own_slices(shape, ReplicaPlace(layout.tp, tp_rank, layout.pp, pp_rank)).values():
            for block, *_ in slices:
                kind, size = tensor_type(block.tensor, "BF16"), old[block.tensor].itemsize
                strides = (size * block.stride, size)
                part = as_strided(old[block.tensor][block.offset :], (block.rows, block.cols), strides)
                bits = chance.random(elements(block)) < share
                # What is in float32 does not change.
                if bits.any() and (kind == "BF16" or base == WHOLE):
                    part[bits.reshape(part.shape)] ^= 1
                    values = np.ascontiguousarray(part).reshape(-1)
                    marks = np.packbits(bits, bitorder="little")
                    whole = bits.mean() > DENSE
                    encoded.append(dense(block, kind, values) if whole else marked(block, "BF16", marks, values))
        write_offer(image.path.parent, version, base, writer, encoded)
        manifests.append(offer_path(image.path.parent, version, writer))
    image.apply(version, [(read_offer(path), payload_path(path).read_bytes()) for path in manifests])
    return VersionFiles(version, base, tuple(map(str, manifests)))


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("kind", "tp"), [("qwen3", 1), ("qwen3", 2), ("qwen3_moe", 2), ("gpt_oss", 1), ("olmo2", 2), ("glm4_moe", 2)]
)
def test_pieces_in_place_are_what_an_image_brings_by_exchange(tmp_path: Path, kind: str, tp: int) -> None:
    from libra_hpc.engine.update.staging import Staging

    make_trained(kind, tmp_path / "model", tied=kind == "olmo2")
    shape = read_shape(tmp_path / "model")
    (tmp_path / "node").mkdir()
    image = Image(tmp_path / "node", hf_shapes(shape), "BF16")
    old: Tensors = {
        name: np.zeros(math.prod(size), VALUES[tensor_type(name, "BF16")]) for name, size in image.shapes.items()
    }
    ranks = [(_parameters(shape, tp, rank), _parameters(shape, tp, rank)) for rank in range(tp)]
    # Experts are exchanged in vLLM's own layers alone.
    ways = (True, bool(shape.experts))
    staged = [
        [Staging(m, str(tmp_path / "model"), (tp, rank), in_place=way) for m, way in zip(both, ways, strict=True)]
        for rank, both in enumerate(ranks)
    ]
    changes = [offered(shape, image, 1, old, 1.0, 0)]
    for version in range(1, 8):
        if version > 1:
            changes.append(offered(shape, image, version, old, (0.01, 0.2, 0.6, 0.95)[version % 4], version))
        if version % 3 == 0:
            continue
        own = [list(change.manifests) for change in changes] if version > 1 else []
        for both in staged:
            for one, versions in zip(both, (own, []), strict=True):
                one.start(str(image.path), versions)
                while one.outcome() is None:
                    time.sleep(0.001)
                assert not one.outcome()
                one.switch()
        changes = []
        for some, others in ranks:
            pairs = list(zip(some.parameters(), others.parameters(), strict=True))
            assert pairs
            assert all(torch.equal(a, b) for a, b in pairs), version


def test_the_image_is_read_where_the_changes_lead_nowhere(tmp_path: Path) -> None:
    """An engine is behind them, lost its weights, or they are as large as the image."""
    shape = {"t": (1000,)}
    image = Image(tmp_path, shape, "BF16")
    calls: list[tuple[str, Any]] = []

    def rpc(name: str, args: tuple[Any, ...] = ()) -> list[Any]:
        calls.append((name, args))
        return [""]

    def change(version: int, count: int, base: int = -2) -> VersionFiles:
        block = TensorBlock("t", 0, 1, 1000, 1000)
        bits = np.packbits(np.arange(1000) < count, bitorder="little")
        values = np.full(1000, version, np.int16)
        encoded = dense(block, "BF16", values) if count == 1000 else marked(block, "BF16", bits, values)
        base = version - 1 if base == -2 else base
        offer = write_offer(tmp_path, version, base, "t0.0", [encoded])
        path = offer_path(tmp_path, version, "t0.0")
        image.apply(version, [(offer, payload_path(path).read_bytes())])
        return VersionFiles(version, base, (str(path),))

    update = StagedUpdate(rpc, in_place=True)
    changes: list[VersionFiles] = []

    def staged(*expected: int) -> None:
        newest = changes[-1].version
        update.take(UpdateWeights(str(image.path), newest, tuple(changes)), shape, False)
        while not update.ready():
            pass
        (given,) = (args[1] for name, args in calls if name == "stage_weights")
        assert [Path(manifest).name for manifests in given for manifest in manifests] == [
            offer_path(tmp_path, version, "t0.0").name for version in expected
        ]
        assert update.switch() == newest
        calls.clear()

    changes.append(change(1, 1000, base=-1))
    staged()
    changes += [change(2, 10), change(3, 10)]
    staged(2, 3)
    changes.append(change(4, 900))
    staged()
    changes.append(change(5, 10))
    update.weights_lost()
    staged()
    changes[:] = [change(6, 10), change(7, 10)]
    staged(6, 7)
    changes[:] = [change(8, 10), change(9, 10)][1:]
    staged()
    changes[:] = [change(10, 10)]
    Path(changes[0].manifests[0]).unlink()
    staged()


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
