"""The verbs on runs whose facts are known: what they print, what they write, and their exit codes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from libra_hpc_cli import jobs

from libra_hpc.errors import SlurmUnreachable, UserError
from libra_hpc.facts.rundir import RunDir
from libra_hpc.slurm.queue.query import JobInfo, JobState
from tests.facts import synthetic

from .conftest import Cli, Queue, write_status


@pytest.fixture
def logs(site: Path, queue: Queue) -> Path:
    """The folder of a run's first attempt for logs."""
    folder = synthetic.make_run(site / "runs").logs(1)
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def running(submitted: RunDir, queue: Queue) -> RunDir:
    """A run that is under way."""
    write_status(submitted, "running")
    queue.answer = JobInfo("4711", JobState.RUNNING)
    return submitted


@pytest.mark.parametrize("content", ['{"run": {"na', "[]", "[" * 100_000])
def test_a_damaged_configuration_is_named_by_verbs_that_need_it(
    content: str, submitted: RunDir, queue: Queue, cli: Cli
) -> None:
    submitted.config.write_text(content)
    queue.answer = JobInfo("4711", JobState.RUNNING)
    verbs = ("status", "status --json", "status runs/quick-001", "submit --resume quick-001")
    for verb in verbs:
        outcome = cli(*verb.split())
        assert (outcome.code, outcome.out) == (2, ""), verb
        assert outcome.err.startswith(f"error: {submitted.config}: the configuration of the run "), verb
    assert cli("cancel", "quick-001").code == 0, "a run must not go on because a file of it is damaged"
    assert queue.cancelled == ["quick-001"]


def test_a_folder_without_a_configuration_is_no_run(site: Path, queue: Queue, cli: Cli) -> None:
    (site / "runs" / "quick-001").mkdir(parents=True)
    assert "no run of that name" in cli("status", "quick-001").err
    with pytest.raises(UserError, match=r"quick-001 is not a run directory: it has no config\.json\.$"):
        RunDir(site / "runs" / "quick-001").resolved()


def test_status_shows_the_snapshot_or_why_the_job_waits(submitted: RunDir, queue: Queue, cli: Cli) -> None:
    assert "job 4711 is pending (waiting for free nodes)" in cli("status").out
    write_status(submitted, "running")
    queue.answer = JobInfo("4711", JobState.RUNNING)
    assert "41 / 60" in cli("status", "4711").out
    printed = json.loads(cli("status", "quick-001", "--json").out)
    assert (printed["run"], printed["state"], printed["status"]["step"]) == ("quick-001", "running", 41)


def test_status_of_a_run_that_was_never_queued(site: Path, queue: Queue, cli: Cli) -> None:
    run = RunDir.create(site / "runs", "quick")
    run.write_json(run.config, {})
    assert cli("status").out == f"quick-001: was never queued; files in {run.path}\n"


def test_a_snapshot_of_an_earlier_attempt_is_not_shown(submitted: RunDir, queue: Queue, cli: Cli) -> None:
    write_status(submitted, "failed")
    queue.answer = JobInfo("4711", JobState.FAILED)
    cli("submit", "--resume", "quick-001")
    queue.answer = JobInfo("4711", JobState.PENDING)
    assert json.loads(cli("status", "--json").out)["status"] is None


def test_status_of_an_ended_run_is_its_summary_and_draws_the_picture(site: Path, queue: Queue, cli: Cli) -> None:
    run = synthetic.make_run(site / "runs")
    shown = cli("status", "quick-001").out
    assert "3 steps, 500 tokens" in shown
    assert "heartbeat" not in shown
    printed = json.loads(cli("status", "quick-001", "--json").out)["summary"]
    assert printed["steps"] == 60
    assert printed["picture"] == str(run.summary_picture)


def test_cancel_is_idempotent(submitted: RunDir, queue: Queue, cli: Cli) -> None:
    assert "job 4711 cancelled" in cli("cancel").out
    queue.answer = JobInfo("4711", JobState.CANCELLED)
    outcome = cli("cancel", "quick-001")
    assert outcome.code == 0
    assert "is cancelled (before it started); nothing to cancel" in outcome.out
    assert queue.cancelled == ["quick-001"]
    expected = {"run": "quick-001", "job_id": "4711", "state": "cancelled", "message": ""}
    assert json.loads(cli("cancel", "--json").out) == {**expected, "cancelled": False}
    queue.answer = JobInfo("4711", JobState.RUNNING)
    assert json.loads(cli("cancel", "--json").out) == {**expected, "cancelled": True}
    assert queue.cancelled == ["quick-001", "quick-001"]


