"""Mixture of experts: expert parallelism against one process, replayed routing, names of experts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from libra_hpc.errors import UserError
from libra_hpc.models.architecture import check_experts, read_shape
from libra_hpc.models.tensors import hf_shapes
from libra_hpc.protocol.codec import unpack_i32
from libra_hpc.protocol.trainer import Sample, StepDone, TrainStep
from libra_hpc.train_leader.step_metrics import train_metrics
from libra_hpc.trainer.model.packing import decode, pack
from libra_hpc.trainer.shards import spread
from libra_hpc.weights.names import ReplicaPlace, own_entries

from .batches import samples, train_step
from .support import Layout, Replica, assert_equals_one_process, build, join_all, make_model

LAYERS, TOP_K, EXPERTS = 2, 2, 8
CPU = torch.device("cpu")


@pytest.mark.engine
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("qwen3_moe", Layout(dp=2, ep=2)),
        ("qwen2_moe", Layout(tp=2, ep=2, etp=1)),
        pytest.param("qwen3_moe", Layout(tp=2, ep=2, etp=1), marks=pytest.mark.nightly),
        pytest.param("qwen3_moe", Layout(tp=2, etp=2), marks=pytest.mark.nightly),
        pytest.param("qwen3_moe", Layout(pp=2, cp=2, ep=2), marks=pytest.mark.nightly),
        pytest.param("olmoe", Layout(tp=2, dp=2, ep=2, etp=1), marks=pytest.mark.nightly),
        pytest.param("glm4_moe", Layout(tp=2, dp=2, ep=2, etp=1), marks=pytest.mark.nightly),
        pytest.param("glm4_moe", Layout(pp=2, cp=2, ep=2), marks=pytest.mark.nightly),
        pytest.param("qwen2_moe", Layout(pp=2, cp=2, ep=2), marks=pytest.mark.nightly),
        # Tensor ranks of an expert get unequal numbers of tokens.
        ("qwen3_moe", Layout(tp=2, dp=2, ep=2, etp=2)),
    ],
    ids=str,
)
def test_a_world_of_experts_equals_one_process(tmp_path: Path, world: ReplicaPlace, kind: str, layout: Layout) -> None:
    make_model(kind, tmp_path / "model")
    assert_equals_one_process(tmp_path, world, layout)


@pytest.mark.engine
def test_ranks_with_fewer_packs_take_part_in_every_exchange_of_tokens(tmp_path: Path, world: ReplicaPlace) -> None:
    micro_tokens = 56
    counts = set()
    for step in (1, 2, 3):
        batch = train_step(step, 0).minibatches[0]
        counts |= {tuple(len(pack([decode(s) for s in own], micro_tokens, CPU)) for own in spread(batch, 2))}
    assert any(mine != yours for mine, yours in counts)
    make_model("qwen3_moe", tmp_path / "model")
    assert_equals_one_process(tmp_path, world, Layout(dp=2, ep=2), micro_tokens=micro_tokens)


def test_names_of_all_ranks_are_those_of_the_file(tmp_path: Path) -> None:
    make_model("qwen3_moe", tmp_path)
    shape = read_shape(tmp_path)
    found: list[str] = []
    for rank in range(4):
        place = ReplicaPlace(tp=1, tp_rank=0, pp=1, pp_rank=0, dp=4, dp_rank=rank, ep=4)
        found += [name for entry in own_entries(shape, place).values() for name in entry.hf if ".experts." in name]
    assert sorted(found) == sorted(name for name in hf_shapes(shape) if ".experts." in name)
    assert len(found) == LAYERS * EXPERTS * 3


@pytest.mark.parametrize(
    ("degrees", "complaint"),
    [
        ({"tp": 1, "ep": 3, "etp": 1, "ranks": 3}, r"train\.ep = 3: .*8 experts"),
        ({"tp": 2, "ep": 1, "etp": 1, "ranks": 2}, r"train\.etp = 1: without expert parallelism"),
        ({"tp": 2, "ep": 4, "etp": 1, "ranks": 2}, r"train\.ep = 4: .*2 processes"),
        ({"tp": 4, "ep": 2, "etp": 2, "ranks": 4}, r"train\.etp = 2: .*1 or tp = 4"),
    ],
)
def test_degrees_that_do_not_fit_are_refused(tmp_path: Path, degrees: dict[str, int], complaint: str) -> None:
    make_model("qwen3_moe", tmp_path)
    with pytest.raises(UserError, match=complaint):
        check_experts(read_shape(tmp_path), **degrees)


def replayed(step: TrainStep, experts: Callable[[int, int], torch.Tensor]) -> TrainStep:
    """The step with ``experts(sample's number, tokens)``, [tokens, layers, k], of every sample; 255: unknown."""

    def with_experts(number: int, sample: Sample) -> Sample:
        given = experts(number, len(sample.loss_mask)).to(torch.uint8)
        return msgspec.structs.replace(sample, experts=given.numpy().tobytes())

    (batch,) = step.minibatches
    return msgspec.structs.replace(step, minibatches=(tuple(with_experts(*one) for one in enumerate(batch)),))


def random_experts(number: int, tokens: int) -> torch.Tensor:
    """Different random experts; none for the last token, which no engine computes."""
    generator = torch.Generator().manual_seed(number)
    found = torch.rand(tokens, LAYERS, EXPERTS, generator=generator).topk(TOP_K, dim=-1).indices
    found[-1] = 255
    return found


def routed(model: Any, tokens: list[int]) -> torch.Tensor:
    """The experts that transformers' model chooses, [tokens, layers, k]."""
    out = model(torch.tensor([tokens]), output_router_logits=True)
    return torch.stack([logits.topk(TOP_K, dim=-1).indices for logits in out.router_logits], dim=1)


def test_the_routing_of_the_rollout_is_replayed(tmp_path: Path, world: ReplicaPlace) -> None:
    reference = make_model("qwen3_moe", tmp_path / "model")
    batch = train_step(1, 0).minibatches[0]
    with torch.no_grad():
        own = [routed(reference, unpack_i32(sample.tokens)) for sample in batch]
    _, plain = build(tmp_path / "model", world)
    want = plain.step(train_step(1, 0))
    assert want.replayed == 0

    # What the router chooses by itself changes nothing.
    _, trainer = build(tmp_path / "model", world)
    done = trainer.step(replayed(train_step(1, 0), lambda number, tokens: own[number]))
    assert done.replayed == done.agreed == done.tokens * LAYERS * TOP_K
    assert (done.loss, done.grad_norm) == pytest.approx((want.loss, want.grad_norm), rel=1e-6)

    # Other experts change the loss. The gradient reaches the router through the weights of these experts.
    engine, trainer = build(tmp_path / "model", world)
    done = trainer.step(replayed(train_step(1, 0), random_experts))
    assert done.replayed == (done.tokens - len(batch)) * LAYERS * TOP_K
    assert 0.1 < done.agreed / done.replayed < 0.5
    assert abs(done.loss - want.loss) > 1e-3
    router = engine.named_parameters()["decoder.layers.1.mlp.router.weight"]
    assert router.main_grad.abs().max() > 0  # type: ignore[attr-defined]
    metrics = train_metrics([done, msgspec.structs.replace(done, agreed=0)], tokens=1, wall_s=1.0)
    assert metrics["router_agreement"] == pytest.approx(done.agreed / done.replayed / 2)


@pytest.mark.engine
def test_ranks_replay_their_own_tokens(tmp_path: Path, world: ReplicaPlace) -> None:
    """Tensor and context ranks have parts of a pack, and recomputation sees the same experts."""
    make_model("qwen3_moe", tmp_path / "model")
    step = replayed(train_step(1, 0), random_experts)
    layout = Layout(tp=2, cp=2, ep=2, etp=1)
    replica = Replica(tmp_path, "split", tmp_path / "model", recompute="full", **layout._asdict())
    _, trainer = build(tmp_path / "model", world)
    want = trainer.step(step)
    replica.ready()
    join_all([replica], 0, tmp_path / "meet")
    done = replica.ask(step, StepDone)
    assert done.loss == pytest.approx(want.loss, abs=2e-6)
    assert done.grad_norm == pytest.approx(want.grad_norm, rel=2e-5)
    # Recomputation counts again.
    assert (done.agreed, done.replayed) == (2 * want.agreed, 2 * want.replayed)
    assert replica.close() == [0] * layout.ranks


@pytest.mark.parametrize(("experts", "complaint"), [(b"\0\1", "2 chosen experts"), (b"\x08", "beyond the model's 8")])
def test_chosen_experts_that_do_not_fit_are_refused(tmp_path: Path, experts: bytes, complaint: str) -> None:
    make_model("qwen3_moe", tmp_path)
    (sample,) = samples(1, 1)
    if len(experts) == 1:
        experts *= len(sample.loss_mask) * LAYERS * TOP_K
    with pytest.raises(ValueError, match=complaint):
        decode(msgspec.structs.replace(sample, experts=experts), read_shape(tmp_path))
