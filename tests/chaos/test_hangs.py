"""Engines, trainers and environment hosts that stop without ending: noticed by their deadlines, ended, started
again, and named in the status."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from .harness import Chaos, sound

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

TRAIN_LEADER, ROLLOUT_LEADER, ROLLOUT = 1, 3, 4


@pytest.mark.parametrize(
    ("rank", "module", "part"),
    [
        (ROLLOUT, "libra_hpc.simulated.engine_process", "r4.0"),
        (TRAIN_LEADER, "t1.1.json", "t1"),
        (ROLLOUT_LEADER, "libra_hpc.simulated.host_process", "environment host 0"),
    ],
)
def test_a_part_that_hangs_is_ended_and_started_again(tmp_path: Path, rank: int, module: str, part: str) -> None:
    case = Chaos(tmp_path, steps=60)
    case.submit()
    case.reach(5)
    os.kill(case.child(rank, module), signal.SIGSTOP)
    case.wait(lambda: case.events("hung"), "the hung part")
    (hung,) = case.events("hung")
    assert part in hung["part"]
    assert "limit 4 s" in hung["reason"]
    case.wait(lambda: any("hung" in notice for notice in case.status()["notices"]), "the status that says so")
    sound(case)
    assert not case.events("recovered")