def test_a_run_that_trains_is_asked_to_save_and_its_answer_is_shown(
    running: RunDir, queue: Queue, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answered(seconds: float) -> None:
        assert running.stop.exists()
        if running.result.exists():
            queue.answer = JobInfo("4711", JobState.CANCELLED)
        running.write_json(running.result, {"state": "cancelled", "message": "step 41 is saved", "t": time.time()})

    monkeypatch.setattr("libra_hpc_cli.cancel.time.sleep", answered)
    assert "job 4711 cancelled; step 41 is saved; " in cli("cancel", "quick-001").out
    assert queue.cancelled == []
    over = "only once the job is over, so that the run can be resumed at once"
    assert queue.answer == JobInfo("4711", JobState.CANCELLED), over


def test_a_run_that_does_not_answer_and_one_that_shall_not_be_asked_are_ended(
    running: RunDir, queue: Queue, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("libra_hpc_cli.cancel.PATIENCE_S", 0.0)
    assert "it has no checkpoint" in cli("cancel", "quick-001").out
    assert queue.cancelled == ["quick-001"]
    running.stop.unlink()
    cli("cancel", "quick-001", "--now")
    assert queue.cancelled == ["quick-001"] * 2
    assert not running.stop.exists()


def test_logs_select_by_rank_and_name_and_cut_to_the_tail(logs: Path, queue: Queue, cli: Cli) -> None:
    for name in ("agent-2", "host2", "r3.0", "t2.0"):
        (logs / f"{name}.log").write_text("".join(f"{name} line {i}\n" for i in range(30)))
    out = cli("logs", "--rank", "2", "--tail", "2").out
    lines = ["agent-2 line 28", "agent-2 line 29", "t2.0 line 28", "t2.0 line 29"]
    assert [line for line in out.splitlines() if "line" in line] == lines
    assert "host2 line 29" in cli("logs", "--process", "host").out
    outcome = cli("logs", "--process", "hots")
    assert outcome.code == 2
    assert "valid: agent-2, host2, r3.0, t2.0" in outcome.err
    assert "--rank = 7: no log file of such a node; valid: 2, 3." in cli("logs", "--rank", "7").err


def test_marks_between_processes_are_no_logs(logs: Path, queue: Queue, cli: Cli) -> None:
    for name in ("agent-0.log", "slurm.out", "met"):
        (logs / name).write_text("a line\n")
    shown = [line.split("/")[-1] for line in cli("logs").out.splitlines() if line != "a line"]
    assert shown == ["agent-0.log <==", "slurm.out <=="]


def test_a_run_that_never_wrote_a_status_ends_logs_when_its_job_has(
    submitted: RunDir, queue: Queue, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = submitted.logs(1)
    logs.mkdir(parents=True)
    (logs / "slurm.out").write_text("No module named 'mpi4py'\n")
    queue.answer = JobInfo("4711", JobState.FAILED, "NonZeroExitCode", exit_code=1)
    outcome = cli("logs", "quick-001", "--follow")
    assert "No module named 'mpi4py'" in outcome.out
    assert "quick-001: job 4711 is failed" in outcome.err


def test_watching_a_run_that_failed_exits_with_1(running: RunDir, cli: Cli) -> None:
    write_status(running, "failed")
    assert cli("status", "quick-001", "--watch").code == 1
    write_status(running, "completed")
    assert cli("status", "quick-001", "--watch").code == 0


def test_an_ended_run_without_steps_gets_no_picture(submitted: RunDir, queue: Queue, cli: Cli) -> None:
    write_status(submitted, "failed", step=0)
    assert "failed" in cli("status", "quick-001").out
    assert not submitted.summary_picture.exists()


def test_a_run_that_cannot_be_asked_to_save_is_ended_all_the_same(
    running: RunDir, queue: Queue, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("libra_hpc_cli.cancel.write_atomic", full)
    outcome = cli("cancel", "quick-001")
    assert outcome.code == 0
    assert "cannot be asked to save" in outcome.err
    assert "No space left on device" in outcome.err
    assert queue.cancelled == ["quick-001"]


def test_a_queue_that_does_not_answer_is_said(
    site: Path, queue: Queue, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable() -> dict[str, str]:
        raise SlurmUnreachable("No Slurm controller answers.")

    monkeypatch.undo()
    monkeypatch.setattr(jobs, "slurm_environment", unreachable)
    run = RunDir.create(site / "runs", "quick")
    run.write_json(run.job, {"job_id": "4711", "executor": "slurm", "attempt": 1, "submitted_at": 1.0})
    assert jobs.states([run])[str(run.path)].reason == "No Slurm controller answers"
    assert "as their folders have them: No Slurm controller answers." in capsys.readouterr().err


def test_removing_a_cluster_keeps_packages_that_another_runs_from(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("LIBRA_HPC_CACHE", str(cache))
    monkeypatch.setenv("LIBRA_HPC_CLUSTER", str(tmp_path / "cluster"))
    cache.mkdir()
    (cache / "slurm.lock").touch()
    daemon = cache / "slurmd"
    shutil.copy(shutil.which("sleep") or "", daemon)
    with subprocess.Popen([daemon, "60"]) as process:
        kept = cli("cluster", "down", "--remove").out
        process.kill()
    assert f"kept {cache}: another embedded Slurm runs from it" in kept
    assert daemon.exists()
    assert f"removed {cache}" in cli("cluster", "down", "--remove").out
    assert not cache.exists()


@pytest.mark.parametrize("words", ["status quick-001", "list"])
def test_a_file_of_a_run_that_cannot_be_read_is_a_sentence(words: str, submitted: RunDir, cli: Cli) -> None:
    write_status(submitted)
    submitted.metrics.mkdir()
    outcome = cli(*words.split())
    assert outcome.code == 1
    assert re.fullmatch(r"error: \S*metrics\.jsonl: Is a directory\.\n", outcome.err)
