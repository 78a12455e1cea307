"""`libra-hpc eval`: what is queued, and what is refused before that."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from libra_hpc.config.load import load_resolved
from libra_hpc.errors import UserError
from libra_hpc.facts.rundir import RunDir
from libra_hpc.preflight import checked_run
from tests.example_files import KEYCHAIN_TASK

from .conftest import Cli, one_line

EVAL = f"""
[rollout]
tp = [1, 2]
engines_per_node = [8, 4]
[[task.eval]]
name = "held"
task = "{KEYCHAIN_TASK}"
samples = 4
"""


@pytest.fixture
def run(submitted: RunDir, site: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run with an evaluation, and checkpoints of steps 20 and 60."""
    (site / "run.toml").write_text((site / "run.toml").read_text() + EVAL)
    assert cli("submit", "run.toml", "-o", "components.hybrid.mem=16G", "-o", "components.rollout.mem=16G").code == 0
    found = RunDir(site / "runs" / "quick-002")
    for step in (20, 60):
        (found.checkpoint(step) / "policy").parent.mkdir(parents=True)
        (found.checkpoint(step) / "policy").symlink_to(site / "model")
        (found.checkpoint(step) / "state.json").write_text("{}")
    monkeypatch.setattr("libra_hpc_cli.evaluate.slurm_environment", dict)
    monkeypatch.setattr("libra_hpc_cli.evaluate.try_task", checked_run.try_task)
    monkeypatch.setattr("libra_hpc_cli.evaluate.cluster_name", lambda env: "c")
    return found


def test_the_job_has_the_checkpoint_the_task_and_rollout_nodes_alone(
    run: RunDir, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[dict[str, Any]] = []

    def submit(function: Any, arguments: Any, config: Any, env: Any, **named: Any) -> Any:
        jobs.append(named)
        return SimpleNamespace(job_id="77")

    monkeypatch.setattr("libra_hpc_cli.evaluate.submit_on_nodes", submit)
    done = cli("eval", run.name, "--task", "held", "--samples", "16", "--step", "last,20", "--nodes", "3", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    policies = {str(step): str(run.checkpoint(step) / "policy") for step in (20, 60)}
    assert (found["policies"], found["job_id"]) == (policies, "77")
    place = RunDir(found["path"])
    assert place.path == run.path / "evaluations" / "held-step-20+60-001"
    config = load_resolved(place.config)
    assert [(part.name, part.samples) for part in config.task.eval] == [("held", 16)]
    assert (config.rollout.tp, config.rollout.engines_per_node, config.components.rollout.nodes) == (2, 4, 3)
    assert (jobs[0]["component"], jobs[0]["nodes"]) == ("rollout", 3)
    assert "its job 77 is " in one_line(cli("eval", found["path"]))
    place.write_json(place.result, {"state": "failed", "message": "no", "t": 1.0})
    place.evaluations.write_text('{"task": "held", "step": 20, "mean": 0.5}\n')
    left = json.loads(cli("eval", found["path"], "--json").out)
    assert (left["policies"], left["path"]) == ({"60": policies["60"]}, found["path"])
    assert not place.result.exists()
    assert "--step = '60': held-step-20+60-001 is an evaluation to go on with; valid: no --step." in one_line(
        cli("eval", found["path"], "--step", "60")
    )
    assert "valid: no --nodes." in one_line(cli("eval", found["path"], "--nodes", "2"))
    place.write_json(place.result, {"state": "completed", "message": "", "t": 1.0})
    place.evaluations.write_text("".join(f'{{"task": "held", "step": {step}}}\n' for step in (20, 60)))
    assert "has all its results" in one_line(cli("eval", found["path"]))


def test_a_job_that_slurm_refuses_leaves_no_folder(run: RunDir, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(*arguments: Any, **named: Any) -> Any:
        raise UserError("Slurm refuses the job.")

    monkeypatch.setattr("libra_hpc_cli.evaluate.submit_on_nodes", submit)
    assert one_line(cli("eval", run.name, "--task", "held")) == "error: Slurm refuses the job."
    assert not any((run.path / "evaluations").iterdir())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("quick-002", "--task", "hld"), "--task = 'hld': no such [[task.eval]]; valid: held (did you mean 'held'?)."),
        (("quick-002", "--task", "held", "--step", "30"), "has no policy of that step; valid: last, best, "),
        (("model", "--task", "held"), "model is a model folder: --file RUN.toml names the task and the engines."),
        (("quick-001", "--task", "held"), "--step = 'last': quick-001 has no checkpoint and no exported policy;"),
    ],
)
def test_what_is_missing_is_one_sentence(words: tuple[str, ...], sentence: str, run: RunDir, cli: Cli) -> None:
    assert sentence in one_line(cli("eval", *words))
    assert not (run.path / "evaluations").exists()
