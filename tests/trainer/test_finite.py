"""Samples that are not finite: the update is skipped, the step commits, weights and moments stay unchanged."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from libra_hpc.protocol.codec import pack_f32
from libra_hpc.protocol.trainer import Sample, StepDone, TrainStep
from libra_hpc.trainer.grpo_trainer import MEANS, NORM, _means
from libra_hpc.weights.names import ReplicaPlace

from .batches import train_step
from .settings import algorithm
from .support import Replica, build, join_all, make_model

pytestmark = pytest.mark.engine


def bad_advantage(sample: Sample) -> Sample:
    return msgspec.structs.replace(sample, advantage=math.nan)


def bad_logprobs(sample: Sample) -> Sample:
    values = [
        -math.inf if masked else value
        for value, masked in zip(np.frombuffer(sample.logprobs, np.float32).tolist(), sample.loss_mask, strict=True)
    ]
    return msgspec.structs.replace(sample, logprobs=pack_f32(values))


def spoiled(message: TrainStep, minibatch: int, spoil: Any = bad_advantage) -> TrainStep:
    """The same step, its first sample not finite."""
    minibatches = list(message.minibatches)
    minibatches[minibatch] = (spoil(minibatches[minibatch][0]), *minibatches[minibatch][1:])
    return TrainStep(message.step, message.generation, tuple(minibatches), message.divisors)


def test_the_gap_is_the_sum_of_those_of_the_engines(tmp_path: Path, world: ReplicaPlace) -> None:
    make_model("qwen2", tmp_path / "model")
    message = train_step(1, 0)
    samples = [
        msgspec.structs.replace(one, loss_mask=one.loss_mask.replace(b"\1", bytes([1 + number % 3])))
        for number, one in enumerate(message.minibatches[0])
    ]
    expected = Counter(mark for one in samples for mark in one.loss_mask if mark)
    (plain,), (done,) = (
        [build(tmp_path / "model", world)[1].step(TrainStep(1, 0, (tuple(batch),), message.divisors))]
        for batch in (message.minibatches[0], samples)
    )
    assert {number: tokens for number, (_, tokens) in done.engine_gaps.items()} == expected
    gap = sum(gap for gap, _ in done.engine_gaps.values()) / done.numbers["loss_tokens"]
    assert gap == pytest.approx(done.numbers["logprob_gap"]) == pytest.approx(plain.numbers["logprob_gap"])
    assert (done.numbers["loss"], done.numbers["grad_norm"]) == pytest.approx(
        (plain.numbers["loss"], plain.numbers["grad_norm"])
    )


def test_a_sum_that_only_the_report_has_skips_no_update(tmp_path: Path, world: ReplicaPlace) -> None:
    make_model("qwen2", tmp_path / "model")
    engine, trainer = build(tmp_path / "model", world)
    # With a KL term the loss has the log-probabilities too.
    trainer._settings = algorithm(kl_coef=0.0).algorithm
    done = trainer.step(spoiled(train_step(1, 0), 0, bad_logprobs))
    assert (done.numbers["skipped"], engine.state.updates) == (0, 1)
    assert "logprob_gap" not in done.numbers
    assert min(done.numbers["grad_norm"], done.numbers["entropy"], done.numbers["ratio_mean"]) > 0.0
    assert "loss" in done.numbers
    assert all(bool(torch.isfinite(tensor).all()) for tensor in engine.state.tensors())


def test_updates_without_a_token_to_train_on_have_no_means_over_tokens() -> None:
    assert _means([([0.0] * NORM + [0.5], 3)]) == {"loss": 0.0, "grad_norm": 0.5}


@pytest.mark.parametrize("spoil", [bad_advantage, bad_logprobs])
def test_a_sample_that_is_not_finite_changes_nothing_and_the_next_step_trains(
    tmp_path: Path, world: ReplicaPlace, spoil: Any
) -> None:
    make_model("qwen2", tmp_path / "model")
    engine, trainer = build(tmp_path / "model", world)
    trainer.step(train_step(1, 0))
    before = engine.state.capture()
    done = trainer.step(spoiled(train_step(2, 0), 0, spoil))
    assert (done.step, done.numbers["skipped"]) == (2, 1)
    assert not done.numbers.keys() & {*MEANS, "grad_norm"}, "0.0 would be the best"
    step, updates, tensors = engine.state.capture()
    assert (step, updates) == (2, before[1])
    assert all(torch.equal(now, old) for now, old in zip(tensors, before[2], strict=True))

    done = trainer.step(train_step(3, 0))
    assert (done.numbers["skipped"], engine.state.updates) == (0, 2)
    assert done.numbers["grad_norm"] > 0.0
    other, reference = build(tmp_path / "model", world)
    reference.step(train_step(1, 0))
    other.state.step = 2
    assert reference.step(train_step(3, 0)).numbers["loss"] == done.numbers["loss"]
    assert all(
        torch.equal(now, want) for now, want in zip(engine.state.tensors(), other.state.tensors(), strict=True)
    ), "as if the bad step had not been"


def test_only_the_bad_minibatch_is_skipped(tmp_path: Path, world: ReplicaPlace) -> None:
    make_model("qwen2", tmp_path / "model")
    engine, trainer = build(tmp_path / "model", world)
    good = train_step(1, 0, minibatches=2)
    done = trainer.step(spoiled(good, 0))
    assert (done.numbers["skipped"], engine.state.updates) == (1, 1)
    assert done.numbers["grad_norm"] > 0.0
    assert set(MEANS) - done.numbers.keys() == {"reference_kl"}
    other, reference = build(tmp_path / "model", world)
    alone = reference.step(TrainStep(1, 0, good.minibatches[1:], good.divisors[1:]))
    assert done.numbers["loss"] == alone.numbers["loss"]
    assert all(torch.equal(now, want) for now, want in zip(engine.state.tensors(), other.state.tensors(), strict=True))


def test_without_replicas_a_step_of_several_minibatches_copies_no_state(
    tmp_path: Path, world: ReplicaPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model("qwen2", tmp_path / "model")
    engine, trainer = build(tmp_path / "model", world)
    monkeypatch.delattr(type(engine.state), "capture")
    trainer.step(train_step(1, 0, minibatches=2))
    assert engine.state.updates == 2


def test_a_bad_sample_of_a_replica_is_skipped_in_all_processes_of_the_core(tmp_path: Path) -> None:
    model_dir = tmp_path / "model"
    make_model("qwen2", model_dir)
    first = Replica(tmp_path, "first", model_dir, tp=2)
    second = Replica(tmp_path, "second", model_dir, tp=2, elastic=True)
    first.ready(), second.ready()
    join_all([first, second], 1, tmp_path / "g1")
    before = first.tensors(0)
    messages = [train_step(1, 1, replica=rank, replicas=2) for rank in range(2)]
    first.send(messages[0])
    second.send(spoiled(messages[1], 0))
    assert [replica.receive(StepDone).numbers["skipped"] for replica in (first, second)] == [1, 0], "the core decides"
    assert all((tensor == before[name]).all() for name, tensor in first.tensors(1).items())
    assert first.close() + second.close() == [0] * 4
