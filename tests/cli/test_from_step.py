"""`submit --resume RUN --from-step N`: where an attempt begins, recorded with its job."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from libra_hpc.facts.rundir import RunDir
from libra_hpc.slurm.queue.query import JobInfo, JobState

from .conftest import Outcome, Queue

Cli = Callable[..., Outcome]


@pytest.fixture
def run(site: Path, queue: Queue, cli: Cli) -> RunDir:
    """A run of 100 steps that failed after its checkpoint of step 40."""
    cli("submit", "run.toml")
    queue.answer = JobInfo("4711", JobState.FAILED)
    run = RunDir(site / "runs" / "quick-001")
    for step in (20, 40):
        run.checkpoint(step).mkdir(parents=True)
        (run.checkpoint(step) / "state.json").write_text("{}")
    return run


@pytest.mark.parametrize("step", ["0", "20"])
def test_the_step_is_an_argument_of_the_agents_and_no_key_of_the_run(run: RunDir, cli: Cli, step: str) -> None:
    assert (
        f"--attempt 2 --from-step {step}"
        in cli("submit", "--resume", "quick-001", "--from-step", step, "--dry-run").out
    )
    assert "--from-step" not in cli("submit", "--resume", "quick-001", "--dry-run").out
    before = json.loads(run.config.read_text())
    assert cli("submit", "--resume", "quick-001", "--from-step", step).code == 0
    assert json.loads(run.config.read_text()) == before


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--resume", "quick-001", "--from-step", "30"],
            "--from-step = 30: quick-001 has no checkpoint of that step; valid: 0, 20, 40.",
        ),
        (
            ["--resume", "quick-001", "--from-step", "40", "-o", "run.steps=40"],
            "run.steps = 40 leaves nothing to train",
        ),
        (
            ["run.toml", "--from-step", "0"],
            "--from-step = 0: a new run starts at step 0; valid: only with --resume RUN.",
        ),
    ],
)
def test_a_step_that_is_not_there_is_refused(
    run: RunDir, cli: Cli, queue: Queue, arguments: list[str], sentence: str
) -> None:
    queue.submitted.clear()
    outcome = cli("submit", *arguments)
    assert outcome.code == 2
    assert sentence in outcome.err
    assert queue.submitted == []
