"""The forms of elementwise parts that CUDA uses, against autograd of the plain ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from libra_hpc.config.learn import Recompute
from libra_hpc.models.architecture import read_shape
from libra_hpc.trainer.model import megatron_model
from libra_hpc.trainer.model.kernels import gated_gradient, install_gate
from libra_hpc.trainer.model.mcore import fused_bias_swiglu
from libra_hpc.trainer.model.packing import decode, pack
from libra_hpc.trainer.model.rotary import RotaryTable, Rotate, rotated
from libra_hpc.trainer.train_engine import TrainEngine
from libra_hpc.weights.names import ReplicaPlace

from .batches import samples
from .support import OPTIMIZER, make_model

HEAD = 16
CUDA = torch.device("cuda")


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [HEAD, 12])
def test_a_turn_and_its_gradient(width: int, interleaved: bool) -> None:
    torch.manual_seed(0)
    angles = torch.rand(9, 1, width // 2) * 6
    angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), dim=-1)
    table = RotaryTable(angles.cos(), angles.sin(), interleaved)
    # Heads of a wider tensor, as the projection leaves them.
    x = torch.randn(9, 3, 2 * HEAD, requires_grad=True)
    weights = torch.randn(9, 3, HEAD)
    found = []
    for turned in (Rotate.apply(x[..., :HEAD], *table), rotated(x[..., :HEAD], table)):
        found.append((turned, *torch.autograd.grad((turned * weights).sum(), x)))
    for mine, theirs in zip(*found, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)
        assert mine.abs().max() > 0.1


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.float32, torch.bfloat16)])
def test_the_gradient_of_the_gated_activation(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """The gradient of experts has another type than the activation."""
    torch.manual_seed(0)
    gradient, both = torch.randn(7, 5, dtype=dtypes[0]), torch.randn(7, 10).to(dtypes[1])
    plain = both.to(torch.float32, copy=True).requires_grad_()
    gate, up = plain.chunk(2, -1)
    (want,) = torch.autograd.grad((F.silu(gate) * up * gradient).sum(), plain)
    got, theirs = gated_gradient(gradient, both), fused_bias_swiglu.swiglu_back(gradient, both)
    assert got.dtype == theirs.dtype
    tolerance = 1e-6 if dtypes[1] is torch.float32 else 2e-2
    assert (got - want).abs().max() < tolerance


def test_a_cpu_keeps_the_form_of_megatron_core(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fused_bias_swiglu.swiglu_back
    monkeypatch.setattr(fused_bias_swiglu, "swiglu_back", before)
    install_gate(torch.device("cpu"))
    assert fused_bias_swiglu.swiglu_back is before
    install_gate(CUDA)
    assert fused_bias_swiglu.swiglu_back is gated_gradient


@pytest.mark.parametrize(("kind", "recompute"), [("qwen3", "selective"), ("glm4", "none"), ("qwen3_moe", "full")])
def test_a_model_has_the_same_gradients_with_them(
    tmp_path: Path, world: ReplicaPlace, kind: str, recompute: Recompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(kind, tmp_path)
    torch.manual_seed(1)
    engine = TrainEngine(
        read_shape(tmp_path), torch.device("cpu"), torch.float32, world, OPTIMIZER, recompute=recompute
    )
    with torch.no_grad():
        for parameter in engine.ddp.parameters():
            parameter.normal_(std=0.1)
    packs = pack([decode(sample) for sample in samples(2)], 96, engine.device)
    found = []
    for on_cuda in (False, True):
        if on_cuda:
            monkeypatch.setattr(fused_bias_swiglu, "swiglu_back", gated_gradient)
            monkeypatch.setattr(megatron_model, "rotated", lambda x, table: Rotate.apply(x, *table))
        engine.forward_backward(packs, lambda head, one: -head.likelihood(one.targets, 1.0).logprobs.sum())
        found.append([buffer.grad_data.clone() for buffer in engine.ddp.buffers])
    for mine, theirs in zip(*found, strict=True):
        assert mine.abs().max() > 0.1
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5)
        assert not torch.equal(mine, theirs)
