"""The player of a live run searches other layouts where the run file allows, on what the run has measured."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from libra_hpc.config.load import validate, with_values
from libra_hpc.config.run import RunConfig
from libra_hpc.models.step_times.lookup import lookup
from libra_hpc.planning.live import OtherLayouts, live_player
from libra_hpc.policies.control.plays import PlayWork
from libra_hpc.preflight.checks import problems
from libra_hpc.protocol.engine_state import StepCosts
from libra_hpc.protocol.trace import TrajectoryRecord, TurnRecord

from .conftest import run_file


def _config(**changes: Any) -> RunConfig:
    rollout, train = ({"tp": 4, **changes.pop(stage, {})} for stage in ("rollout", "train"))
    return validate(run_file(gpus=4, rollout=rollout, train=train, **changes))


def work(generated: int, costs: StepCosts) -> PlayWork:
    """Four batches of 8 groups of 4, each of one turn."""
    turn = (TurnRecord(0, generated),)
    records = [TrajectoryRecord(str(group), sample, 500, turn) for group in range(32) for sample in range(4)]
    return PlayWork(records, 8, 1, (costs,), lambda tokens, nodes: 1.0, 0.0)


SLOW, FAST = StepCosts(4, 400_000, 0.02, 1e-8, 1e-5), StepCosts(4, 400_000, 0.002, 1e-9, 1e-6)


@pytest.fixture
def config() -> RunConfig:
    made = _config(
        planner={"hybrid_start": "train"},
        model={"path": "qwen3-4b"},
        algorithm={"prompts_per_step": 8, "group_size": 4},
        rollout={"max_model_len": 32768},
        train={"recompute": True},
    )
    # As agents read it: every field counts as set.
    return validate(made.as_data())


def test_what_a_repartition_proposes_is_a_run_file(config: RunConfig) -> None:
    found = OtherLayouts(config, lookup, {4})(work(2000, FAST), 2, 600.0)[0]
    changed = with_values(config, found.changes)
    parts = changed.components
    assert (parts.train.nodes, parts.train.nodes + parts.hybrid.nodes + parts.rollout.nodes) == (found.train, 6)
    assert changed.planner.hybrid_start == "rollout"
    assert {"train.micro_tokens", "train.recompute"} <= found.changes.keys(), "what the memory was counted with"
    assert not list(problems(changed))
    assert f"{found.train} nodes of 4 train with TP" in found.words


def test_slow_training_gets_nodes_and_so_do_slow_engines(config: RunConfig) -> None:
    layouts = OtherLayouts(config, lookup, {4})
    trains = layouts(work(2000, FAST), 2, 600.0)[0]
    rolls = layouts(work(2000, SLOW), 2, 0.1)[0]
    assert trains.train > rolls.train
    assert trains.seconds.train < 600.0, "in proportion to what was measured"
    assert rolls.seconds.rollout > rolls.seconds.train


def test_what_is_expected_beyond_the_longest_context_ends_there(config: RunConfig) -> None:
    layouts = OtherLayouts(config, lookup, {4})
    assert layouts(work(50_000, FAST), 2, 600.0) == layouts(work(32_768 - 500, FAST), 2, 600.0)


def test_engines_of_another_degree_have_the_capacity_of_the_table_as_measured(config: RunConfig) -> None:
    layouts = OtherLayouts(config, lookup, {4})
    shape, gpu = layouts._asked.shape, layouts._pool.device
    half = replace(FAST, kv_tokens=lookup(gpu, shape, 4).kv_capacity // 2)
    made = layouts._steps(gpu, shape, 2, work(2000, half))
    assert made.kv_capacity == pytest.approx(lookup(gpu, shape, 2).kv_capacity / 2, rel=0.01)
    assert made.step_s(8, 10_000) > layouts._steps(gpu, shape, 4, work(2000, half)).step_s(8, 10_000)


@pytest.mark.parametrize(
    ("changes", "searches"),
    [
        ({}, True),
        ({"slurm": {"device": "cpu"}}, False),
        ({"rollout": {"tp": [1, 1, 4, 4], "engines_per_node": [4, 4, 1, 1]}}, True),
        ({"rollout": {"tp": [1, 1, 4, 4], "engines_per_node": [4, 4, 1, 1], "policy": "sticky"}}, False),
        ({"components": {"train": {"nodes": 2, "gpus": 4, "gpu_type": "h100"}, "hybrid": {"nodes": 0}}}, False),
        ({"components": {"rollout": {"nodes": 2, "gpus": 4, "gpu_type": "abacus"}}}, False),
        ({"task": {"work": {"trace": "no/such/file"}}}, True),
        (
            {
                "run": {"engine": "simulated"},
                "slurm": {"device": "cpu"},
                "planner": {"device": "a800", "model": "qwen3-14b"},
                "components": {key: {"nodes": 2} for key in ("train", "hybrid", "rollout")},
                "train": {"tp": 8},
                "rollout": {"tp": 8},
            },
            True,
        ),
    ],
)
def test_known_hardware_of_one_kind_is_searched(changes: dict[str, Any], searches: bool) -> None:
    assert (live_player(_config(**changes))._layouts is not None) is searches
