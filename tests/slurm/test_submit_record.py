"""A job that cannot be written down is not left behind: nobody could find or cancel it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from libra_hpc.config.load import validate
from libra_hpc.errors import OperationError
from libra_hpc.facts.rundir import RunDir
from libra_hpc.slurm import local, submit
from libra_hpc.slurm.launch import Launch, job_request
from libra_hpc.slurm.queue.query import JobInfo, JobState


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    config = validate({"run": {"dir": str(tmp_path), "engine": "simulated"}})
    return Launch(job_request(config), RunDir.create(tmp_path, "t"), 1, arguments=["-c", "import time; time.sleep(60)"])


def full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_queued_job_is_cancelled(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(submit, "write_job", full)
    monkeypatch.setattr(submit, "cluster_name", lambda env: "test")
    monkeypatch.setattr(submit, "job", lambda env, job_id, cluster: JobInfo(job_id, JobState.PENDING))
    monkeypatch.setattr(submit, "call", lambda argv, *_, **__: asked.append(argv) or "4711")
    with pytest.raises(OSError, match="No space left"):
        submit.submit(launch, {})
    assert [argv[0] for argv in asked] == ["sbatch", "scancel"]
    assert asked[1] == ["scancel", "4711"]


def submitted(launch: Launch, folder: Path, monkeypatch: pytest.MonkeyPatch, sbatch: str, squeue: str) -> str:
    monkeypatch.setattr(submit, "cluster_name", lambda env: "test")
    monkeypatch.setattr(submit, "SUBMIT_TIMEOUT_S", 1.0)
    for name, body in (("sbatch", sbatch), ("squeue", squeue.format(script=launch.run.script))):
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    return submit.submit(launch, {"PATH": f"{folder}:/usr/bin:/bin"})


@pytest.mark.parametrize(
    ("sbatch", "squeue", "job_id"),
    [
        ("echo '-- Welcome to the cluster --'; echo ' 12 jobs wait'; echo '4711;east'; echo bye", "exit 1", "4711"),
        ("echo '--> Verifying valid submit host ...OK'", "echo '11|PENDING|None|N/A|N/A|t||{script}'", "11"),
        ("echo 'Socket timed out on send/recv operation' >&2; exit 1", "echo '9|RUNNING|a|b|c|t||{script}'", "9"),
        (
            "sleep 5",
            "echo '8|FAILED|a|b|c|t||{script}'; echo '9+0|PENDING|a|b|c|t||{script}'; echo '10|RUNNING|a|b|c|t||/x'",
            "9",
        ),
    ],
    ids=["greeting", "greeting alone", "refused, queued", "late, queued"],
)
def test_the_queue_says_what_sbatch_did_not(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sbatch: str, squeue: str, job_id: str
) -> None:
    assert submitted(launch, tmp_path, monkeypatch, sbatch, squeue) == job_id


@pytest.mark.parametrize(
    ("sbatch", "squeue", "words", "open_"),
    [
        ("echo hello", "true", "instead of a job id", False),
        ("sleep 5", "true", "Slurm does not answer sbatch", False),
        ("sleep 5", "exit 1", "its job may be queued", True),
    ],
)
def test_a_job_that_nobody_knows_of_keeps_its_folder(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sbatch: str, squeue: str, words: str, open_: bool
) -> None:
    with pytest.raises(OperationError, match=words) as raised:
        submitted(launch, tmp_path, monkeypatch, sbatch, squeue)
    assert isinstance(raised.value, submit.MaybeQueued) == open_


def test_a_local_run_is_ended(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def refuse(run: RunDir, record: Any) -> None:
        started.append(record.pid)
        full()

    monkeypatch.setattr(local, "write_job", refuse)
    with pytest.raises(OSError, match="No space left"):
        local.start(launch)
    until = time.monotonic() + 60
    while any(group_of(int(path.name)) == started[0] for path in Path("/proc").glob("[0-9]*")):
        assert time.monotonic() < until
        time.sleep(0.02)


def group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return -1
