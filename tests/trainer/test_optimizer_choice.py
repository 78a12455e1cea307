"""Adam is torch's, and its learning rate that of the run file."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from libra_hpc.config.load import validate
from libra_hpc.trainer.model.mcore import optimizer as megatron_optimizers
from libra_hpc.trainer.saved.optimizer_state import distributed, learning_rate
from libra_hpc.weights.names import ReplicaPlace

from .support import build, make_model


def test_adam_is_torchs_where_another_package_has_one(
    tmp_path: Path, world: ReplicaPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron-Core takes that of Transformer Engine or Apex, which counts the steps of a group since its start."""
    make_model("qwen3", tmp_path)
    monkeypatch.setattr(megatron_optimizers, "USING_PYTORCH_OPTIMIZER", False)
    monkeypatch.setattr(megatron_optimizers, "Adam", torch.optim.SGD)
    engine, _ = build(tmp_path, world)
    (part,) = distributed(engine._optimizer)
    assert type(part.optimizer) is torch.optim.AdamW


@pytest.mark.parametrize(
    ("keys", "shares"),
    [
        ({"decay_steps": 3}, [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ({"decay": "linear", "decay_steps": 4}, [0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2]),
        ({"decay": "linear"}, [0.5, 1, *(1 - j / 9 for j in range(1, 9))]),
        ({"decay": "cosine"}, [0.5, 1, *(0.5 + 0.5 * math.cos(math.pi * j / 9) for j in range(1, 9))]),
    ],
)
def test_the_rate_of_each_update(keys: dict[str, Any], shares: list[float]) -> None:
    sections = {"run": {"steps": 5}, "algorithm": {"minibatches": 2}, "optimizer": {"warmup_steps": 2, **keys}}
    config = validate(sections)
    groups: list[dict[str, Any]] = [{}]
    scheduler = learning_rate(SimpleNamespace(param_groups=groups), config.optimizer, config.updates)
    found = []
    for update in range(1, 11):
        scheduler.num_steps = update
        scheduler.step(0)
        found.append(groups[0]["lr"] / config.optimizer.lr)
    assert found == pytest.approx(shares)
