"""What another layout of a running job may be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from libra_hpc.config.load import validate, with_values
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import UserError
from libra_hpc.preflight.rank_roles import KEYS, SameLayout, describe, ranks, repartitioned

from .test_checks import write_model

A800 = {"partition": "a800", "gpus": 8, "gpu_type": "a800", "mem": "4G"}


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """One of four A800 nodes trains, one is hybrid, and two roll out."""
    write_model(tmp_path)
    parts = {"train": {**A800, "nodes": 1}, "hybrid": {**A800, "nodes": 1}, "rollout": {**A800, "nodes": 2}}
    return validate({"components": parts, "model": {"path": str(tmp_path)}, "slurm": {"device": "cuda"}})


def test_every_rank_gets_its_place_replica_and_engines(config: RunConfig) -> None:
    nodes = {"components.train.nodes": 2, "components.rollout.nodes": 1}
    changed = repartitioned(config, {**nodes, "train.tp": 4, "train.pp": 2, "rollout.tp": [2, 4]})
    roles = ["train TP4 PP2", "train TP4 PP2", "hybrid TP4 PP2 or 1xTP2", "rollout 1xTP4"]
    assert [str(rank) for rank in ranks(changed)] == roles
    assert describe(changed) == "2 nodes train with TP4 PP2, 1 hybrid, 1 rolls out with 1xTP2, 1xTP4"
    before = with_values(changed, {key: _value(config, key) for key in KEYS})
    assert before.as_data() == config.as_data(), "nothing else has changed"


def _value(config: RunConfig, key: str) -> Any:
    found: Any = config
    for name in key.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"algorithm.eta": 2}, "KEY = 'algorithm.eta': not part of a layout; valid: components.train.nodes, "),
        ({"train.ttp": 2}, "KEY = 'train.ttp': not part of a layout"),
        ({"train.ttp": 2}, "(did you mean 'train.tp'?)."),
        ({"train.tp": "2"}, "train.tp = '2': wrong type; valid: an integer >= 1."),
        ({"train.tp": True}, "train.tp = True: wrong type"),
        ({"components.train.nodes": 2}, "components.*.nodes = '2 + 1 + 2': "),
        ({"components.train.nodes": 0, "components.rollout.nodes": 3}, "train.nodes = 0: each stage keeps a core node"),
        ({"train.tp": 3}, "train.tp = 3: does not divide the model's num_attention_heads = 8"),
        ({"train.pp": 7}, "train.pp = 7: the model has only 6 layers"),
        ({"train.tp": 8, "train.pp": 2}, "1 node x 8 training processes are 8, no whole number of replicas of 16"),
        ({"rollout.tp": [1, 2]}, "a list has one entry for each of the 1 hybrid and 2 rollout nodes"),
        ({"planner.hybrid_start": "trian"}, "'trian': unknown value; valid: rollout, train (did you mean 'train'?)."),
    ],
)
def test_what_is_none_is_refused_in_words(config: RunConfig, values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        repartitioned(config, values)
    assert sentence in str(refused.value)


@pytest.mark.parametrize("values", [{}, {"train.tp": 1}, {"rollout.tp": [1, 1, 1]}])
def test_the_layout_that_runs_is_no_other_one(config: RunConfig, values: dict[str, Any]) -> None:
    with pytest.raises(SameLayout, match="the run has this layout already"):
        repartitioned(config, values)


def test_without_hybrid_nodes_their_start_is_nobodys(config: RunConfig) -> None:
    config = with_values(config, {"components.hybrid.nodes": 0})
    with pytest.raises(SameLayout):
        repartitioned(config, {"planner.hybrid_start": "train"})


def test_a_rank_that_changes_component_finds_there_what_it_has(config: RunConfig) -> None:
    config = with_values(config, {"components.rollout.mem": "8G"})
    changed = repartitioned(config, {"components.train.nodes": 2, "components.hybrid.nodes": 0})
    assert changed.components.train.nodes == 2, "both are alike"
    sentence = r"hybrid\.nodes = 1: rank 3 would go from rollout to hybrid, but mem is '8G' there and '4G' here"
    with pytest.raises(UserError, match=sentence):
        repartitioned(config, {"components.train.nodes": 2, "components.rollout.nodes": 1})


def test_a_component_without_nodes_becomes_what_it_is_given(config: RunConfig) -> None:
    config = with_values(config, {"components.hybrid": {"nodes": 0}})
    changed = repartitioned(config, {"components.hybrid.nodes": 1, "components.rollout.nodes": 1})
    hybrid = msgspec.to_builtins(changed.components.hybrid)
    del hybrid["nodes_per_replica"]
    assert hybrid == msgspec.to_builtins(changed.components.rollout)
    back = repartitioned(changed, {"components.hybrid.nodes": 0, "components.rollout.nodes": 2})
    assert back.components.rollout == config.components.rollout
