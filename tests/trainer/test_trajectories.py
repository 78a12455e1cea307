"""Trajectories of three samples, trained in several packs, against the loss computed by hand from transformers."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from libra_hpc.protocol.trainer import Sample
from libra_hpc.trainer.shards import divisor
from libra_hpc.weights.names import ReplicaPlace

from .batches import in_threes, loss_logprobs, loss_tokens, train_step
from .settings import algorithm
from .support import build, make_model

TEMPERATURE, LONGEST = 0.8, 64


def by_hand(model: Any, samples: tuple[Sample, ...], aggregate: str) -> torch.Tensor:
    """The objective, written out trajectory by trajectory; its gradient is the surrogate's."""
    sums, sizes = [], []
    for _, parts in groupby(samples, key=lambda sample: sample.uid.split(".")[:2]):
        total, count = torch.zeros(()), 0
        for sample in parts:
            logprobs, behaviour = loss_logprobs(model, sample, TEMPERATURE)
            weight = (logprobs.detach() - behaviour).exp().clamp(max=2.0)
            ratio = (logprobs - logprobs.detach()).exp()
            total = total - (weight * sample.advantage * ratio).sum()
            count += len(logprobs)
        sums.append(total)
        sizes.append(count)
    if aggregate == "sequence":
        return sum(total / count for total, count in zip(sums, sizes, strict=True)) / len(sums)  # type: ignore[return-value]
    return sum(sums) / (sum(sizes) if aggregate == "token" else len(sums) * LONGEST)  # type: ignore[return-value]


@pytest.mark.parametrize("aggregate", ["token", "sequence", "constant"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_a_trajectory_of_three_samples_weighs_as_one(
    tmp_path: Path, world: ReplicaPlace, kind: str, aggregate: str
) -> None:
    model = make_model(kind, tmp_path / "model")
    step = in_threes(train_step(1, 0))
    (batch,) = step.minibatches
    step = msgspec.structs.replace(step, divisors=(divisor(batch, aggregate, LONGEST),))
    settings = algorithm(temperature=TEMPERATURE, aggregate=aggregate)
    _, trainer = build(tmp_path / "model", world, settings=settings)
    done = trainer.step(step)
    want = by_hand(model, batch, aggregate)
    want.backward()  # type: ignore[no-untyped-call]
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert (done.numbers["loss"], done.numbers["grad_norm"]) == pytest.approx((want.item(), norm.item()), rel=1e-4)
    assert done.numbers["loss_tokens"] == loss_tokens([*batch])
