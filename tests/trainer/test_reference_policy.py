"""The reference policy: the loss against plain torch, and every layout against one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from libra_hpc.config.run import RunConfig
from libra_hpc.protocol.trainer import Freed, Standby
from libra_hpc.trainer.settings import sample_work
from libra_hpc.weights.names import ReplicaPlace

from .batches import loss_logprobs, loss_tokens, train_step
from .settings import algorithm
from .support import Layout, assert_same_state, assert_same_step, build, fixed_run, make_model
from .test_core import Run

COEF = 0.3


def with_reference(folder: Path) -> RunConfig:
    return algorithm(temperature=0.8, reference=str(folder), reference_kl_coef=COEF)


@pytest.mark.parametrize(("kl_in", "teacher"), [("loss", "qwen3"), ("reward", "gemma3_text"), ("reward", "qwen3_moe")])
def test_gradient_and_column_equal_plain_torch(tmp_path: Path, world: ReplicaPlace, kl_in: str, teacher: str) -> None:
    """In the reward as a teacher, whose likelihoods are advantages of tokens."""
    policy, settings = make_model("qwen3", tmp_path / "model", tied=True), with_reference(tmp_path / "other")
    if kl_in == "reward":
        settings = settings.changed(algorithm={"kl": "k1", "kl_in": "reward"})
    sizes = {} if teacher == "qwen3" else {"hidden_size": 48}
    other = make_model(teacher, tmp_path / "other", tied=True, **sizes)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.9)
    other.save_pretrained(tmp_path / "other")
    _, trainer = build(tmp_path / "model", world, settings=settings)
    total, kl = torch.zeros(()), 0.0
    batch = list(train_step(1, 0).minibatches[0])
    for sample in batch:
        (lp, behaviour), (frozen, _) = (loss_logprobs(model, sample, 0.8) for model in (policy, other))
        weight = (lp.detach() - behaviour).exp().clamp(max=settings.algorithm.is_truncation)
        k3 = (frozen.detach() - lp).exp() - 1 - (frozen.detach() - lp)
        advantage = sample.advantage - (COEF * (lp - frozen).detach() if kl_in == "reward" else 0.0)
        term = -(lp - lp.detach()).exp() * advantage + (COEF * k3 if kl_in == "loss" else 0.0)
        total = total + (weight * term).sum()
        kl += float((weight * k3.detach()).sum())
    count = loss_tokens(batch)
    (total / count).backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.get_total_norm([p.grad for p in policy.parameters() if p.grad is not None])
    packs = [trainer._pack(tuple(batch))]
    (before,) = trainer._reference_logprobs(packs)
    done = trainer.step(train_step(1, 0))
    assert done.numbers["loss"] == pytest.approx(float(total.detach()) / count, abs=2e-6)
    assert done.numbers["grad_norm"] == pytest.approx(float(norm), rel=2e-5)
    assert done.numbers["reference_kl"] == pytest.approx(kl / count, rel=1e-5)
    assert kl > 0.1
    trainer.step(train_step(2, 0, minibatches=2))
    (after,) = trainer._reference_logprobs(packs)
    assert before
    assert after
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "no update changes it"
    assert trainer._reference
    left = [one.untyped_storage().nbytes() for one in trainer._reference._model.module.parameters()]
    assert max(left) <= 4, "memory for a pass alone"


def test_beginnings_are_shared_where_policy_and_reference_can(tmp_path: Path) -> None:
    for kind in ("qwen3", "qwen3_next"):
        make_model(kind, tmp_path / kind)
    config = with_reference(tmp_path / "qwen3_next").changed(model={"path": str(tmp_path / "qwen3")})
    assert not sample_work(config).shares
    assert sample_work(config.changed(algorithm={"reference_kl_coef": 0.0})).shares


def test_without_a_reference_there_is_no_column(tmp_path: Path, world: ReplicaPlace) -> None:
    make_model("qwen2", tmp_path / "model")
    _, trainer = build(tmp_path / "model", world)
    assert "reference_kl" not in trainer.step(train_step(1, 0)).numbers


@pytest.mark.engine
@pytest.mark.parametrize(
    ("kind", "teacher", "layout", "elastic_dp"),
    [
        ("qwen3", "qwen3_moe", Layout(cp=2), 2),
        pytest.param("qwen2", "", Layout(tp=2, pp=2), 1, marks=pytest.mark.nightly),
        pytest.param("qwen2", "qwen3_moe", Layout(tp=2, pp=2), 1, marks=pytest.mark.nightly),
        pytest.param("qwen3_moe", "", Layout(dp=2, ep=2), 2, marks=pytest.mark.nightly),
        pytest.param("qwen3_moe", "qwen2", Layout(dp=2, ep=2), 2, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_every_layout_and_elastic_replicas_equal_one_process(
    tmp_path: Path, world: ReplicaPlace, kind: str, teacher: str, layout: Layout, elastic_dp: int
) -> None:
    make_model(kind, tmp_path / "model", tied=kind == "qwen2")
    if teacher:
        make_model(teacher, tmp_path / "teacher", layers=3, hidden_size=48)
    settings = with_reference(tmp_path / ("teacher" if teacher else "model"))
    run = Run(tmp_path, tmp_path / "model", layout, elastic_dp=elastic_dp, settings=settings)
    elastic = run.replica("elastic")
    want, final = fixed_run(tmp_path / "model", world, 3, settings=settings)
    for replica in (run.core, elastic):
        replica.ready()
    run.form(elastic)
    for step, alone in enumerate(want, 1):
        if step == 3:
            # Its memory was given back meanwhile.
            elastic.ask(Standby(), Freed)
            run.form(elastic)
        done = run.step(step)
        assert_same_step(done, alone, 5e-6)
        assert done.numbers["reference_kl"] == pytest.approx(alone.numbers["reference_kl"], rel=1e-3, abs=1e-7)
    assert_same_state(run.core.tensors(3), final)
    assert run.core.close() == [0] * layout.ranks
