"""Adam is torch's, and a resume exact, also where packages that Megatron-Core would rather take can be imported."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from libra_hpc.config.load import validate
from libra_hpc.trainer.adamw import distributed, learning_rate
from libra_hpc.trainer.saved import checkpoint
from libra_hpc.weights.names import ReplicaPlace

from .batches import train_step
from .conftest import World
from .support import build, make_model, save

PACKAGE = """
import importlib.abc, importlib.machinery, sys
import torch

__version__ = "2.9.0"


class FusedAdam(torch.optim.AdamW):
    def __init__(self, params, adam_w_mode=True, **options):
        super().__init__(params, **options)

    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if state := self.state[parameter]:
                    state["step"].fill_(group["step"] - 1)
        return super().step(closure)


class Names(type):
    def __getattr__(cls, name):
        return named(name)


def named(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return FusedAdam if name == "FusedAdam" else Names(name, (torch.nn.Module,), {})


class Modules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        # Without these Megatron-Core computes as it does without the package.
        if name.startswith(__name__ + ".") and "offload" not in name and "attention" not in name:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def exec_module(self, module):
        module.__getattr__ = named


__getattr__ = named
sys.meta_path.insert(0, Modules())
"""
"""Stands for Transformer Engine and Apex, from which any name can be imported. Its Adam counts steps by group from its
own first one, as theirs do, and ignores the counters beside the moments."""


def resume(base: Path, place: ReplicaPlace) -> dict[str, torch.Tensor]:
    """Differences of the weights after three steps without a stop and with one after the second."""
    engine, trainer = build(base / "model", place)
    for step in (1, 2):
        trainer.step(train_step(step, 0))
    save(engine, base / "model", base / "saved")
    again, resumed = build(base / "model", place)
    checkpoint.load_state(again, base / "saved")
    for one in (trainer, resumed):
        one.step(train_step(3, 0))
    (part,) = distributed(engine._optimizer)
    assert type(part.optimizer) is torch.optim.AdamW
    shards = again.state.shards
    return {name: (shard.master - shards[name].master).abs().max() for name, shard in engine.state.shards.items()}


def in_a_child(base: str) -> None:
    from megatron.core.optimizer import Adam

    assert Adam.__module__ == "transformer_engine"
    with closing(World()) as world:
        torch.save(resume(Path(base), world.split), Path(base) / "differences")


@pytest.mark.nightly
def test_a_resume_is_exact_with_transformer_engine_and_apex_importable(tmp_path: Path) -> None:
    make_model("qwen3", tmp_path / "model")
    for package in ("transformer_engine", "apex"):
        folder = tmp_path / "packages" / package
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(PACKAGE)
    path = os.pathsep.join([str(tmp_path / "packages"), *sys.path])
    command = f"from {__name__} import in_a_child; in_a_child({str(tmp_path)!r})"
    child = subprocess.run(
        [sys.executable, "-c", command], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert child.returncode == 0, child.stderr
    differences = torch.load(tmp_path / "differences")
    assert differences
    assert max(differences.values()) == 0


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
