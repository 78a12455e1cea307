"""The forms of elementwise parts that CUDA uses, against autograd of the plain ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from libra_hpc.config.learn import Recompute
from libra_hpc.models.architecture import read_shape
from libra_hpc.trainer.model import kernels, megatron_model
from libra_hpc.trainer.model.kernels import PLAIN_GATE, Gate, gate_fault, gated_gradient, install_gate, sum_in_products
from libra_hpc.trainer.model.mcore import fused_bias_swiglu, layers
from libra_hpc.trainer.model.packing import decode, pack
from libra_hpc.trainer.model.rotary import RotaryTable, Rotate, rotated, turn_fault, turned
from libra_hpc.trainer.saved import checkpoint
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
    for one in (Rotate.apply(x[..., :HEAD], *table), rotated(x[..., :HEAD], table)):
        found.append((one, *torch.autograd.grad((one * weights).sum(), x)))
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
    for name in ("swiglu", "swiglu_back"):
        monkeypatch.setattr(fused_bias_swiglu, name, getattr(fused_bias_swiglu, name))
    install_gate(torch.device("cpu"), torch.float32)
    assert fused_bias_swiglu.swiglu_back is before
    # Kernels do not compile without a GPU.
    install_gate(CUDA, torch.float32)
    assert (fused_bias_swiglu.swiglu, fused_bias_swiglu.swiglu_back) == PLAIN_GATE


@pytest.mark.parametrize(("kind", "recompute"), [("qwen3", "selective"), ("qwen2_moe", "none"), ("glm4", "full")])
def test_products_that_add_to_float32_sums_give_the_same_gradients(
    tmp_path: Path, world: ReplicaPlace, kind: str, recompute: Recompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(kind, tmp_path)
    added: list[torch.Size] = []

    def on_cpu(tokens: torch.Tensor, gradient: torch.Tensor, total: torch.Tensor) -> None:
        added.append(total.shape)
        total.addmm_(gradient.float().t(), tokens.float())

    for name in ("fused_weight_gradient_mlp_cuda", "_grad_accum_fusion_available"):
        monkeypatch.setattr(layers, name, None, raising=False)
    sum_in_products.cache_clear()
    with monkeypatch.context() as stand_in:
        stand_in.setattr(kernels, "choose", lambda *_: on_cpu)
        assert sum_in_products(CUDA, torch.bfloat16)
    cpu, shape, found = torch.device("cpu"), read_shape(tmp_path), []
    for fused in (sum_in_products(cpu, torch.bfloat16), sum_in_products(CUDA, torch.bfloat16)):
        monkeypatch.setattr(megatron_model, "sum_in_products", lambda *_, fused=fused: fused)
        engine = TrainEngine(shape, cpu, torch.bfloat16, world, OPTIMIZER, recompute=recompute)
        checkpoint.load_policy(engine, tmp_path)
        packs = pack([decode(sample) for sample in samples(4)], 48, cpu)
        engine.forward_backward(packs, lambda head, one: -head.likelihood(one.targets, 1.0).logprobs.sum())
        found.append({name: weight.main_grad.clone() for name, weight in engine.named_parameters().items()})
    sum_in_products.cache_clear()
    linears = re.compile(r".*(?<!local_experts\.\d)\.linear_\w+\.weight")
    assert len(added) == len(packs) * sum(map(bool, map(linears.fullmatch, found[0])))
    for name, mine in found[1].items():
        assert (mine - found[0][name]).abs().max() < 0.02 * mine.abs().max(), name


def test_a_wrong_kernel_is_named() -> None:
    cpu, bf16 = torch.device("cpu"), torch.bfloat16
    assert (gate_fault(cpu, bf16, PLAIN_GATE), turn_fault(cpu, bf16, turned)) == ("", "")
    ungated = Gate(PLAIN_GATE.forward, lambda gradient, both: 2 * gated_gradient(gradient, both))
    assert gate_fault(cpu, bf16, ungated).startswith("the gradient differs by")
    halves = turn_fault(cpu, bf16, lambda x, cos, sin, interleaved, sign: turned(x, cos, sin, False, sign))
    assert halves.startswith("a turn of pairs differs by")
