"""The log of a trainer process has the reason of its end."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from libra_hpc.agent import supervised
from tests.agent.train_scene import Scene
from tests.stage.waiting import until

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("storage", ["quick", "slow"])
async def test_a_process_that_ends_by_itself_is_lost_for_the_reason_in_its_own_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    scene = Scene(tmp_path)
    log = scene.run.logs(1) / "t1.0.log"
    log.parent.mkdir(parents=True)
    log.write_text("ValueError: of an earlier start\n")
    if storage == "slow":
        monkeypatch.setattr(supervised, "CAUSE_S", 0.05)
        monkeypatch.setattr(supervised, "tail", lambda *_: time.sleep(0.5) or ["OSError: too late"])
    async with scene:
        await scene.ready()
        with log.open("a") as file:
            file.write("Traceback\nOSError: the model folder has changed\nleaving\n")
        began = time.monotonic()
        scene.node._trainer._exited(scene.node._trainer.children[0], 1)
        took_s = time.monotonic() - began
        await until(lambda: scene.states("lost"))
    why = ": OSError: the model folder has changed" if storage == "quick" else ""
    assert scene.states("lost")[0].reason == f"process t1.0 ended with 1{why}"
    assert took_s < 0.5, "the loop does not wait"
