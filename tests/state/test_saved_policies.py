"""Which exported policy of a run ``last`` and ``best`` name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from libra_hpc.errors import UserError
from libra_hpc.facts.rundir import RunDir
from libra_hpc.state.saved_policies import chosen_policy
from tests.facts import synthetic


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run of 60 steps with checkpoints of steps 20 and 60, and an exported policy."""
    run = synthetic.make_run(tmp_path)
    for folder in (run.checkpoint(20), run.checkpoint(60), run.path):
        (folder / "policy").mkdir(parents=True)
        (folder / "policy" / "config.json").write_text("{}")
        (folder / "state.json").write_text("{}")
    return run


@pytest.mark.parametrize(("which", "best", "chosen"), [("last", 20, 60), ("best", 20, 20), ("best", 60, 60)])
def test_it_is_the_last_or_that_of_the_best_reward(which: str, best: int, chosen: int, run: RunDir) -> None:
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    run.metrics.write_text("\n".join(json.dumps(line | {"reward": -abs(line["step"] - best)}) for line in lines))
    assert chosen_policy(run, "--step", which) == (chosen, run.checkpoint(chosen) / "policy")


@pytest.mark.parametrize(("mean", "chosen"), [(0.5, 20), (0.3, 60)])
def test_the_best_is_that_of_the_best_evaluation(mean: float, chosen: int, run: RunDir) -> None:
    write_means(run, {0: 0.1, 25: mean, 60: 0.4})
    assert chosen_policy(run, "--step", "best")[0] == chosen


def write_means(run: RunDir, means: dict[int, float]) -> None:
    """Evaluations of the task of ``checkpoint.best``, by step."""
    run.write_json(run.config, run.resolved() | {"checkpoint": {"best": "held"}})
    run.evaluations.write_text(
        "\n".join(json.dumps({"task": "held", "step": step, "mean": mean}) for step, mean in means.items())
    )


def test_the_policy_before_the_first_step_may_be_the_best(run: RunDir, tmp_path: Path) -> None:
    write_means(run, {0: 0.1})
    with pytest.raises(UserError, match="the best evaluation is of step 0"):
        chosen_policy(run, "--step", "best")
    (tmp_path / "config.json").write_text("{}")
    run.write_json(run.config, run.resolved() | {"model": {"path": str(tmp_path)}})
    for which in ("best", "0"):
        assert chosen_policy(run, "--step", which) == (0, tmp_path)
    run.evaluations.write_text('{"task": "held", "step": 10, "mean": 0.2}')
    with pytest.raises(UserError, match="the best evaluation is of step 10"):
        chosen_policy(run, "--step", "best")


def test_without_checkpoints_it_is_the_exported_policy(run: RunDir) -> None:
    shutil.rmtree(run.checkpoints)
    assert chosen_policy(run, "--step", "best") == (60, run.policy)
    shutil.rmtree(run.policy)
    with pytest.raises(UserError, match="has no checkpoint and no exported policy"):
        chosen_policy(run, "--step", "best")
