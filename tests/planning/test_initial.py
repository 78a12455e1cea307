"""The split of a run file with ``auto``: it is valid, and every contradiction is one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from libra_hpc_cli.plan import question

from libra_hpc.config.load import validate
from libra_hpc.config.node_groups import core_world, elastic_world
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import UserError
from libra_hpc.planning.initial import InitialPlan, initial_plan
from libra_hpc.preflight.checks import problems
from tests.models.support import device_file

from .conftest import run_file


def auto(nodes: tuple[int, int, int] = (2, 2, 2), **sections: Any) -> dict[str, Any]:
    """A run file whose split the planner fills in."""
    rollout = {"max_model_len": 32768, "max_num_seqs": 256, **sections.pop("rollout", {})}
    made = run_file(nodes, **{"algorithm": {"prompts_per_step": 64}, **sections}, rollout=rollout)
    return {**made, "components": {"split": "auto", **made["components"]}}


def planned(data: dict[str, Any]) -> InitialPlan:
    return initial_plan(validate(data))


def node_lists(config: RunConfig) -> tuple[list[int], list[int]]:
    count = config.components.hybrid.nodes + config.components.rollout.nodes
    tp, engines = config.rollout.tp, config.rollout.engines_per_node
    return tp if isinstance(tp, list) else [tp] * count, engines if isinstance(engines, list) else [engines] * count


@pytest.mark.parametrize(
    ("nodes", "eta", "model"),
    [
        *(((2, 2, 2), eta, "qwen3-14b") for eta in (0, 1)),
        ((1, 0, 5), 1, "qwen3-8b"),
        ((6, 1, 9), 0, "qwen3-32b"),
        ((6, 1, 9), 1, "llama-3.1-70b"),
        ((1, 30, 1), 1, "qwen3-30b-a3b"),
    ],
)
def test_the_filled_in_run_file_uses_every_gpu_and_is_valid(nodes: tuple[int, int, int], eta: int, model: str) -> None:
    made = planned(auto(nodes, algorithm={"prompts_per_step": 64, "eta": eta}, model={"path": model}))
    config, parts = made.config, made.config.components
    assert list(problems(config)) == []
    assert parts.split == "explicit"
    assert parts.train.nodes + parts.hybrid.nodes + parts.rollout.nodes == sum(nodes)
    assert parts.train.nodes == made.plan.nodes
    assert parts.hybrid.nodes <= nodes[1]
    core, layout = core_world(config), made.plan.train.layout
    assert (core.ranks, core.dp, str(core.degrees)) == (layout.devices, layout.dp, str(layout.degrees))
    worlds = [core, *([elastic_world(config)] if parts.hybrid.nodes else [])]
    assert all(world.ranks % world.degrees.replica == 0 and world.processes == 8 for world in worlds)
    degrees, engines = node_lists(config)
    assert all(tp * count == 8 for tp, count in zip(degrees, engines, strict=True))
    assert degrees == sorted(degrees), "hybrid nodes, which come first, have the smallest TP"
    classes = {s.tp: s.replicas for s in made.plan.engines}
    assert {tp: sum(n for t, n in zip(degrees, engines, strict=True) if t == tp) for tp in set(degrees)} == classes


def test_a_run_file_that_leaves_the_split_open_asks_what_plan_has_answered() -> None:
    data = auto()
    assert planned(data).asked == question(validate(data))
    shared = auto(planner={"time_sharing": "auto"})
    assert question(validate(shared)).in_turn


def test_nodes_of_another_kind_roll_out_and_what_does_not_train_is_hybrid() -> None:
    data = auto((8, 0, 2), algorithm={"prompts_per_step": 16})
    data["components"]["rollout"] = {"gpus": 4, "gpu_type": "h100", "nodes": 2}
    made = planned(data)
    parts = made.config.components
    assert parts.train.nodes + parts.hybrid.nodes == 8
    assert parts.rollout.nodes == 2
    degrees, engines = node_lists(made.config)
    sizes = [8] * parts.hybrid.nodes + [4] * parts.rollout.nodes
    assert [tp * count for tp, count in zip(degrees, engines, strict=True)] == sizes
    assert made.plan.pool == 0


def test_the_record_has_question_choice_and_prediction() -> None:
    made = planned(auto())
    written = json.loads(json.dumps(made.record, allow_nan=False))
    assert written["chosen"]["components.train.nodes"] == made.config.components.train.nodes
    assert written["best"][0] == written["plan"]
    assert written["predicted"]["batch_s"] == min(plan["seconds"] for plan in written["best"])
    assert written["inputs"]["pools"] == [{"device": "a800", "nodes": 6, "node_devices": 8}]
    assert written["train_factor"] == 1.0
    assert any("tables" in source for source in written["sources"])


TWO_NODES = run_file((1, 0, 1))["components"]
AUTO = "components.split = 'auto'"
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"slurm": {"device": "cpu"}}, f"{AUTO}: slurm.device is 'cpu' and the planner has no figures for CPU nodes"),
    ({"train": {"tp": 4}}, f"train.tp = 4: {AUTO} chooses it"),
    ({"rollout": {"tp": 1}}, f"rollout.tp = 1: {AUTO} chooses it"),
    ({"planner": {"hybrid_start": "train"}}, f"planner.hybrid_start = 'train': {AUTO} chooses it"),
    ({"planner": {"device": "a80"}}, "device = 'a80': unknown device"),
    ({"model": {"path": "mixtral-8x7b"}}, f"{AUTO}: this version cannot train mixtral-8x7b"),
    ({"model": {"path": "qwen3-15b"}}, "model = 'qwen3-15b': neither a known short name nor"),
    ({"model": {"path": "llama-3.1-70b"}, "components": TWO_NODES}, "No training layout fits"),
    ({"task": {"work": {"trace": "/nowhere.jsonl"}}}, "/nowhere.jsonl"),
    (
        {"components": {"hybrid": {"nodes": 1, "gpus": 4, "gpu_type": "a800"}}},
        "hybrid nodes are of the training nodes' kind; valid: 8.",
    ),
]


@pytest.mark.parametrize(("sections", "sentence"), MISTAKES)
def test_a_mistake_is_one_sentence(sections: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        planned(auto(**sections))
    assert sentence in str(caught.value)


def test_nodes_without_gpus_are_planned_as_a_device_of_the_users_file(tmp_path: Path) -> None:
    speeds = {"peak_flops": 4e12, "hbm_bytes_s": 200e9, "intra_bytes_s": 50e9}
    own = device_file(tmp_path / "own.toml", "cpunode", memory_bytes=256e9, devices_per_node=1, **speeds)
    planner = {"device": "cpunode", "devices": str(own)}
    data = auto(slurm={"device": "cpu"}, model={"path": "qwen3-4b"}, planner=planner)
    for name, count in zip(("train", "hybrid", "rollout"), (2, 1, 3), strict=True):
        data["components"][name] = {"nodes": count}
    made = planned(data)
    assert [(p.device.name, p.nodes, p.node_devices) for p in made.asked.pools] == [("cpunode", 6, 1)]
    assert made.config.components.train.gpus == 0
