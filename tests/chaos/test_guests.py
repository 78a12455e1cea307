"""An agent that joins a running job with engines, leaves, and is killed; the run goes on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from libra_hpc.protocol.joining import FIRST_GUEST
from libra_hpc.slurm.queue.command import call

from .harness import SIMULATED, Chaos, sound

pytestmark = [pytest.mark.timeout(300)]


@contextmanager
def guest(case: Chaos, number: int, *words: object) -> Iterator[subprocess.Popen[str]]:
    """The ``number``-th guest, which serves."""
    assert case.run is not None
    command = [str(Path(sys.executable).with_name("libra-hpc")), "join", *map(str, words or [case.run.path])]
    with (case.folder / f"guest-{number}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        case.wait(lambda: len(case.events("guest_serves")) >= number, "a guest that serves")
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_guest_gives_tokens_that_are_trained_and_its_leave_and_its_death_cost_the_run_nothing(tmp_path: Path) -> None:
    case = Chaos(tmp_path, steps=4000, hybrid=0, rollout=1)
    run = case.submit()
    case.reach(2)
    with guest(case, 1) as process:
        case.wait(lambda: case.guest_tokens() > 0, "trained tokens of the guest")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, (tmp_path / "guest-1.log").read_text()
        assert "it got SIGTERM" in process.communicate()[0]
    # In another cluster: it has a copy of the door's record, and nothing else of the run.
    away = tmp_path / "away"
    away.mkdir()
    shutil.copy(run.door, away)
    with guest(case, 2, away) as process:
        before = case.guest_tokens()
        case.wait(lambda: case.guest_tokens() > before, "trained tokens of the next guest")
        os.kill(process.pid, signal.SIGKILL)
        case.wait(lambda: case.events("guest_lost"), "the lost guest")
    before = len(case.steps())
    case.wait(lambda: len(case.steps()) > before + 2, "steps without it")
    case.cli("cancel", str(run.path))
    sound(case, "cancelled")
    assert [event["rank"] for event in case.events("guest_joined")] == [FIRST_GUEST, FIRST_GUEST + 1]
    assert [event["rank"] for event in case.events("guest_left")] == [FIRST_GUEST]
    assert [event["rank"] for event in case.events("guest_lost")] == [FIRST_GUEST + 1]
    assert not case.events("node_lost"), "no node of the run was blamed"


# Four turns at once: one engine is slower than the trainer.
SPOT = (
    SIMULATED.replace("enabled = false", "enabled = true").replace("[rollout]", "[rollout]\nmax_num_seqs = 4")
    + """
[borrow.spot]
nodes = 1
partition = "spot"
time_limit = "00:10:00"
"""
)


@pytest.mark.cluster
@pytest.mark.chaos
def test_a_run_queues_a_spot_node_once_it_pays_and_again_after_its_preemption(
    slurm_env: dict[str, str], tmp_path: Path
) -> None:
    case = Chaos(tmp_path, "slurm", SPOT, steps=4000, hybrid=0, rollout=1)
    run = case.submit()
    case.wait(lambda: case.guest_tokens() > 0, "trained tokens of the spot node")
    (borrowed,) = [one for one in case.events("decision") if one["action"] == "borrow"]
    assert " spot node 1 saves " in borrowed["reason"]
    assert borrowed["predicted_gain_s"] > 0.0
    assert borrowed["t"] < case.events("guest_joined")[0]["t"], "it waited for the planner"
    script = tmp_path / "urgent.sh"
    script.write_text("#!/bin/bash\nsleep 5\n")
    # The run has two of the six nodes.
    urgent = ["--partition=a800", "--nodes=4", "--exclusive", "--time=1", "--output=/dev/null"]
    call(["sbatch", *urgent, str(script)], slurm_env)
    case.wait(lambda: case.events("guest_left"), "the preempted guest")
    (leaves,) = case.events("guest_leaves")
    assert leaves["reason"] == "it got SIGTERM"
    before = case.guest_tokens()
    case.wait(lambda: len(case.events("guest_serves")) > 1, "its return")
    case.wait(lambda: case.guest_tokens() > before, "trained tokens of the second guest")
    case.cli("cancel", str(run.path))
    sound(case, "cancelled")
    assert not case.events("guest_lost")
    decided = [one["action"] for one in case.events("decision") if one["action"] != "hold"]
    assert decided == ["borrow"], "what is preempted is queued again without another decision"
    assert "t-spot" not in call(["squeue", "--noheader", "--format=%j", "--states=PENDING,RUNNING"], slurm_env).split()
