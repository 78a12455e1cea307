"""Fixtures of the command line: a site of two partitions, a queue that records submissions, a model folder."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from libra_hpc_cli import app, follow, jobs, output

from libra_hpc.facts.rundir import RunDir
from libra_hpc.facts.status import FINAL, encode_status
from libra_hpc.files import write_atomic
from libra_hpc.preflight import checked_run
from libra_hpc.preflight.task_trial import TaskTrial
from libra_hpc.slurm.launch import Launch
from libra_hpc.slurm.queue.query import JobInfo, JobState, Partition
from libra_hpc.slurm.queue.run_state import NoAnswer
from tests.example_files import KEYCHAIN_TASK
from tests.facts import synthetic
from tests.preflight.test_checks import write_model

PARTITIONS = [
    Partition("a800", True, "up", nodes=4, idle=4, cpus=64, memory_mb=1_000_000, gpus={"a800": 8}, max_seconds=86400),
    Partition("cpu", False, "up", nodes=2, idle=2, cpus=64, memory_mb=256_000, gpus={}, max_seconds=None),
]
RUN = '[run]\nname = "quick"\n[components.hybrid]\nnodes = 1\n[model]\npath = "model"\n'
RUN += f'[task]\nname = "{KEYCHAIN_TASK}"\n'
"""A good run file."""


class Outcome(msgspec.Struct):
    """What one command line did."""

    code: int
    out: str
    err: str


Cli = Callable[..., Outcome]
Sleep = Callable[[Callable[[float], None]], None]


def one_line(outcome: Outcome) -> str:
    """The one sentence of a mistake."""
    assert outcome.code == 2
    assert outcome.out == ""
    (line,) = outcome.err.splitlines()
    assert line.startswith("error: ")
    assert line.endswith(".")
    assert not re.search(r"[a-z]\. [A-Z]", line), "more than one sentence"
    return line


def write_status(
    run: RunDir, state: str = "running", step: int = 41, age_s: float = 0.0, message: str = "", at: float | None = None
) -> None:
    """A snapshot of ``age_s`` ago, and as rank 0 does before it, the result of a run that is over."""
    now = time.time() - age_s if at is None else at
    status = synthetic.make_status(run, state=state, step=step)
    if state in FINAL:
        run.write_json(run.result, {"state": state, "message": message, "attempt": 1, "t": now})
    times = {"updated_at": now, "started_at": now - 120.0}
    write_atomic(run.status, encode_status(msgspec.structs.replace(status, message=message, **times)))


class Queue:
    """Stands where Slurm stands: remembers submissions and answers with a job state."""

    def __init__(self) -> None:
        self.submitted: list[tuple[str, int]] = []
        self.cancelled: list[str] = []
        self.answer: JobInfo | NoAnswer = JobInfo("4711", JobState.PENDING, "Resources")

    def queue(self, launch: Launch, environment: Any) -> str:
        self.submitted.append((launch.run.name, launch.attempt))
        launch.run.write_json(
            launch.run.job, {"job_id": "4711", "executor": "slurm", "attempt": launch.attempt, "submitted_at": 1.0}
        )
        return "4711"

    def ask(self, run: Any) -> JobInfo | NoAnswer:
        return self.answer

    def cancel(self, run: Any) -> bool:
        self.cancelled.append(run.name)
        return True


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    fake = Queue()
    monkeypatch.setattr(jobs, "environment", lambda executor: None if executor == "local" else {})
    monkeypatch.setattr(checked_run, "slurm_environment", dict)
    monkeypatch.setattr(checked_run, "try_task", lambda config: nullcontext(lambda: TaskTrial([], [])))
    monkeypatch.setattr(checked_run, "partitions", lambda environment, *_: PARTITIONS)
    monkeypatch.setattr("libra_hpc.slurm.submit.partitions", lambda environment, *_: PARTITIONS)
    monkeypatch.setattr(jobs, "queue", fake.queue)
    monkeypatch.setattr(jobs.JobQueue, "ask", lambda self, run: fake.ask(run))
    monkeypatch.setattr(jobs.JobQueue, "ask_all", lambda self, runs: {str(run.path): fake.ask(run) for run in runs})
    monkeypatch.setattr(jobs, "run_folder", lambda job_id: None)
    monkeypatch.setattr(jobs, "cancel", fake.cancel)
    for verb in ("check", "submit"):
        monkeypatch.setattr(f"libra_hpc_cli.{verb}.expected_start", lambda checked: None)
    return fake


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, queue: Queue) -> Path:
    """Working folder with ``model/`` and ``run.toml``."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model")
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run one command line, without lines that only a slow machine prints."""
    monkeypatch.setattr(output, "SILENT_S", 3600.0)

    def call(*arguments: str) -> Outcome:
        capsys.readouterr()
        code = app.run(arguments)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call


@pytest.fixture
def submitted(site: Path, queue: Queue, cli: Cli) -> RunDir:
    """A queued run."""
    cli("submit", "run.toml")
    return RunDir(site / "runs" / "quick-001")


@pytest.fixture
def sleep(monkeypatch: pytest.MonkeyPatch) -> Sleep:
    """What happens while a follower sleeps."""

    def replace(happens: Callable[[float], None]) -> None:
        monkeypatch.setattr(follow, "time", SimpleNamespace(sleep=happens, time=time.time, monotonic=time.monotonic))

    return replace
