"""Tensor, pipeline, data and context parallelism against one process, also across splits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from libra_hpc.protocol.trainer import StepDone
from libra_hpc.trainer.model.packing import decode, pack
from libra_hpc.weights.names import ReplicaPlace

from .batches import in_threes, samples, train_step
from .settings import algorithm
from .support import Layout, Replica, assert_equals_one_process, assert_same_step, build, join_all, make_model
from .test_attention import place_of

pytestmark = pytest.mark.engine


ONE_GROUP = {"num_key_value_heads": 1}
"""Fewer key/value heads than tensor-parallel ranks."""


@pytest.mark.parametrize(
    ("kind", "keys", "layout", "recompute"),
    [
        ("qwen3", ONE_GROUP, Layout(tp=2), "selective"),
        pytest.param("olmo2", ONE_GROUP, Layout(tp=2), "selective", marks=pytest.mark.nightly),
        ("qwen2", {"tied": True, "layers": 3}, Layout(pp=2), "none"),
        pytest.param("qwen3", {"tied": True}, Layout(dp=3), "none", marks=pytest.mark.nightly),
        pytest.param("qwen3_5_text", {}, Layout(tp=2, pp=2), "selective", marks=pytest.mark.nightly),
        pytest.param("gemma3_text", {"tied": True}, Layout(tp=2, pp=2), "selective", marks=pytest.mark.nightly),
        pytest.param("gemma3_text", {}, Layout(tp=2, cp=2), "full", marks=pytest.mark.nightly),
        pytest.param("smollm3", {"tied": True}, Layout(tp=2, pp=2), "none", marks=pytest.mark.nightly),
        pytest.param("granite", {"tied": True}, Layout(tp=2, pp=2), "selective", marks=pytest.mark.nightly),
        pytest.param("ministral3", {}, Layout(tp=2, dp=2), "none", marks=pytest.mark.nightly),
        pytest.param("olmo2", {}, Layout(tp=2, cp=2), "full", marks=pytest.mark.nightly),
        pytest.param("seed_oss", {}, Layout(tp=2, cp=2), "none", marks=pytest.mark.nightly),
        pytest.param("glm4", ONE_GROUP, Layout(tp=2), "none", marks=pytest.mark.nightly),
        pytest.param("qwen2", {"tied": True}, Layout(tp=2, pp=2), "full", marks=pytest.mark.nightly),
        pytest.param("qwen3", {}, Layout(tp=2, dp=2), "none", marks=pytest.mark.nightly),
        pytest.param("qwen2", {"tied": True, "layers": 3}, Layout(pp=2, dp=2), "none", marks=pytest.mark.nightly),
        pytest.param("qwen3", {}, Layout(cp=2), "selective", marks=pytest.mark.nightly),
        pytest.param("olmo3", {}, Layout(cp=2), "selective", marks=pytest.mark.nightly),
        pytest.param("olmo3", {}, Layout(tp=2, pp=2, cp=2), "none", marks=pytest.mark.nightly),
        pytest.param("qwen2", {}, Layout(tp=2, cp=2), "full", marks=pytest.mark.nightly),
        pytest.param("qwen3", {}, Layout(cp=2, dp=2), "none", marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_a_split_replica_equals_one_process(
    tmp_path: Path, world: ReplicaPlace, kind: str, keys: dict[str, Any], layout: Layout, recompute: str
) -> None:
    make_model(kind, tmp_path / "model", **keys)
    assert_equals_one_process(tmp_path, world, layout, recompute=recompute)


CPU = torch.device("cpu")


def test_ranks_share_the_work_of_one_long_sequence() -> None:
    (long,) = (decode(sample) for sample in samples(1, 1))
    repeated = long._replace(
        **{name: getattr(long, name).repeat(40) for name in ("tokens", "mask", "logprobs", "advantages", "engines")}
    )
    work = []
    for rank in range(4):
        (part,) = pack([repeated], 10_000, CPU, place_of(4, rank))
        # Each row sees all positions up to its own.
        work.append(int((part.positions[0] + 1).sum()))
    assert max(work) < 1.02 * min(work)


@pytest.mark.engine
def test_a_loss_over_sequences_equals_one_process_where_context_ranks_share_them(
    tmp_path: Path, world: ReplicaPlace
) -> None:
    make_model("qwen3", tmp_path / "model")
    settings = algorithm(loss="gspo", aggregate="sequence", clip=[0.001, 0.002], mask_sequences=[0.0, 1.0])
    _, trainer = build(tmp_path / "model", world, settings=settings)
    replica = Replica(tmp_path, "split", tmp_path / "model", cp=2, run=settings)
    replica.ready()
    join_all([replica], 0, tmp_path / "meet")
    message = in_threes(train_step(1, 0, minibatches=3))
    alone = trainer.step(message)
    replica.send(message)
    done = replica.receive(StepDone)
    assert_same_step(done, alone, 2e-6)
    assert done.numbers["clipped"] == alone.numbers["clipped"] > 0
    assert 1.0 > done.numbers["masked"] == alone.numbers["masked"] > 0
    assert replica.close() == [0, 0]
