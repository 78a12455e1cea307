"""Node agents that die or stop: the planner's, a leader's, a hybrid node's."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from libra_hpc.facts.rundir import read_lines
from tests.tracking.test_sidecar import tensorboard

from .harness import Chaos, patched, sound

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


@pytest.mark.chaos
def test_trackers_have_each_step_once_whatever_is_killed(tmp_path: Path) -> None:
    """Sidecar and environment host with each fault, the rollout leader's node once."""
    case = Chaos(tmp_path, steps=60)
    case.submit("-o", "track.tensorboard=true")
    for step in (6, 16, 26):
        case.reach(step)
        assert case.run is not None
        sidecar = f"-m\0libra_hpc.tracking\0{case.run.path}\0"
        found = [int(folder.name) for folder in Path("/proc").glob("[0-9]*") if sidecar in cmdline(folder)]
        for pid in (*found, case.child(ROLLOUT_LEADER, "libra_hpc.simulated.host_process")):
            os.kill(pid, signal.SIGKILL)
        if step == 16:
            case.signal_agent(ROLLOUT_LEADER, signal.SIGKILL)
            case.wait(lambda: case.events("recovered"), "the restart")
    sound(case)
    assert case.events("host_lost")
    assert tensorboard(case.run) == pytest.approx({row["step"]: row["reward"] for row in read_lines(case.run.metrics)})


def cmdline(folder: Path) -> str:
    try:
        return (folder / "cmdline").read_text()
    except OSError:
        return ""


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
    case.wait(
        lambda: [e["state"] for e in case.events("node_state") if e["rank"] == HYBRID][-1] == role, "it works again"
    )
    before = len(case.steps())
    case.wait(lambda: len(case.steps()) > before + 2, "steps with it")
    case.cli("cancel", str(case.run.path if case.run else ""))
    sound(case, "cancelled")
    assert not case.events("recovered")


SHORT = """
from libra_hpc.coordinator import liveness
from libra_hpc.policies.pool import readmission
liveness.HEARTBEAT_LOST_S, readmission.PROVE_S = 4.0, 3.0
"""


@pytest.mark.chaos
def test_a_node_that_flaps_is_taken_back_ever_later_and_then_quarantined(tmp_path: Path) -> None:
    case = Chaos(tmp_path, steps=4000)
    run = case.submit(*patched(tmp_path, SHORT, PLANNER))
    case.reach(5)
    victim, losses = case.agent(ROLLOUT), 0
    while not case.events("node_quarantined"):
        losses += 1
        os.kill(victim, signal.SIGSTOP)
        case.wait(lambda: len(case.events("node_lost")) == losses, "the lost node")  # noqa: B023 (called here)
        os.kill(victim, signal.SIGCONT)
        case.wait(
            lambda: case.events("node_quarantined") or len(case.events("node_returned")) == losses,  # noqa: B023
            "its return",
        )
    sentence = f"node {ROLLOUT} is quarantined: lost 5 times in an hour"
    assert [event["reason"] for event in case.events("node_quarantined")] == [sentence]
    assert losses == 5
    case.wait(lambda: sentence in case.status()["notices"], "the status that names it")
    assert sentence in " ".join(case.cli("status", str(run.path)).stdout.split())
    step = case.steps()[-1]
    case.wait(lambda: case.steps()[-1] > step + 2, "steps without it")
    away = [
        back["t"] - lost["t"]
        for lost, back in zip(case.events("node_lost"), case.events("node_returned"), strict=False)
    ]
    assert away[0] < away[1] < away[2], "taken back later and later"
    case.cli("cancel", str(run.path))
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
