"""Runs side by side: which keys differ, what is measured of each, and which runs are seeds of one setting."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from libra_hpc.config.load import with_values
from libra_hpc.config.run import RunConfig
from libra_hpc.facts.comparison import MetricCurve, compare
from libra_hpc.facts.rundir import RunDir
from libra_hpc.facts.summary import summarise
from libra_hpc.facts.sweep_record import SweepMember, write_member

from . import synthetic
from .synthetic import event


def make(parent: Path, values: dict[str, Any], rewards: Sequence[float] = ()) -> RunDir:
    """A run of two GPUs with one step every ten seconds."""
    run = RunDir.create(parent, "r")
    gpus = {"components.train.gpus": 1, "components.rollout.gpus": 1}
    run.write_json(run.config, with_values(RunConfig(), {"run.name": run.name, **gpus, **values}).as_data())
    synthetic.write(run.events, event(0.0, "job_started", attempt=1))
    same = {"tokens": 500, "step_s": 10.0, "staleness_mean": 1.0}
    rows = ({"t": 10.0 * step, "step": step, "reward": reward, **same} for step, reward in enumerate(rewards, start=1))
    synthetic.write(run.metrics, *rows)
    return run


def test_only_differing_keys_are_settings_and_seeds_are_grouped(tmp_path: Path) -> None:
    runs = [
        make(tmp_path, {"optimizer.lr": lr, "run.seed": seed, "run.steps": 5}, [0.1, 0.2, 0.3, 0.4, reward])
        for lr, seed, reward in ((1e-6, 0, 0.5), (1e-6, 1, 0.7), (3e-6, 0, 0.9))
    ]
    found, curves = compare(runs, "reward")
    assert found.keys == ["optimizer.lr", "run.seed"]
    assert [group.members for group in found.groups] == [[0, 1], [2]]
    assert found.groups[0].values == {"optimizer.lr": 1e-6}
    assert found.groups[0].last == [0.5, 0.6, 0.7]
    assert found.groups[0].step_s == 10.0
    first = found.runs[0]
    assert (first.steps, first.steps_wanted, first.last, first.highest) == (5, 5, 0.5, 0.5)
    assert (first.tokens_per_s, first.numbers["staleness_mean"], first.wall_s) == (50.0, 1.0, 50.0)
    assert first.gpu_hours == pytest.approx(2 * 50.0 / 3600.0)
    assert curves[0].wall_s == [10.0, 20.0, 30.0, 40.0, 50.0]


def test_values_that_may_be_secrets_are_told_apart_and_hidden(tmp_path: Path) -> None:
    runs = [
        make(tmp_path, {"compute.env": {"A": value}, "task.options": {"size": size, "api_key": key}, "run.seed": seed})
        for value, size, key, seed in (("one", 1, "k", 0), ("two", 2, "l", 0), ("two", 2, "l", 1))
    ]
    found, _ = compare(runs, "reward")
    hidden = "(hidden) 2"
    assert found.runs[1].values == {
        "compute.env.A": hidden,
        "run.seed": 0,
        "task.options.api_key": hidden,
        "task.options.size": 2,
    }
    assert [group.members for group in found.groups] == [[0], [1, 2]]


def test_a_layout_that_the_planner_changed_does_not_part_two_seeds(tmp_path: Path) -> None:
    runs = [
        make(tmp_path, {"run.seed": seed, "components.rollout.nodes": nodes}, [0.5]) for seed, nodes in ((0, 1), (1, 3))
    ]
    changes = {"components.rollout.nodes": 3}
    synthetic.write(runs[1].events, event(5.0, "repartitioned", step=1, changes=changes))
    assert [group.members for group in compare(runs, "reward")[0].groups] == [[0, 1]]
    for run, nodes in zip(runs, (1, 2), strict=True):
        write_member(run, SweepMember("s", {"components.rollout.nodes": nodes}))
    found, _ = compare(runs, "reward")
    assert [group.members for group in found.groups] == [[0], [1]], "the sweep set the key"
    assert [run.values["components.rollout.nodes"] for run in found.runs] == [1, 2]


def test_a_run_without_steps_has_no_results_and_no_curve(tmp_path: Path) -> None:
    found, curves = compare([make(tmp_path, {}, [0.5]), make(tmp_path, {"run.seed": 1})], "reward")
    empty = found.runs[1]
    assert (empty.steps, empty.last, empty.highest, empty.step_s, empty.tokens_per_s) == (0, None, None, None, None)
    assert curves[1] == MetricCurve([], [], [])


def test_lost_engines_and_failed_attempts_are_counted(tmp_path: Path) -> None:
    run = synthetic.make_run(tmp_path)
    found, _ = compare([run, make(tmp_path, {})], "reward")
    assert found.runs[0].numbers["engines_lost"] == 1
    assert found.runs[0].failed_attempts == sum(failed.count for failed in summarise(run).failures) > 0
