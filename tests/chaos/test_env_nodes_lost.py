"""Environment nodes as a component of a Slurm job: one is killed, one stops for a while, and the run goes on."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from libra_hpc.annexes.devcluster.cluster import ClusterInfo
from libra_hpc.facts.rundir import read_lines
from tests.cluster.runs import sampled_once

from .harness import SIMULATED, Chaos, sound

pytestmark = [pytest.mark.timeout(300)]

ENV = 'env = {{ partition = "cpu", nodes = 2, cpus = 8, mem = "4G", seats = 10 }}'
TEXT = SIMULATED.replace('planner = {{ partition = "cpu", mem = "2G" }}', f"planner = {{{{ nodes = 0 }}}}\n{ENV}")
ROLLOUT_LEADER, FIRST, SECOND = 2, 3, 4


def hosts_of(case: Chaos, rank: int) -> dict[str, str]:
    """Role and processes of a node in the status."""
    (node,) = [node for node in case.status()["nodes"] if node["rank"] == rank]
    return {"role": node["role"], **node["engines"]}


@pytest.mark.cluster
def test_a_killed_environment_node_costs_no_step_and_no_trajectory(cluster: ClusterInfo, tmp_path: Path) -> None:
    case = Chaos(tmp_path, "slurm", TEXT, hybrid=0, rollout=1, steps=60)
    run = case.submit()
    assert run.script.read_text().count("#SBATCH hetjob") == 1, "the core and env"
    case.reach(6)
    assert case.node(FIRST).startswith("cpu-")
    assert hosts_of(case, FIRST) == {"role": "env", "e3.0": "ready"}
    case.signal_agent(SECOND, signal.SIGKILL)
    case.wait(lambda: case.events("node_lost"), "the loss")
    assert [event["rank"] for event in case.events("node_lost")] == [SECOND]
    case.wait(lambda: hosts_of(case, SECOND)["role"] == "lost", "the loss in the status")
    at = case.steps()[-1]
    case.reach(at + 3)
    sound(case)
    assert not case.events("recovered"), "the ranks did not restart"
    sampled_once(run)
    assert len(list(read_lines(run.metrics))) == 60
