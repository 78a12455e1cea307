"""Carriers of new weights that are killed while a run goes on."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from pathlib import Path

import pytest

from libra_hpc.facts.rundir import read_lines

from .harness import Chaos, sound

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

STEPS, OPTIONS = 100, ("-o", "algorithm.eta=0")
"""Each step then waits for the weights of the one before, and has the prompts that follow in order."""
CARRIERS = (TRAIN_LEADER, HYBRID, ROLLOUT_LEADER, ROLLOUT) = range(1, 5)


def rewards(case: Chaos) -> list[float]:
    assert case.run is not None
    return [row["reward"] for row in read_lines(case.run.metrics)]


def test_a_carrier_killed_in_every_fifth_of_a_hundred_steps_changes_no_reward_and_no_weight(tmp_path: Path) -> None:
    """An engine refuses an image with other weights than those of its version, and then no step follows."""
    (tmp_path / "without").mkdir()
    undisturbed = Chaos(tmp_path / "without", steps=STEPS)
    undisturbed.submit(*OPTIONS)
    assert undisturbed.ended() == "completed"
    (tmp_path / "with").mkdir()
    case = Chaos(tmp_path / "with", steps=STEPS)
    case.submit(*OPTIONS, "-o", "slurm.restarts=1000")
    draw = random.Random(0)
    for step in range(5, STEPS, 5):
        case.wait(lambda step=step: case.steps()[-1:] >= [step], f"step {step}")
        with contextlib.suppress(OSError, AssertionError):  # it has ended, or its agent is not there yet
            os.kill(case.child(draw.choice(CARRIERS), "libra_hpc.weights.carrier"), signal.SIGKILL)
    sound(case)
    assert len([event for event in case.events("engine_lost") if event["engine"].startswith("c")]) > 10
    assert "are not those of version" not in case.logs()
    assert rewards(case) == pytest.approx(rewards(undisturbed))
