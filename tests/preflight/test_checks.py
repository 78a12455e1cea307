"""Cross-field checks as pure functions of configuration and model shape."""

from __future__ import annotations

import contextlib
import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from libra_hpc.config.load import validate, with_values
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import UserError
from libra_hpc.models.architecture import hf_shapes, read_shape
from libra_hpc.models.published import Shapes
from libra_hpc.preflight import checks
from libra_hpc.preflight.idle_keys import IDLE, REFUSED, idle_keys
from libra_hpc.preflight.job_checks import idle_seats, rounded_adapters

MODEL = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 128,
    "num_hidden_layers": 6,
    "max_position_embeddings": 8192,
}


def write_model(folder: Path, config: Mapping[str, Any] = MODEL, without: str = "") -> Path:
    """A model folder whose weights are a hole behind their header; it may lack one of its files."""
    folder.mkdir(exist_ok=True)
    for name, text in {"config.json": json.dumps(config), "tokenizer.json": "{}", "model.safetensors": ""}.items():
        if name != without:
            (folder / name).write_text(text)
    if without != "model.safetensors":
        # A model that is refused for its config.json needs none.
        with contextlib.suppress(UserError):
            write_weights(folder / "model.safetensors", hf_shapes(read_shape(folder)))
    return folder


def write_weights(path: Path, shapes: Shapes) -> None:
    """A safetensors file that takes no space."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + end)


def configured(**sections: Any) -> RunConfig:
    return validate(sections)


def on_gpus(train: int, hybrid: int, rollout: int, **values: Any) -> dict[str, Any]:
    """So many GPUs of each node, and ``rollout`` values."""
    gpus = {"components.train.gpus": train, "components.hybrid.gpus": hybrid, "components.rollout.gpus": rollout}
    return {"slurm.device": "cuda", **gpus, **{f"rollout.{key}": value for key, value in values.items()}}


def messages(values: dict[str, Any]) -> list[str]:
    """The sentences for a run file of these values by key."""
    return [str(error) for error in checks.problems(with_values(RunConfig(), values), MODEL)]


NODES = {"components.hybrid.nodes": 1, "components.rollout.nodes": 2}
SHARED = {"components.train.roll_out": True, "planner.time_sharing": "auto"}
PRODUCT = "rollout.tp * rollout.engines_per_node needs 8 GPUs and components.rollout has 4 per node"


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"rollout.policy": "cmlqf"}, "(did you mean 'cmlfq'?)"),
        ({"rollout.policy": "seer"}, "rollout.policy = 'seer': unknown policy"),
        ({"train.tp": 16}, "train.tp = 16: does not divide the model's num_attention_heads = 8; valid: 1, 2, 4, 8."),
        ({"rollout.tp": [1, 3]}, "rollout.tp = 3: does not divide"),
        (
            {"rollout.tp": [1, 2, 4], "components.hybrid.nodes": 1},
            "rollout.tp = [1, 2, 4]: a list has one entry for each of the 1 hybrid and 1 rollout nodes, in this order,"
            " and this one has 3;",
        ),
        ({"rollout.engines_per_node": []}, "rollout.engines_per_node = []: a list has one entry for each"),
        (on_gpus(1, 2, 4, tp=[1, 2, 8]) | NODES, f"rollout.tp = 8: {PRODUCT}"),
        (on_gpus(8, 8, 4, tp=2, engines_per_node=4), f"rollout.engines_per_node = 4: {PRODUCT}"),
        ({"components.env.nodes": 2, "components.env.gpus": 1}, "components.env.gpus = 1: environment nodes have no"),
        (
            {"components.env.nodes": 2, "components.one_node": True},
            "components.env.nodes = 2: components.one_node = true has all agents on one node, and its environments",
        ),
        (
            SHARED | {"planner.time_sharing": "off"},
            "components.train.roll_out = True: nodes serve both stages by time-",
        ),
        (
            SHARED | {"rollout.tp": [1]},
            "rollout.tp = [1]: a list has no entries for train nodes, and components.train.",
        ),
        (
            SHARED | on_gpus(8, 8, 8),
            "components.train.roll_out = True: engines need the memory of weights and optimizer meanwhile",
        ),
        (
            SHARED | on_gpus(4, 8, 8, tp=8) | {"run.engine": "simulated"},
            "rollout.tp = 8: rollout.tp * rollout.engines_per_node needs 8 GPUs and components.train has 4 per node",
        ),
    ],
)
def test_problems_name_field_value_and_limit(values: dict[str, Any], sentence: str) -> None:
    found = messages(values)
    assert found
    assert any(sentence in message for message in found), found
    assert all(message.endswith(".") for message in found)


AGENT = {"task.name": "agent"}
IN_USE: dict[str, tuple[Any, dict[str, Any]]] = {
    "components.env.gpus": (2, {"components.env.nodes": 0}),
    "algorithm.advantage": ("none", {"algorithm.kl_coef": 0.1}),
    "optimizer.decay_steps": (5, {"optimizer.decay": "linear"}),
    "optimizer.warmup_steps": (5, {"run.steps": 5}),
    "algorithm.minibatches": (9, {"algorithm.prompts_per_step": 9}),
    "algorithm.kl": ("k2", {"algorithm.kl_coef": 0.1}),
    "algorithm.kl_in": ("reward", {"algorithm.reference_kl_coef": 0.1}),
    "algorithm.reference": ("teacher", {"algorithm.reference_kl_coef": 0.1}),
    "algorithm.refill_batches": (2, {"algorithm.refill": True}),
    "rollout.max_num_seqs": (128, {"rollout.max_inflight": 128}),
    "planner.time_sharing": ("auto", {"components.hybrid.nodes": 1}),
    "planner.hybrid_start": ("train", {"components.hybrid.nodes": 1}),
    "planner.repartition": ("advise", {"planner.enabled": True}),
    "planner.fewer_after_s": (60.0, {"planner.fewer_nodes": "auto"}),
    "borrow.most_gpus": (4, {"borrow.lenders": "any"}),
    "borrow.least_gain_s": (4.0, {"borrow.lenders": ["a"]}),
    "borrow.spot.partition": ("spot", {"borrow.spot.nodes": 1}),
    "borrow.spot.qos": ("low", {"borrow.spot.nodes": 1}),
    "borrow.spot.time_limit": ("02:00:00", {"borrow.spot.nodes": 1}),
    "components.env.nodes": (2, AGENT),
    "components.env.seats": (4, {"components.env.nodes": 1}),
    "env.sandbox": ("none", AGENT),
    "env.box": (["box"], AGENT),
    "env.mounts": (["/shared"], {"task.name": "mine.py:Mine"}),
    "env.network": ("host", AGENT),
    "env.unenforced": ("accept", AGENT),
    "env.limits.memory": ("2G", AGENT),
    "env.limits.disk": ("1G", AGENT),
    "env.limits.processes": (5, AGENT),
    "env.limits.wall_s": (5.0, AGENT),
    "chat.thinking": ("template", AGENT),
    "chat.max_bad_calls": (1, {"task.name": "reasoning_gym:chain_sum"}),
    "track.wandb.entity": ("us", {"track.wandb.project": "libra"}),
    "track.wandb.mode": ("online", {"track.wandb.project": "libra"}),
}
"""Of each key that may be idle, a value, and what makes it count."""
BESIDE: dict[str, dict[str, Any]] = {
    "components.env.gpus": {"components.env.nodes": 1},
    "planner.repartition": {"planner.enabled": False},
    "rollout.max_num_seqs": {"rollout.max_inflight": 96},
    **{key: {"planner.fewer_nodes": "never"} for key in IN_USE if key.startswith(("borrow.spot.", "planner.fewer"))},
}
"""Values beside which it is idle, where these are no defaults."""


@pytest.mark.parametrize("key", REFUSED | IDLE)
def test_a_key_is_named_while_it_does_nothing(key: str) -> None:
    value, needed = IN_USE[key]
    base = {"task.name": "data", "run.steps": 4, **BESIDE.get(key, {}), key: value}
    found = [with_values(RunConfig(), values) for values in (base, base | needed)]
    idle, used = ([str(one) for rows in (REFUSED, IDLE) for one in idle_keys(config, rows)] for config in found)
    assert len([one for one in idle if one.startswith(f"{key} = {value!r}")]) == 1
    assert not [one for one in used if one.startswith(f"{key} = ")]


def test_more_seats_than_trajectories_are_a_warning() -> None:
    few = {"algorithm.prompts_per_step": 4, "algorithm.group_size": 4, "algorithm.eta": 1, "components.env.seats": 16}
    asked = lambda nodes: idle_seats(with_values(RunConfig(), few | {"components.env.nodes": nodes}))  # noqa: E731
    assert asked(0) == asked(1) == asked(2) == []
    assert asked(4) == [
        "components.env.nodes = 4: 4 nodes of 16 seats for at most 32 open trajectories of training; 2 would do"
    ]


@pytest.mark.parametrize(
    ("values", "share"),
    [
        (
            {"optimizer.lr": 1e-5},
            "15 % of the weights in bfloat16 within 20 steps; half from 4.3e-05 on, or all with m",
        ),
        ({"optimizer.lr": 1e-5, "lora.rank": 8, "lora.alpha": 16.0}, "15 % of the weights in bfloat16 within 20 steps"),
        ({"optimizer.lr": 1e-6}, "1.5 % of the weights"),
        ({"optimizer.lr": 5e-5}, ""),
        ({"optimizer.lr": 1e-5, "model.dtype": "float32"}, ""),
        ({"optimizer.lr": 1e-5, "lora.rank": 0}, ""),
    ],
)
def test_adapters_that_bfloat16_rounds_away_are_a_warning(values: dict[str, Any], share: str) -> None:
    found = [share in sentence for sentence in rounded_adapters(with_values(RunConfig(), {"lora.rank": 32} | values))]
    assert found == [True] * bool(share)


def test_nodes_of_different_degree_that_fit_are_no_problem() -> None:
    assert messages(on_gpus(1, 2, 4, tp=[2, 1, 2], engines_per_node=[1, 4, 2]) | NODES) == []
    assert messages(on_gpus(1, 2, 4, tp=[4, 1, 1], engines_per_node=1) | NODES) == [
        "rollout.tp = 4: rollout.tp * rollout.engines_per_node needs 4 GPUs and components.hybrid has 2 per node;"
        " valid: a product <= 2."
    ]


@pytest.mark.parametrize("values", [{}, {"train.tp": 4, "components.train.cpus": 1}])
def test_the_defaults_and_more_processes_than_cpus_are_no_problem(values: dict[str, Any]) -> None:
    assert messages(values) == []
