"""Runs on Slurm that need more than one job or start: the time limit, a preemption, agents and nodes that die."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from libra_hpc.annexes.devcluster.cluster import ClusterInfo
from libra_hpc.slurm.queue.command import call
from libra_hpc.slurm.queue.job_record import read_job

from .harness import SIMULATED, Chaos, sound

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]
PLANNER, HYBRID = 0, 2


class Campaign(Chaos):
    """A run of several starts of one Slurm job, without hybrid nodes."""

    def __init__(self, folder: Path, steps: int, text: str = SIMULATED) -> None:
        super().__init__(folder, "slurm", text, steps=steps, hybrid=0, rollout=1)

    def goes_on(self) -> int:
        """Wait for the second start; returns the step at which the first one was stopped."""
        self.wait(lambda: len(self.events("job_started")) > 1, "another start after the first has ended")
        (requeued,) = self.events("job_requeued")
        first, second = self.events("job_started")
        assert (first["attempt"], second["attempt"], second["step"]) == (1, 1, requeued["step"]), "the same job"
        return int(requeued["step"])


@pytest.mark.chaos
def test_a_run_goes_on_after_its_time_limit_until_all_steps_are_trained(
    slurm_env: dict[str, str], tmp_path: Path
) -> None:
    case = Campaign(tmp_path, steps=60)
    run = case.submit("--until-done")
    case.reach(8)
    # What Slurm itself sends to the script before the time limit.
    call(["scancel", "--batch", "--signal=USR1", read_job(run).job_id], slurm_env)
    assert 8 <= case.goes_on() < 60
    sound(case)
    (asked,) = case.events("stop_requested")
    assert (asked["signal"], asked["reason"]) == ("SIGUSR1", "Slurm sent SIGUSR1")


@pytest.mark.chaos
def test_a_preempted_run_that_ends_within_the_grace_time_goes_on(slurm_env: dict[str, str], tmp_path: Path) -> None:
    text = SIMULATED.replace('"a800", gpus', '"spot", gpus').replace('"a800", nodes', '"spot", nodes')
    case = Campaign(tmp_path, 200, text.replace('"cpu", mem', '"spot", mem'))
    case.submit()
    case.reach(8)
    script = tmp_path / "urgent.sh"
    script.write_text("#!/bin/bash\nsleep 5\n")
    urgent = ["--partition=a800", "--nodes=6", "--exclusive", "--time=1", "--output=/dev/null"]
    call(["sbatch", *urgent, str(script)], slurm_env)
    case.goes_on()
    assert "preempted at step" in case.events("job_requeued")[0]["reason"]
    sound(case)


@pytest.mark.chaos
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
    assert "restart: the planner's agent (rank 0) was lost" in said
    assert f"libra-hpc: the run is completed at step {case.values['steps']}" in said, (
        "Slurm's own output says how it ended"
    )
