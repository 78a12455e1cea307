"""Runs in which nothing progresses, and no part sees why: nodes with old weights are dropped, then all ranks restart,
and at last the run fails with the sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from libra_hpc.facts.rundir import read_lines

from .harness import Chaos, patched, sound
from .test_agents import HYBRID, ROLLOUT, ROLLOUT_LEADER

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

WITHHELD = """
import pathlib
from libra_hpc.agent.node_carrier import NodeCarrier
withheld, publish = pathlib.Path({flag!r}), NodeCarrier.publish
NodeCarrier.publish = lambda *message: None if withheld.exists() else publish(*message)
"""
"""While a file exists, neither new weights nor word of them reaches an agent."""


def kinds(case: Chaos) -> list[str]:
    assert case.run is not None
    wanted = ("node_lost", "recovered", "hung")
    return [str(event["kind"]) for event in read_lines(case.run.events) if event["kind"] in wanted]


def test_a_node_that_new_weights_never_reach_is_dropped_and_the_others_go_on(tmp_path: Path) -> None:
    flag = tmp_path / "withheld"
    case = Chaos(tmp_path, steps=400)
    run = case.submit(*patched(tmp_path, WITHHELD.format(flag=str(flag)), ROLLOUT))
    case.reach(5)
    flag.touch()
    case.wait(lambda: case.events("node_lost"), "the dropped node")
    step = case.steps()[-1]
    case.wait(lambda: case.steps()[-1] > step + 2, "steps without it")
    flag.unlink()
    case.wait(
        lambda: [event["state"] for event in case.events("node_state") if event["rank"] == ROLLOUT][-1] == "rollout",
        "its return",
    )
    case.cli("cancel", str(run.path))
    sound(case, "cancelled")
    assert kinds(case) == ["node_lost"]
    (lost,) = case.events("node_lost")
    assert lost["rank"] == ROLLOUT
    assert lost["reason"].startswith("nothing progressed for ")
    assert "; its weights are of step " in lost["reason"]


def test_a_run_that_new_weights_never_reach_restarts_and_then_fails_with_that_sentence(tmp_path: Path) -> None:
    flag = tmp_path / "withheld"
    case = Chaos(tmp_path, steps=4000)
    options = patched(tmp_path, WITHHELD.format(flag=str(flag)), HYBRID, ROLLOUT_LEADER, ROLLOUT)
    case.submit(*options, "-o", "slurm.restarts=2")
    case.reach(5)
    flag.touch()
    case.wait(lambda: case.events("recovered"), "the restart")
    assert kinds(case) == ["node_lost", "node_lost", "recovered"]
    assert {event["rank"] for event in case.events("node_lost")} == {HYBRID, ROLLOUT}
    assert case.events("recovered")[0]["reason"].startswith("nothing progressed for ")
    flag.unlink()
    step = case.events("recovered")[0]["step"]
    case.wait(lambda: case.steps()[-1] > step + 2, "steps after it")
    flag.touch()
    sound(case, "failed")
    assert case.message().startswith("nothing progressed for "), case.message()
    assert "all 2 restarts of slurm.restarts are used" in case.message()
