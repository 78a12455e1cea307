"""Work of the benchmarks on real engines, and what they make of a run's records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import live_kv
from bench.live_policies import BATCH, ENGINES, Line, by_phase, figures, moved, overrides, step_ms
from bench.live_task import HeldKeyChain
from libra_hpc.config.load import apply_override, validate
from libra_hpc.errors import OperationError
from libra_hpc.models.step_times.measured import StepPoint
from libra_hpc.preflight.named_files import check_task
from libra_hpc.protocol.trace import TrajectoryRecord, TurnRecord


def line(index: int, started: float, ended: float, engines: str, *, after: bool = False, reward: float = 1.0) -> Line:
    """A trajectory with a prompt of 10 tokens and one turn at each of ``engines``: 3 tokens generated, before all
    but the first 5 new ones."""
    turns = [
        {"engine": engine, "gen_tokens": 3, "new_tokens": 5 if number else 0} for number, engine in enumerate(engines)
    ]
    facts = {
        "index": index,
        "prompt_tokens": 10,
        "turns": turns,
        "reward": reward,
        "info": {"after_drift": float(after)},
    }
    return facts | {"started_at": started, "finished_at": ended}


def test_a_move_leaves_the_whole_context_behind() -> None:
    assert moved(line(0, 0.0, 1.0, "a")) == moved(line(0, 0.0, 1.0, "aaa")) == []
    assert moved(line(0, 0.0, 1.0, "aba")) == [13, 21]
    assert moved(line(0, 0.0, 1.0, "aab")) == [21]


def test_figures_of_two_batches() -> None:
    lines = [
        line(0, 100.0, 101.0, "ab"),
        line(1, 100.5, 104.0, "aa", reward=0.0),
        line(2, 200.0, 202.0, "b"),
        line(3, 200.0, 201.0, "b"),
    ]
    found = figures(lines, prompts=2, engines={"a": 1, "b": 2})
    assert (found[BATCH], found["completion p50, s"], found["completion p99, s"]) == (3.0, 2.0, 3.5)
    assert found["tokens/s"] == pytest.approx(6 * 3 / 6.0)
    assert [found[f"{what} per batch"] for what in ("moves", "re-prefilled", "turns")] == [0.5, 6.5, 3.0]
    assert [found[f"share of turns at TP={tp}"] for tp in (1, 2)] == [0.5, 0.5]
    assert found["reward"] == 0.75


def test_nothing_to_say_is_an_error() -> None:
    with pytest.raises(OperationError, match="phase x: no trajectory"):
        figures([], prompts=2, engines=ENGINES, name="phase x")


def test_phases_go_without_their_first_batches() -> None:
    lines = [line(index, 0.0, 1.0, "a", after=index >= 4) for index in range(8)]
    found = by_phase(reversed(lines), prompts=2, warm_up=1)
    assert {name: sorted(one["index"] for one in lines) for name, lines in found.items()} == {
        "long chains": [2, 3],
        "long prompts": [6, 7],
    }


def test_steps_with_prefill_do_not_count() -> None:
    points = [
        StepPoint(tp=1, decodes=1, kv_tokens=8, prefill=prefill, seconds=seconds)
        for prefill, seconds in ((0, 0.002), (0, 0.004), (9, 1.0))
    ]
    assert step_ms(points) == pytest.approx(3.0)


def test_the_run_is_the_quickstart_with_two_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.live_policies.policy", lambda seed: tmp_path / "policy")
    data: dict[str, Any] = {"task": {"options": {"drift_at": 0.4}}}
    for key, value in overrides("least_loaded", 3, 25, tmp_path).items():
        apply_override(data, f"{key}={value}")
    config = validate(data)
    assert (config.rollout.tp, config.rollout.policy) == ([1, 2], "least_loaded")
    assert (config.run.seed, config.run.steps) == (3, 25)
    assert config.components.rollout.nodes == len(ENGINES)
    assert config.task.options == {"drift_at": 0.4, "runs": str(tmp_path), "engines": list(ENGINES)}
    check_task(config.task.name)
    assert config.task.name.endswith(f":{HeldKeyChain.__name__}")


def test_equal_seeds_give_equal_work_that_every_engine_can_hold() -> None:
    work = live_kv.make_work(3)
    assert work == live_kv.make_work(3) != live_kv.make_work(4)
    assert len(work) == live_kv.GROUPS * live_kv.GROUP_SIZE
    assert max(record.context for record in work) < 4096
    turns = (TurnRecord(0, 10), TurnRecord(5, 10))
    siblings = [TrajectoryRecord("p", sample, 100, turns) for sample in (0, 1)]
    assert live_kv.held(siblings) == 150, "siblings share the prompt"
