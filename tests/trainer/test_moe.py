"""Mixture of experts: expert parallelism against one process, names of experts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from libra_hpc.models.architecture import hf_shapes, read_shape
from libra_hpc.protocol.codec import pack_i32
from libra_hpc.trainer.model import kernels, moe
from libra_hpc.trainer.model.head import Head
from libra_hpc.trainer.model.kernels import choose_product, grouped, one_by_one
from libra_hpc.trainer.model.mcore import SequentialMLP
from libra_hpc.trainer.model.packing import Pack, decode, pack
from libra_hpc.weights.names import ReplicaPlace, own_entries

from . import support
from .batches import VOCAB, loss_logprobs, train_step, with_experts
from .settings import MICRO_TOKENS
from .support import ALGORITHM, Layout, assert_equals_one_process, build, make_model

LAYERS, EXPERTS, TOP_K = 2, 8, 2
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
def test_a_world_of_experts_equals_one_process(
    tmp_path: Path, world: ReplicaPlace, kind: str, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With experts of the rollout, of which each rank replays those of its tokens and layers."""
    make_model(kind, tmp_path / "model")
    monkeypatch.setattr(support, "train_step", lambda *step, **named: with_experts(train_step(*step, **named)))
    assert_equals_one_process(tmp_path, world, layout, recompute="none" if layout.pp > 1 else "full")


def forced(gate: Any, rows: torch.Tensor, known: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What transformers' router returns, with the experts of known tokens given."""
    logits = torch.nn.functional.linear(x, gate.weight)
    chosen = torch.where(known[:, None], rows.long(), logits.topk(TOP_K).indices)
    weights = logits.softmax(-1).gather(1, chosen)
    return logits, weights / weights.sum(-1, keepdim=True), chosen


@pytest.mark.parametrize("shares", [False, True])
def test_replayed_experts_have_the_gradients_of_a_plain_model_with_them(
    tmp_path: Path, world: ReplicaPlace, shares: bool
) -> None:
    model = make_model("qwen3_moe", tmp_path)
    engine, _ = build(tmp_path, world)
    (batch,) = with_experts(train_step(1, 0)).minibatches
    longer = batch
    if shares:
        # Two samples of 100 tokens with a common beginning.
        one, two = (replace(sample, tokens=b"") for sample in batch[:2])
        begin = torch.arange(80) % VOCAB
        ends = [torch.cat((begin, torch.full((20,), end))) for end in (3, 5)]
        fields = {"loss_mask": bytes(50) + b"\1" * 50, "logprobs": bytes(400)}
        longer = tuple(
            replace(sample, tokens=pack_i32(tokens.tolist()), **fields)
            for sample, tokens in zip((one, two), ends, strict=True)
        )
        (longer,) = with_experts(replace(train_step(1, 0), minibatches=(longer,))).minibatches
    packs = pack([decode(sample, engine.shape) for sample in longer], 256, CPU, shares=shares)
    assert sum(one.shared for one in packs) == 80 * shares
    total = []

    def loss(head: Head, one: Pack) -> torch.Tensor:
        total.append(head.likelihood(one.targets, 1.0).logprobs.sum())
        return total[-1]

    engine.forward_backward(packs, loss)
    want = torch.zeros(())
    for sample in longer:
        chosen = decode(sample, engine.shape).choices
        assert chosen is not None
        for layer, decoder in enumerate(model.model.layers):
            gate = decoder.mlp.gate
            gate.forward = partial(forced, gate, chosen.experts[:, layer], chosen.known)
        want = want + loss_logprobs(model, sample)[0].sum()
    want.backward()  # type: ignore[no-untyped-call]
    assert float(sum(total)) == pytest.approx(want.item(), rel=1e-5)
    for layer, decoder in enumerate(model.model.layers):
        mine = engine.named_parameters()[f"decoder.layers.{layer}.mlp.router.weight"].main_grad  # type: ignore[attr-defined]
        assert mine.sub(decoder.mlp.gate.weight.grad).abs().max() < 1e-5 * decoder.mlp.gate.weight.grad.abs().max()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert engine.norm() == pytest.approx(norm.item(), rel=1e-5)


def test_a_step_counts_replayed_experts_and_the_initial_reference_has_them(tmp_path: Path, world: ReplicaPlace) -> None:
    make_model("qwen3_moe", tmp_path)
    settings = ALGORITHM.changed(algorithm={"reference": str(tmp_path), "reference_kl_coef": 0.1})
    numbers = []
    for step, run in (
        (train_step(1, 0), ALGORITHM),
        (with_experts(train_step(1, 0)), settings),
        (with_experts(train_step(1, 0)), settings.changed(algorithm={"routing": "own"})),
    ):
        _, trainer = build(tmp_path, world, settings=run)
        numbers.append(trainer.step(step).numbers)
    nothing, found, own = numbers
    samples = train_step(1, 0).minibatches[0]
    assert nothing["unrouted_tokens"] == nothing["trained_tokens"] - len(samples)
    assert 0.05 < found["unrouted_tokens"] / found["trained_tokens"] < 0.15
    # A quarter of random experts are the router's own.
    assert 0.1 < found["router_agreement"] < 0.5
    assert abs(found["reference_kl"]) < 1e-9
    assert {"unrouted_tokens", "router_agreement"}.isdisjoint(own)
    assert own["loss"] == pytest.approx(nothing["loss"], abs=0.01)
    assert own["loss"] != found["loss"]


@pytest.mark.parametrize(("experts", "complaint"), [(b"\0\1", "2 chosen experts"), (b"\x08", "beyond the model's 8")])
def test_chosen_experts_that_do_not_fit_are_refused(tmp_path: Path, experts: bytes, complaint: str) -> None:
    make_model("qwen3_moe", tmp_path)
    sample = train_step(1, 0).minibatches[0][0]
    count = len(sample.loss_mask)
    experts *= count * LAYERS * TOP_K if len(experts) == 1 else 1
    with pytest.raises(ValueError, match=complaint):
        decode(replace(sample, experts=experts, routed=bytes(count)), read_shape(tmp_path))


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
