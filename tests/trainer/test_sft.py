"""The supervised warm start."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from libra_hpc.errors import UserError
from libra_hpc.trainer.sft import Demonstration, warm_start

from .support import VOCAB, make_model


def _counting(batches: int) -> Iterator[list[Demonstration]]:
    dice = random.Random(0)
    for _ in range(batches):
        starts = [dice.randrange(VOCAB) for _ in range(8)]
        yield [([(start + i) % VOCAB for i in range(6 + start % 5)], [0] + [1] * (5 + start % 5)) for start in starts]


def test_a_policy_learns_to_count_and_replaces_its_own_folder(tmp_path: Path) -> None:
    untrained = make_model("qwen2", tmp_path)
    report = warm_start(tmp_path, tmp_path, _counting(120), steps=120, lr=1e-2, warmup=10)
    assert report["steps"] == 120
    trained = type(untrained).from_pretrained(tmp_path)
    prompt = torch.arange(10, 20)[None]
    with torch.no_grad():
        right = (trained(prompt).logits[0].argmax(-1) == prompt[0] + 1).float().mean()
    assert right > 0.8
    assert report["last_loss"] < report["first_loss"]
    # The same call gives the same policy.
    make_model("qwen2", tmp_path / "again")
    warm_start(tmp_path / "again", tmp_path / "out", _counting(120), steps=120, lr=1e-2, warmup=10)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()


def test_mistakes_are_named(tmp_path: Path) -> None:
    make_model("qwen2", tmp_path)
    with pytest.raises(UserError, match="warmup = 50"):
        warm_start(tmp_path, tmp_path / "out", _counting(1), steps=20)
    with pytest.raises(RuntimeError, match="ran out after 2 of 5"):
        warm_start(tmp_path, tmp_path / "out", _counting(2), steps=5, warmup=1)
    assert not (tmp_path / "out").exists()
