"""The planner of a live run has the cost models that the run file allows."""

from __future__ import annotations

from typing import Any

import pytest

from libra_hpc.config.load import validate, with_values
from libra_hpc.config.run import RunConfig
from libra_hpc.planning.live import SpedUpSteps, live_planner
from libra_hpc.policies.control.stage_times import Split
from libra_hpc.preflight.checks import problems
from tests.policies.control.plant import Holds
from tests.policies.control.plant_costs import FakeSteps
from tests.policies.control.test_repartition_choice import measured, snapshot

from .conftest import run_file


def _config(**changes: Any) -> RunConfig:
    rollout, train = ({"tp": 4, **changes.pop(stage, {})} for stage in ("rollout", "train"))
    return validate(run_file(gpus=4, rollout=rollout, train=train, **changes))


def _models(**changes: Any) -> tuple[bool, bool]:
    planner = live_planner(_config(**changes), Holds())
    return planner.rollout_model is not None, planner.repartition is not None


def test_what_a_repartition_proposes_is_a_run_file() -> None:
    config = _config(
        planner={"hybrid_start": "train"},
        model={"path": "qwen3-4b"},
        rollout={"max_model_len": 32768},
        train={"recompute": True},
    )
    # As agents read it: every field counts as set.
    config = RunConfig.model_validate_json(config.model_dump_json())
    advice = live_planner(config, Holds()).repartition.advise(
        snapshot(), measured(600.0, 60.0, Split(2, 4)), since=float("-inf"), horizon=1e6, settings=config.planner
    )
    config = with_values(config, advice.changes)
    parts = config.components
    assert parts.train.nodes == advice.candidates[0].train
    assert parts.train.nodes + parts.hybrid.nodes + parts.rollout.nodes == 6
    assert config.planner.hybrid_start == "rollout"
    assert {"train.micro_tokens", "train.recompute"} <= advice.changes.keys(), "what the memory was counted with"
    assert not list(problems(config))


@pytest.mark.parametrize(
    ("changes", "models"),
    [
        ({}, (True, True)),
        ({"slurm": {"device": "cpu"}}, (False, False)),
        ({"rollout": {"tp": [1, 1, 4, 4], "engines_per_node": [4, 4, 1, 1]}}, (True, True)),
        ({"rollout": {"tp": [1, 1, 4, 4], "engines_per_node": [4, 4, 1, 1], "policy": "sticky"}}, (False, False)),
        ({"components": {"train": {"nodes": 2, "gpus": 4, "gpu_type": "h100"}, "hybrid": {"nodes": 0}}}, (True, False)),
        ({"components": {"rollout": {"nodes": 2, "gpus": 4, "gpu_type": "abacus"}}}, (False, False)),
        ({"planner": {"trace": "no/such/file"}}, (True, True)),
    ],
)
def test_known_hardware_gives_cost_models_and_without_it_the_planner_only_measures(
    changes: dict[str, Any], models: tuple[bool, bool]
) -> None:
    assert _models(**changes) == models


def test_a_dry_run_is_planned_with_what_it_simulates_on_its_own_clock() -> None:
    models = _models(
        run={"engine": "simulated"},
        slurm={"device": "cpu"},
        simulated={"device": "a800", "model": "qwen3-14b"},
        components={key: {"nodes": 2} for key in ("train", "hybrid", "rollout")},
        train={"tp": 8},
        rollout={"tp": 8},
    )
    assert models == (True, True)
    slow = FakeSteps(2, capacity=77, fixed=1.0)
    fast = SpedUpSteps(slow, 10.0)
    assert fast.step_s(4, 100, 8, 2) == slow.step_s(4, 100, 8, 2) / 10.0
    assert (fast.tp, fast.kv_capacity) == (2, 77)
