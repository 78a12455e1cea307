"""`libra-hpc eval` on the embedded Slurm: engines and hosts without trainers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from libra_hpc.annexes.devcluster.cluster import ClusterInfo
from libra_hpc.facts.rundir import RunDir, read_lines

from .test_dry_run import DryRun

pytestmark = pytest.mark.timeout(300)
EVALUATION = """
[[task.eval]]
name = "held"
task = "data"
prompts = 12
samples = 4

[[task.eval]]
name = "more"
task = "data"
prompts = 5
"""


def test_two_nodes_evaluate_a_model_folder_in_a_job_of_their_own(cluster: ClusterInfo, tmp_path: Path) -> None:
    case, model = DryRun(tmp_path, "slurm", steps=4), tmp_path / "model"
    text = case.run_file.read_text().replace("steps = 4", 'steps = 4\nengine = "simulated"')
    case.run_file.write_text(
        text.replace("tp = [4, 8]", "tp = 8\nmax_num_seqs = 8").replace("[2, 1]", "1") + EVALUATION
    )
    model.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (model / name).write_text("{}")
    words = ("--file", str(case.run_file), "--samples", "8", "--nodes", "2", "--wait", "--json")
    found = json.loads(case.cli("eval", str(model), *words).stdout)
    place = RunDir(found["path"])
    assert place.path.parent == tmp_path / "runs"
    assert list(read_lines(place.evaluations)) == found["results"]
    assert {line["task"]: line["prompts"] for line in found["results"]} == {"held": 12, "more": 5}
    for line in found["results"]:
        assert (line["step"], line["failed"], line["samples"]) == (0, 0, 8)
        assert list(line["pass_at"]) == ["1", "2", "4", "8"]
    engines = {line["engine"] for line in read_lines(place.decisions) if "engine" in line}
    assert engines == {"r0.0", "r1.0"}, "both nodes have turns"
    (row,) = json.loads(case.cli("list", "--json").stdout)
    assert (row["run"], row["state"]) == (place.name, "completed")
    policies = place.read_json(place.policies)
    place.write_json(place.policies, policies | {"3": str(model), "7": str(model)})
    found = json.loads(case.cli("eval", str(place.path), "--wait", "--json").stdout)
    assert found["path"] == str(place.path), "it goes on with what is left, in one job"
    assert sorted((line["step"], line["task"]) for line in found["results"]) == [
        (step, task) for step in (0, 3, 7) for task in ("held", "more")
    ]
    assert all(line["failed"] == 0 for line in found["results"])
    status = case.cli("status", str(place.path)).stdout
    assert "evaluation held " in status
