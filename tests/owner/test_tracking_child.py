"""The tracking process beside the ranks: it comes back, sends the last steps, and is given up where nothing helps."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from libra_hpc.config.load import validate
from libra_hpc.facts.rundir import RunDir
from libra_hpc.owner import tracking_child
from libra_hpc.owner.tracking_child import TrackingChild
from libra_hpc.tracking.sidecar import Sent


def tracked(folder: Path, wanted: bool = True) -> RunDir:
    run = RunDir.create(folder, "t")
    run.logs(1).mkdir(parents=True)
    run.write_json(run.config, validate({"track": {"tensorboard": wanted}}).as_data())
    run.metrics.write_text("".join(json.dumps({"step": step, "t": 1.0, "reward": 0.5}) + "\n" for step in (1, 2)))
    return run


def sent(run: RunDir, step: int) -> None:
    deadline = time.monotonic() + 60
    while Sent(run).last("tensorboard")[0] != step:
        assert time.monotonic() < deadline, (run.logs(1) / "track.log").read_text()
        time.sleep(0.05)


@pytest.mark.slow
def test_a_killed_process_comes_back_and_sends_the_last_steps(tmp_path: Path) -> None:
    run = tracked(tmp_path)
    child = TrackingChild(run, 1)
    child.keep(0.0)
    sent(run, 2)
    process = child._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    child.keep(1.0)
    assert child._process is None
    child.keep(tracking_child.RETRY_S)
    with run.metrics.open("a") as file:
        file.write(json.dumps({"step": 3, "t": 1.0, "reward": 0.5}) + "\n")
    sent(run, 3)
    child.close()
    assert not (run.logs(1) / "track.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("dead", [True, False], ids=["dead", "just_started"])
def test_the_last_steps_are_sent_though_the_process_cannot(tmp_path: Path, dead: bool) -> None:
    run = tracked(tmp_path)
    child = TrackingChild(run, 1)
    child.keep(0.0)
    if dead:
        assert child._process is not None
        child._process.kill()
        child._process.wait()
    child.keep(1.0)
    child.close()
    assert Sent(run).last("tensorboard")[0] == 2


def test_nothing_starts_unasked_and_a_missing_library_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unasked = TrackingChild(tracked(tmp_path / "a", wanted=False), 1)
    unasked.keep(0.0)
    assert unasked._process is None
    run = tracked(tmp_path / "b")
    (tmp_path / "tensorboardX.py").write_text("raise ImportError('not here')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    child = TrackingChild(run, 1)
    child.keep(0.0)
    assert child._process is not None
    assert child._process.wait(60) == tracking_child.MISTAKE
    for now in (50.0, 100.0, 150.0):
        child.keep(now)
    said = (run.logs(1) / "track.log").read_text()
    assert said.startswith("error: track.tensorboard: tensorboardX is not installed")
    assert said.count("\n") == 1
