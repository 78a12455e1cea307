"""sweep: what is queued, what is refused, and what a second command adds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from libra_hpc_cli import jobs

from libra_hpc.errors import OperationError
from libra_hpc.facts.rundir import RunDir
from libra_hpc.slurm.launch import Launch

from .conftest import Cli, Queue

OVER = ("--over", "optimizer.lr=1e-6,3e-6", "--over", "run.seed=0,1")


def folders(site: Path) -> list[str]:
    parent = site / "runs"
    return sorted(path.name for path in parent.iterdir() if path.is_dir()) if parent.exists() else []


def test_a_sweep_queues_every_combination_under_its_own_name(site: Path, queue: Queue, cli: Cli) -> None:
    outcome = cli("sweep", "run.toml", *OVER, "--json")
    assert outcome.code == 0, outcome.err
    printed = json.loads(outcome.out)
    names = [f"quick-lr{lr}.seed{seed}-001" for lr in ("1e-6", "3e-6") for seed in (0, 1)]
    assert [row["run"] for row in printed["runs"]] == [name for name, _ in queue.submitted] == names == folders(site)
    run = RunDir(site / "runs" / names[3])
    config = run.read_json(run.config)
    assert (config["optimizer"]["lr"], config["run"]["seed"]) == (3e-6, 1)
    assert run.read_json(run.sweep) == {"sweep": "quick", "values": {"optimizer.lr": 3e-6, "run.seed": 1}}
    recorded = json.loads((site / "runs" / "sweep-quick.json").read_text())
    assert [f"{one['name']}-001" for one in recorded["runs"]] == names
    assert {row["sweep"] for row in json.loads(cli("list", "--json").out)} == {"quick"}
    assert "sweep quick" in cli("list").out


def test_a_dry_run_checks_and_touches_nothing(site: Path, queue: Queue, cli: Cli) -> None:
    outcome = cli("sweep", "run.toml", *OVER, "--dry-run")
    assert outcome.code == 0
    assert "quick-lr3e-6.seed1" in outcome.out
    assert not (site / "runs").exists()


def test_after_a_refusal_in_the_middle_the_same_command_queues_the_others(
    site: Path, queue: Queue, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_the_third(launch: Launch, environment: Any) -> str:
        if len(queue.submitted) == 2:
            raise OperationError("Slurm did not take the job: too many jobs.")
        return queue.queue(launch, environment)

    monkeypatch.setattr(jobs, "queue", refuse_the_third)
    outcome = cli("sweep", "run.toml", *OVER)
    assert outcome.code == 1
    assert "2 of 4 runs are queued (quick-lr1e-6.seed0-001, quick-lr1e-6.seed1-001)" in outcome.err
    assert len(folders(site)) == 2
    monkeypatch.setattr(jobs, "queue", queue.queue)
    again = json.loads(cli("sweep", "run.toml", *OVER, "--json").out)
    assert [row["queued_before"] for row in again["runs"]] == [True, True, False, False]
    assert len(queue.submitted) == len(set(queue.submitted)) == 4
    cli("sweep", "run.toml", *OVER)
    assert len(queue.submitted) == 4
    cli("sweep", "run.toml", *OVER[:3], "run.seed=1,2")
    assert [name for name, _ in queue.submitted[4:]] == ["quick-lr1e-6.seed2-001", "quick-lr3e-6.seed2-001"]


def test_a_name_belongs_to_one_sweep(site: Path, queue: Queue, cli: Cli) -> None:
    cli("sweep", "run.toml", *OVER)
    other_keys = cli("sweep", "run.toml", "--over", "run.seed=0,1")
    assert (other_keys.code, "over optimizer.lr, run.seed" in other_keys.err) == (2, True)
    other_file = cli("sweep", "run.toml", *OVER, "-o", "run.steps=7")
    assert (other_file.code, "has run.steps = 100, and not 7" in other_file.err) == (2, True)
    assert cli("sweep", "run.toml", "--over", "run.seed=0,1", "--name", "../x").code == 2
    assert cli("sweep", "run.toml", "--over", "run.seed=0,1", "--name", "seeds").code == 0
    assert len(queue.submitted) == 6


def test_a_run_without_a_record_of_its_job_is_not_queued_again(site: Path, queue: Queue, cli: Cli) -> None:
    cli("sweep", "run.toml", *OVER)
    (site / "runs" / "quick-lr1e-6.seed0-001" / "job.json").unlink()
    outcome = cli("sweep", "run.toml", *OVER)
    assert (outcome.code, "has no record of a job" in outcome.err) == (2, True)
    assert len(queue.submitted) == 4


def test_most_runs_at_a_time_is_a_chain_of_jobs(
    site: Path, queue: Queue, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = []

    def record(launch: Launch, environment: Any) -> str:
        scripts.append(jobs.script(launch))
        return queue.queue(launch, environment)

    monkeypatch.setattr(jobs, "queue", record)
    assert cli("sweep", "run.toml", *OVER, "--most", "3").code == 0
    assert ["#SBATCH --dependency=afterany:4711\n" in script for script in scripts] == [False, False, False, True]
    refused = cli("sweep", "run.toml", *OVER, "--most", "3", "--executor", "local", "--name", "x")
    assert (refused.code, "--most = 3: the local executor has no queue" in refused.err) == (2, True)
