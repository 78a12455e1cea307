"""Fixtures of the command line: a site of two partitions, a queue that records submissions, a model folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from libra_hpc_cli import app, jobs

from libra_hpc.preflight import checked_run
from libra_hpc.slurm.launch import Launch
from libra_hpc.slurm.queue.query import JobInfo, JobState, Partition
from libra_hpc.slurm.queue.run_state import NoAnswer
from tests.preflight.test_checks import MODEL

PARTITIONS = [
    Partition(
        name="a800",
        default=True,
        state="up",
        nodes=4,
        idle=4,
        cpus=64,
        memory_mb=1_000_000,
        gpus={"a800": 8},
        max_seconds=86400,
    ),
    Partition(
        name="cpu", default=False, state="up", nodes=2, idle=2, cpus=64, memory_mb=256_000, gpus={}, max_seconds=None
    ),
]


class Outcome(msgspec.Struct):
    """What one command line did."""

    code: int
    out: str
    err: str


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
    monkeypatch.setattr(checked_run, "partitions", lambda environment: PARTITIONS)
    monkeypatch.setattr(jobs, "queue", fake.queue)
    monkeypatch.setattr(jobs.JobQueue, "ask", lambda self, run: fake.ask(run))
    monkeypatch.setattr(jobs.JobQueue, "ask_all", lambda self, runs: {str(run.path): fake.ask(run) for run in runs})
    monkeypatch.setattr(jobs, "run_folder", lambda job_id: None)
    monkeypatch.setattr(jobs, "cancel", fake.cancel)
    monkeypatch.setattr("libra_hpc_cli.check.expected_start", lambda checked: None)
    return fake


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, queue: Queue) -> Path:
    """Working folder with ``model/`` and ``run.toml``."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "model"
    folder.mkdir()
    for name, text in {"config.json": json.dumps(MODEL), "tokenizer.json": "{}", "model.safetensors": ""}.items():
        (folder / name).write_text(text)
    text = '[run]\nname = "quick"\n[components.hybrid]\nnodes = 1\n[model]\npath = "model"\n'
    (tmp_path / "run.toml").write_text(text)
    return tmp_path


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run one command line."""

    def call(*arguments: str) -> Outcome:
        capsys.readouterr()
        code = app.run(arguments)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call
