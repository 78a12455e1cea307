"""A sweep on the embedded Slurm: two runs with simulated engines, one after the other, and their rewards."""

from __future__ import annotations

import json
from pathlib import Path

from libra_hpc.annexes.devcluster.cluster import ClusterInfo
from libra_hpc.facts import series
from libra_hpc.facts.rundir import RunDir

from .test_dry_run import DryRun

ALONE = {
    "planner.enabled": "false",
    "components.hybrid.nodes": "0",
    "rollout.tp": "8",
    "rollout.engines_per_node": "1",
    "checkpoint.experience": "false",
    "simulated.speedup": "100.0",
}


def test_a_sweep_queues_its_runs_one_after_the_other_and_shows_rewards(cluster: ClusterInfo, tmp_path: Path) -> None:
    case = DryRun(tmp_path, "slurm", steps=2)
    changes = [word for key, value in ALONE.items() for word in ("-o", f"{key}={value}")]
    command = ["sweep", str(case.run_file), "--over", "run.seed=0,1", "--engine", "simulated", *changes]
    rows = json.loads(case.cli(*command, "--most", "1", "--json").stdout)["runs"]
    runs = [RunDir(row["path"]) for row in rows]
    for case.run in runs:
        assert case.ended() == "completed", case.logs()
    first, second = (series.events(run) for run in runs)
    assert first[-1]["t"] <= second[0]["t"], "the second waited for the first"
    again = json.loads(case.cli(*command, "--json").stdout)["runs"]
    assert [row["job_id"] for row in again] == [row["job_id"] for row in rows], "nothing is queued twice"
    assert all(row["reward"] is not None for row in again), "the table ends with what came of each"
