"""Node agents that die or stop, the planner's, a leader's, a hybrid node's, and the owner of a run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from libra_hpc.slurm.queue.job_record import read_job

from .harness import Chaos, nothing_left, patched, sound

pytestmark = [pytest.mark.timeout(300)]

PLANNER, TRAIN_LEADER, HYBRID, ROLLOUT_LEADER, ROLLOUT = range(5)


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("rank", "train_nodes", "least"),
    [
        (PLANNER, 1, 8),
        # Training saves at the next step boundary; without its ranks all go back to the newest checkpoint.
        (TRAIN_LEADER, 1, 0),
        (TRAIN_LEADER + 1, 2, 5),
        (ROLLOUT_LEADER, 1, 8),
    ],
)
def test_a_killed_leader_or_node_of_the_core_costs_a_restart_inside_the_job(
    tmp_path: Path, rank: int, train_nodes: int, least: int
) -> None:
    case = Chaos(tmp_path)
    case.submit("-o", f"components.train.nodes={train_nodes}")
    case.reach(8)
    case.signal_agent(rank, signal.SIGKILL)
    case.wait(lambda: case.events("recovered"), "the restart")
    sound(case)
    (recovered,) = case.events("recovered")
    assert recovered["restarts"] == 1
    assert "rank 0" in recovered["reason"] if rank == PLANNER else f"node {rank}" in recovered["reason"]
    assert {event["attempt"] for event in case.events("job_started")} == {1}
    assert recovered["step"] >= least


def test_a_killed_hybrid_node_is_noticed_at_once_and_the_others_go_on(tmp_path: Path) -> None:
    case = Chaos(tmp_path)
    case.submit()
    case.reach(5)
    case.signal_agent(HYBRID, signal.SIGKILL)
    case.wait(lambda: case.events("node_lost"), "the lost node")
    (lost,) = case.events("node_lost")
    assert lost["reason"] == "its agent's process ended"
    assert lost["silent_s"] < 10
    sound(case)
    assert not case.events("recovered")


@pytest.mark.chaos
@pytest.mark.parametrize("role", ["rollout", "train"])
def test_a_node_that_was_stopped_is_taken_back(tmp_path: Path, role: str) -> None:
    case = Chaos(tmp_path, steps=400, hybrid_start=role)
    case.submit()
    case.reach(5)
    victim = case.agent(HYBRID)
    os.kill(victim, signal.SIGSTOP)
    case.wait(lambda: case.events("node_lost"), "the lost node")
    before = len(case.steps())
    case.wait(lambda: len(case.steps()) > before + 2, "steps without it")
    os.kill(victim, signal.SIGCONT)
    case.wait(lambda: case.events("node_returned"), "its return")
    case.wait(lambda: case.layouts()[-1].layout.rows[HYBRID].state == role, "it works again")
    before = len(case.steps())
    case.wait(lambda: len(case.steps()) > before + 2, "steps with it")
    case.cli("cancel", str(case.run.path if case.run else ""))
    sound(case, "cancelled")
    assert not case.events("recovered")


@pytest.mark.chaos
def test_a_stopped_leader_costs_a_restart_and_is_ended_by_the_launcher(tmp_path: Path) -> None:
    case = Chaos(tmp_path)
    case.submit()
    case.reach(5)
    case.signal_agent(TRAIN_LEADER, signal.SIGSTOP)
    case.wait(lambda: case.events("recovered"), "the restart")
    sound(case)


DEAF = """
import asyncio, os
from libra_hpc.mesh import links
real = links.Seal.frame
async def frame(self, reader, most):
    got = await real(self, reader, most)
    while os.path.exists({flag!r}):
        if {closes}:
            raise ConnectionError("deaf")
        await asyncio.sleep(0.1)
    return got
links.Seal.frame = frame
"""
"""An agent that sends and does not hear: it closes what comes, or reads it late."""


@pytest.mark.chaos
@pytest.mark.parametrize("closes", [True, False])
def test_a_deaf_replica_goes_and_the_core_trains_on(tmp_path: Path, closes: bool) -> None:
    case, flag = Chaos(tmp_path, steps=400, hybrid_start="train"), tmp_path / "deaf"
    case.submit(*patched(tmp_path, DEAF.format(flag=str(flag), closes=closes), HYBRID))
    case.reach(8)
    flag.touch()
    case.wait(lambda: case.events("node_lost"), "the lost node")
    before = case.steps()[-1]
    case.wait(lambda: case.steps()[-1] > before + 2, "steps without it")
    case.cli("cancel", str(case.run.path if case.run else ""))
    sound(case, "cancelled")
    assert {event["rank"] for event in case.events("node_lost")} == {HYBRID}
    assert not case.events("recovered")


@pytest.mark.chaos
def test_ranks_of_a_killed_owner_save_and_say_so_and_the_run_goes_on(tmp_path: Path) -> None:
    case = Chaos(tmp_path, steps=60)
    run = case.submit()
    case.reach(8)
    owner = read_job(run).pid
    os.kill(owner, signal.SIGKILL)
    case.wait(lambda: case.status()["state"] == "failed", "the last status, of ranks that ended")
    message = case.status()["message"]
    assert message.startswith(f"the owner of the run (process {owner} on "), message
    assert message.endswith(" is saved; continue with --resume")
    nothing_left(run)
    shown = case.cli("status", str(run.path)).stdout
    assert "failed" in shown
    assert f"process {owner}" in shown
    case.resume()
    sound(case)
    assert case.events("job_started")[-1]["step"] >= 8
