"""Single functions as jobs, on Slurm and without it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import pytest

from libra_hpc.errors import OperationError, UserError
from libra_hpc.slurm.queue.query import JobState
from libra_hpc.slurm.single import run_single

from . import jobs

Executor = Literal["slurm", "local"]
pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parents[2]


@pytest.fixture(params=["slurm", "local"])
def executor(request: pytest.FixtureRequest) -> Executor:
    found: Executor = request.param
    return found


@pytest.fixture
def env(slurm_env: dict[str, str]) -> dict[str, str]:
    return {**slurm_env, "PYTHONPATH": str(ROOT)}


def test_a_result_comes_back(executor: Executor, env: dict[str, str], tmp_path: Path) -> None:
    before = dict(os.environ)
    options = ["--partition=cpu", "--mem=500M"] * (executor == "slurm")
    folder = tmp_path / "jobs"
    handle = run_single(jobs.add, 2, 3, env=env, name="add", folder=folder, executor=executor, options=options)
    total, node = handle.result(timeout=120)
    assert total == 5
    assert node.startswith("cpu-") == (executor == "slurm")
    assert "adding" in handle.stdout()
    assert handle.done()
    assert dict(os.environ) == before


def test_a_failure_carries_its_traceback(executor: Executor, env: dict[str, str], tmp_path: Path) -> None:
    handle = run_single(jobs.fail, env=env, name="fail", folder=tmp_path / "jobs", executor=executor)
    with pytest.raises(
        OperationError, match=r"(?s)^fail \(job \d+\) failed:.*in fail.*ValueError: the function's own words"
    ):
        handle.result(timeout=120)


def test_a_job_that_dies_is_not_waited_for(
    executor: Executor, env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("libra_hpc.slurm.single.RESULT_WAIT_S", 1)
    handle = run_single(jobs.die, env=env, name="die", folder=tmp_path / "jobs", executor=executor)
    with pytest.raises(OperationError, match="ended without a result"):
        handle.result(timeout=120)
    assert handle.state() is JobState.FAILED


def test_mistakes(env: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Slurm refuses the job 'add': .*[Ii]nvalid partition"):
        run_single(jobs.add, 1, 2, env=env, name="add", folder=tmp_path, options=["--partition=nope"])
    with pytest.raises(UserError, match=r"time_limit = 'soon'"):
        run_single(jobs.add, 1, 2, env=env, name="add", folder=tmp_path, time_limit="soon")
