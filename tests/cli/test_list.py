"""`libra-hpc list`: which runs it has, in which order, and how it shows them."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from libra_hpc.facts.status import encode_status
from libra_hpc.facts.sweep_record import SweepMember, write_member
from libra_hpc.files import write_atomic
from libra_hpc.slurm.queue.query import JobInfo, JobState
from tests.facts import synthetic
from tests.preflight.test_checks import write_model

from .conftest import Cli, Queue, one_line

LONG = "qwen3-14b-a800-eta0.lr1e-6.clip0.2.seed0"


def listed(cli: Cli, *options: str) -> list[str]:
    return [row["run"] for row in json.loads(cli("list", "--json", *options).out)]


def test_a_list_has_the_runs_of_one_folder(site: Path, queue: Queue, cli: Cli) -> None:
    synthetic.make_run(site / "runs")
    synthetic.make_run(site / "paper", "other")
    write_model(site / "paper" / "model")
    assert listed(cli) == ["quick-001"]
    assert listed(cli, "--runs", "paper") == ["other-001"]
    assert cli("list", "--runs", "none").err == "no runs below none/\n"


def test_dry_runs_are_marked_among_real_ones(site: Path, queue: Queue, cli: Cli) -> None:
    for name, speedup in (("real", 1.0), ("dry", 60.0)):
        run = synthetic.make_run(site / "runs", name)
        status = msgspec.structs.replace(synthetic.make_status(run, state="completed"), speedup=speedup)
        write_atomic(run.status, encode_status(status))
    shown = [line for line in cli("list").out.splitlines() if "completed" in line]
    assert {"dry-001" in line: "completed  dry run, x60" in line for line in shown} == {False: False, True: True}


@pytest.mark.parametrize("width", [60, 80, 100])
def test_names_of_runs_are_whole_in_every_width(
    width: int, site: Path, queue: Queue, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("libra_hpc_cli.output.WIDTH", width)
    for name in ("quick", "quick-eta0.seed0", LONG):
        run = synthetic.make_run(site / "runs", name)
        write_member(run, SweepMember("quick", {}))
    lines = cli("list").out.splitlines()
    for name in ("quick-001", "quick-eta0.seed0-001", f"{LONG}-001"):
        assert sum(name in line.split() for line in lines) == 1
    assert not any("…" in line for line in lines)
    assert max(map(len, lines)) <= width


def test_a_resume_that_is_cancelled_before_it_starts_takes_no_step_and_no_reward_back(
    site: Path, queue: Queue, cli: Cli
) -> None:
    run = synthetic.make_run(site / "runs")
    (before,) = json.loads(cli("list", "--json").out)
    run.write_json(run.job, run.read_json(run.job) | {"attempt": 2})
    run.result.unlink()
    queue.answer = JobInfo("4711", JobState.CANCELLED)
    (after,) = json.loads(cli("list", "--json").out)
    assert (after["state"], after["attempt"], after["reason"]) == ("cancelled", 2, "before it started")
    for key in ("step", "steps", "reward", "updated_at"):
        assert after[key] == before[key] is not None


@pytest.mark.parametrize("record", [None, "{"], ids=["unreadable", "torn"])
def test_a_run_whose_job_cannot_be_read_is_listed_with_the_reason_and_neither_resumed_nor_called_unqueued(
    record: str | None, site: Path, queue: Queue, cli: Cli
) -> None:
    for name in ("good", "bad"):
        synthetic.make_run(site / "runs", name)
    job = site / "runs" / "bad-001" / "job.json"
    job.unlink()
    # Root reads any file, and no folder.
    job.write_text(record) if record else job.mkdir()
    rows = {row["run"]: row for row in json.loads(cli("list", "--json").out)}
    assert rows["good-001"]["job_id"] == "4711"
    assert (rows["bad-001"]["state"], str(job) in rows["bad-001"]["reason"]) == ("unknown", True)
    assert " bad-001: " in cli("list").out
    assert str(job) in one_line(cli("submit", "--resume", "bad-001"))
    assert json.loads(cli("status", "bad-001", "--json").out)["state"] == "unknown"
