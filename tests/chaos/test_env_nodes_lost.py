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
    assert run.script.read_text().count("#SBATCH hetjob") == 2, "train, rollout and env"
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


@pytest.mark.chaos
def test_an_environment_node_that_stops_comes_back_as_a_new_one(tmp_path: Path) -> None:
    case = Chaos(tmp_path, text=TEXT, hybrid=0, rollout=1, steps=120)
    run = case.submit()
    case.reach(6)
    before = case.child(SECOND, "libra_hpc.simulated.host_process")
    case.signal_agent(SECOND, signal.SIGSTOP)
    case.wait(lambda: case.events("node_lost"), "the loss")
    case.signal_agent(SECOND, signal.SIGCONT)
    came = lambda: [e for e in case.events("node_state") if (e["rank"], e["state"]) == (SECOND, "env")]  # noqa: E731
    case.wait(lambda: len(came()) == 2, "the return")
    assert case.child(SECOND, "libra_hpc.simulated.host_process") != before
    sound(case)
    sampled_once(run)
