"""Evaluations in the summary of a run."""

from __future__ import annotations

import json
from pathlib import Path

from libra_hpc.facts import series
from libra_hpc.facts.rundir import RunDir
from libra_hpc.facts.summary import evaluation_results


def test_the_newest_of_each_task_beside_its_first(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "t")
    assert evaluation_results(run) == []
    known = {"task": "aime", "samples": 4, "failed": 0, "stderr": 0.02, "best_of": 0.75}
    lines = [
        {**known, "step": 0, "mean": 0.1},
        {**known, "step": 20, "mean": 0.375, "failed": 2},
        {**known, "task": "math", "step": 0, "mean": 0.5, "pass_at": {"1": 0.5, "2": 0.625, "4": 0.75}},
        {**known, "task": "part", "step": 0, "mean": 1.5, "solved": "ok >= 1", "pass_at": {"1": 0.5, "4": 0.75}},
        {**known, "task": "none", "step": 0, "mean": 1.5, "solved": "reward >= 1", "pass_at": {}},
        {"task": "code", "step": 0, "samples": 1, "failed": 8},
    ]
    run.evaluations.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [result.words() for result in evaluation_results(run)] == [
        "aime 0.100 -> 0.375 +- 0.020 at step 20, best of 4 0.750, 2 failed",
        "math 0.500 +- 0.020 at step 0, pass@2 0.625, pass@4 0.750",
        "part 1.500 +- 0.020 at step 0, pass@1 0.500, pass@4 0.750 (ok >= 1)",
        "none 1.500 +- 0.020 at step 0, best of 4 0.750, no pass@k of reward >= 1",
        "code at step 0: all trajectories failed",
    ]


def test_a_mean_stands_in_the_step_of_its_weights(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "t")
    run.metrics.write_text('{"step": 1, "reward": 0.5}\n{"step": 2, "reward": 0.5}\n')
    run.evaluations.write_text('{"task": "aime", "step": 0, "mean": 0.1}\n{"task": "aime", "step": 2, "mean": 0.3}\n')
    assert series.steps(run) == [{"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.5, "eval/aime": 0.3}]
