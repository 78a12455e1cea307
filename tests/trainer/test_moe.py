"""Mixture of experts: expert parallelism against one process, names of experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from libra_hpc.models.architecture import hf_shapes, read_shape
from libra_hpc.trainer.model import kernels, moe
from libra_hpc.trainer.model.kernels import choose_product, grouped, one_by_one
from libra_hpc.trainer.model.mcore import SequentialMLP
from libra_hpc.trainer.model.packing import decode, pack
from libra_hpc.weights.names import ReplicaPlace, own_entries

from .batches import train_step
from .settings import MICRO_TOKENS
from .support import Layout, assert_equals_one_process, build, make_model

LAYERS, EXPERTS = 2, 8
CPU = torch.device("cpu")


@pytest.mark.engine
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        # Ranks have unequal numbers of packs, and all take part in every exchange of tokens.
        pytest.param("qwen3_moe", Layout(dp=2, ep=2), marks=pytest.mark.nightly),
        pytest.param("qwen2_moe", Layout(tp=2, ep=2, etp=1), marks=pytest.mark.nightly),
        pytest.param("gpt_oss", Layout(tp=2, cp=2, ep=2, etp=1), marks=pytest.mark.nightly),
        ("qwen3_next", Layout(tp=2, cp=2, ep=2, etp=1)),
        pytest.param("qwen3_5_moe_text", Layout(pp=2, dp=2, ep=2), marks=pytest.mark.nightly),
        pytest.param("qwen3_moe", Layout(tp=2, ep=2, etp=1), marks=pytest.mark.nightly),
        pytest.param("qwen3_moe", Layout(tp=2, etp=2), marks=pytest.mark.nightly),
        pytest.param("qwen3_moe", Layout(pp=2, cp=2, ep=2), marks=pytest.mark.nightly),
        pytest.param("olmoe", Layout(tp=2, dp=2, ep=2, etp=1), marks=pytest.mark.nightly),
        pytest.param("glm4_moe", Layout(tp=2, dp=2, ep=2, etp=1), marks=pytest.mark.nightly),
        pytest.param("glm4_moe", Layout(pp=2, cp=2, ep=2), marks=pytest.mark.nightly),
        pytest.param("qwen2_moe", Layout(pp=2, cp=2, ep=2), marks=pytest.mark.nightly),
        # Tensor ranks of an expert get unequal numbers of tokens.
        pytest.param("qwen3_moe", Layout(tp=2, dp=2, ep=2, etp=2), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_a_world_of_experts_equals_one_process(tmp_path: Path, world: ReplicaPlace, kind: str, layout: Layout) -> None:
    make_model(kind, tmp_path / "model")
    assert_equals_one_process(tmp_path, world, layout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_experts_have_the_gradients_of_megatrons_one_by_one(
    tmp_path: Path, world: ReplicaPlace, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model("qwen3_moe", tmp_path)
    packs = pack([decode(sample) for sample in train_step(1, 0).minibatches[0]], MICRO_TOKENS, CPU)
    found = []
    for experts in (moe.GroupedExperts, SequentialMLP):
        monkeypatch.setattr(moe, "GroupedExperts", experts)
        engine, _ = build(tmp_path, world, dtype)
        engine.forward_backward(packs, lambda head, one: head.likelihood(one.targets, 1.0).logprobs.sum())
        found.append({name: parameter.main_grad.clone() for name, parameter in engine.named_parameters().items()})
    mine, theirs = found
    assert mine.keys() == theirs.keys()
    assert any(theirs[name].any() for name in theirs if ".local_experts.7." in name)
    for name, gradient in theirs.items():
        error = float((mine[name] - gradient).abs().max())
        assert error <= (1e-6 if dtype is torch.float32 else 2**-8) * float(gradient.abs().max()), name


@pytest.mark.parametrize(
    ("product", "line"),
    [
        (grouped, ""),
        (
            lambda left, right, ends: grouped(left, right, ends) * (1 + (right.dim() == 2)),
            "gradient of weights differs",
        ),
        (lambda left, right, ends: grouped(left, right, ends.flip(0)), "failed: "),
        (lambda *_: torch.nn.functional.nothing(), "failed: AttributeError: "),
    ],
)
def test_a_product_that_fails_at_the_start_is_not_used(
    product: kernels.Product, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "grouped", product)
    choose_product.cache_clear()
    assert (choose_product(24, 40, CPU, torch.bfloat16) is one_by_one) == bool(line)
    assert line in (printed := capsys.readouterr().err)
    assert printed.count("\n") == bool(line)
    choose_product.cache_clear()


def test_names_of_all_ranks_are_those_of_the_file(tmp_path: Path) -> None:
    make_model("qwen3_moe", tmp_path)
    shape = read_shape(tmp_path)
    found: list[str] = []
    for rank in range(4):
        place = ReplicaPlace(tp=1, tp_rank=0, pp=1, pp_rank=0, dp=4, dp_rank=rank, ep=4)
        found += [name for entry in own_entries(shape, place).values() for name in entry.hf if ".experts." in name]
    assert sorted(found) == sorted(name for name in hf_shapes(shape) if ".experts." in name)
    assert len(found) == LAYERS * EXPERTS * 3
