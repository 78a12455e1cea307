"""Restarts inside a Slurm allocation: the same faults through the batch script instead of the local launcher."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from libra_hpc.slurm.devcluster.cluster import ClusterInfo

from .harness import Chaos, sound

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

PLANNER, TRAIN_LEADER, HYBRID = range(3)


def test_a_killed_planner_and_a_killed_node_on_slurm(cluster: ClusterInfo, tmp_path: Path) -> None:
    case = Chaos(tmp_path, "slurm", rollout=1, steps=200)
    run = case.submit()
    case.reach(4)
    case.signal_agent(HYBRID, signal.SIGKILL)
    case.wait(lambda: case.events("node_lost"), "the lost node")
    assert case.events("node_lost")[0]["reason"] == "its agent's process ended"
    case.signal_agent(PLANNER, signal.SIGKILL)
    case.wait(lambda: case.events("recovered"), "the restart")
    sound(case)
    assert {event["attempt"] for event in case.events("job_started")} == {1}, "the same job"
    said = (run.logs(1) / "slurm.out").read_text()
    assert "recover: the planner's agent (rank 0) was lost" in said
    assert f"libra-hpc: the run is completed at step {case.values['steps']}" in said, (
        "Slurm's own output says how it ended"
    )


@pytest.mark.chaos
def test_a_stopped_leader_on_slurm_is_ended_by_the_script(cluster: ClusterInfo, tmp_path: Path) -> None:
    case = Chaos(tmp_path, "slurm", rollout=1, steps=200)
    case.submit()
    case.reach(4)
    case.signal_agent(TRAIN_LEADER, signal.SIGSTOP)
    case.wait(lambda: case.events("recovered"), "the restart")
    sound(case)
