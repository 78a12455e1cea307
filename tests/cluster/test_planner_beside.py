"""A planner without a node of its own runs on the first train node, so that every node of the job has work."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.chaos.harness import SIMULATED, Chaos

from .runs import trained_once


def test_the_planner_shares_the_first_train_node(slurm_env: Mapping[str, str], tmp_path: Path) -> None:
    text = SIMULATED.replace('planner = {{ partition = "cpu", mem = "2G" }}', "planner = {{ nodes = 0 }}")
    assert text != SIMULATED
    case = Chaos(tmp_path, "slurm", text=text, steps=6, rollout=1)
    run = case.submit()
    assert case.ended() == "completed"
    trained_once(run, 6)
    joined = {event["rank"]: event for event in case.events("agent_joined")}
    assert {rank: event["component"] for rank, event in joined.items()} == {
        0: "planner",
        1: "train",
        2: "hybrid",
        3: "rollout",
    }
    job = run.read_json(run.job)["job_id"]
    steps = subprocess.run(
        ["scontrol", "show", "job", "--oneliner", job], env=dict(slurm_env), capture_output=True, text=True, check=True
    )
    (line,) = steps.stdout.splitlines()
    assert "NumNodes=3 " in line, "a plain job: a component by itself would have one node"
    assert "Partition=a800" in line
