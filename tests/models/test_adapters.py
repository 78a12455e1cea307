"""Adapters as the planner counts them: those of the trainer, targets that a model has, memory of one GPU."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.tabulate import hf_config
from libra_hpc.config.load import validate
from libra_hpc.config.node_groups import Degrees
from libra_hpc.errors import UserError
from libra_hpc.models.adapters import adapter_params, adapter_shapes, with_adapters
from libra_hpc.models.architecture import read_shape
from libra_hpc.models.devices import device
from libra_hpc.models.host_memory import NodeWork, node_memory
from libra_hpc.models.memory import TrainLayout, memory_limit, train_memory
from libra_hpc.models.shapes import model_shape
from libra_hpc.preflight.checks import adapters_have_a_rank
from libra_hpc.weights.names import ReplicaPlace, cut, trained_entries

from .support import config_of

ALONE = TrainLayout(tp=1, pp=1, cp=1, ep=1, dp=1, micro_tokens=8192)


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-30b-a3b"])
@pytest.mark.parametrize(
    "degrees", [Degrees(1), Degrees(2, 2), Degrees(2, 2, ep=2, etp=1), Degrees(2, ep=2, etp=2)], ids=str
)
def test_adapters_of_a_device_are_those_of_its_trainer(tmp_path: Path, name: str, degrees: Degrees) -> None:
    shape = with_adapters(model_shape(name), 16, 32.0, [])
    trained = with_adapters(read_shape(config_of(tmp_path, hf_config(shape))), 16, 32.0, [])
    sizes = adapter_shapes(trained)
    for stage in range(degrees.pp):
        place = ReplicaPlace(degrees.tp, 0, degrees.pp, stage, dp=degrees.ep, ep=degrees.ep, etp=degrees.etp)
        found = [0.0, 0.0]
        for entry in trained_entries(trained, place).values():
            whole = sum(math.prod(sizes[one]) for one in entry.hf)
            found[entry.expert is not None] += whole / cut(entry, place)[0]
        assert adapter_params(shape, degrees, stage) == pytest.approx(tuple(found))


def test_8b_fits_one_gpu_beside_its_engine() -> None:
    gpu, whole = device("h100"), model_shape("qwen3-8b")
    shape = with_adapters(whole, 32, 64.0, [])
    layout = msgspec.structs.replace(ALONE, recompute="full")
    need = train_memory(shape, layout, gpu, micro_batches=1, pack_tokens=8192)
    assert memory_limit(train_memory(whole, layout, gpu, micro_batches=1, pack_tokens=8192), gpu) is not None
    assert need.gradients + need.optimizer < 0.12 * need.weights
    # An engine's weights, and as much for its caches.
    assert need.total + 2 * whole.weight_bytes < gpu.memory_bytes
    host = NodeWork(trains=True, core_nodes=1, snapshots=True)
    assert node_memory(shape, host).total < 0.4 * node_memory(whole, host).total


@pytest.mark.parametrize(
    ("model", "section", "sentence"),
    [
        ("qwen3-8b", {"rank": -1}, "lora.rank = -1: out of range; valid: an integer >= 0 and <= 4096."),
        ("qwen3-8b", {"alpha": 8.0}, "lora.rank = 0: adapters need a rank; valid: an integer >= 1, or no [lora]."),
        ("qwen3-8b", {"rank": 4, "targets": ["atention"]}, "(did you mean 'attention'?)."),
        (
            "qwen3-8b",
            {"rank": 4, "targets": ["experts"]},
            "qwen3-8b has no such layers that adapters fit; valid: attention, mlp.",
        ),
        ("qwen3-30b-a3b", {"rank": 4, "targets": ["mlp"]}, "valid: attention, experts."),
    ],
)
def test_what_cannot_be_adapted_is_refused(model: str, section: dict[str, Any], sentence: str) -> None:
    def check() -> None:
        config = validate({"lora": section})
        for error in adapters_have_a_rank(config):
            raise error
        with_adapters(model_shape(model), *config.lora.arguments)

    with pytest.raises(UserError) as caught:
        check()
    assert str(caught.value).endswith(sentence)
