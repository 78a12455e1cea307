"""Runs in which nothing progresses, and no part sees why: nodes with old weights are dropped, then all ranks restart,
and at last the run fails with the sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

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


def test_a_run_that_new_weights_never_reach_restarts_and_then_fails_with_that_sentence(tmp_path: Path) -> None:
    flag = tmp_path / "withheld"
    case = Chaos(tmp_path, steps=4000)
    options = patched(tmp_path, WITHHELD.format(flag=str(flag)), HYBRID, ROLLOUT_LEADER, ROLLOUT)
    case.submit(*options, "-o", "slurm.restarts=2")
    case.reach(5)
    flag.touch()
    case.wait(lambda: case.events("recovered"), "the restart")
    assert not case.events("hung")
    assert sorted(event["rank"] for event in case.events("node_lost")) == [HYBRID, ROLLOUT]
    assert case.events("recovered")[0]["reason"].startswith("nothing progressed for ")
    flag.unlink()
    step = case.events("recovered")[0]["step"]
    case.wait(lambda: case.steps()[-1] > step + 2, "steps after it")
    flag.touch()
    sound(case, "failed")
    assert case.message().startswith("nothing progressed for "), case.message()
    assert "all 2 restarts of slurm.restarts are used" in case.message()
