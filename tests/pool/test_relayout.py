"""When ranks may be laid out anew, and what is left for their next start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from libra_hpc.config.run import RunConfig
from libra_hpc.planner.snapshot import PlanDecision
from libra_hpc.pool.relayout import EVENT, EVERY_S, Relayout
from libra_hpc.telemetry.events import LineLog
from libra_hpc.telemetry.rundir import RunDir


def _run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.write_json(run.config, RunConfig().model_dump())
    run.logs(2).mkdir(parents=True)
    return run


def proposal(changes: dict[str, Any]) -> PlanDecision:
    return PlanDecision("repartition", -1, "better", {}, layout="better", changes=changes)


def test_nothing_is_touched_before_it_is_carried_out(tmp_path: Path) -> None:
    run = _run(tmp_path)
    relayout = Relayout(run, 2, 1.0)
    assert relayout.order(proposal({"train.tp": 2, "rollout.tp": [1, 2]})) == ""
    assert relayout.ordered
    assert RunConfig.model_validate_json(run.config.read_bytes()) == RunConfig()
    assert not run.again(2).exists()
    assert relayout.carry_out()["layout"] == "better"
    config = RunConfig.model_validate_json(run.config.read_bytes())
    assert (config.train.tp, config.rollout.tp) == (2, [1, 2])
    assert run.again(2).exists()


def test_a_layout_that_is_none_is_refused_in_words(tmp_path: Path) -> None:
    relayout = Relayout(_run(tmp_path), 2, 1.0)
    assert "components.rollout.nodes" in relayout.order(proposal({"components.rollout.nodes": 0}))
    assert "rollout.tp" in relayout.order(proposal({"rollout.tp": [1, 2, 4]}))
    assert not relayout.ordered


def test_at_most_one_in_an_hour_of_the_run_whoever_did_the_last(tmp_path: Path) -> None:
    run = _run(tmp_path)
    assert Relayout(run, 2, 1.0).not_before == float("-inf")
    LineLog(run.events).write({"t": 1000.0, "kind": EVENT})
    assert Relayout(run, 2, 1.0).not_before == 1000.0 + EVERY_S
    assert Relayout(run, 3, 10.0).not_before == 1000.0 + EVERY_S / 10.0, "a rehearsal's hour is shorter"
