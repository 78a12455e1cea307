"""A run directory that version 0.1 recorded in November 2026: a finished dry run, less weights and most logs.

Later code reads it as it is. What a format loses is mended in the reader, never in these files.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from libra_hpc.config.run import RunConfig
from libra_hpc.facts.rundir import RunDir
from libra_hpc.state.attempt import newest_point

from .conftest import Cli, Queue

RECORDED = Path(__file__).parents[1] / "facts" / "run_of_0_1" / "old-001"


@pytest.fixture
def old(site: Path) -> RunDir:
    """A copy of the run in the site's folder of runs."""
    run = RunDir(site / "runs" / RECORDED.name)
    shutil.copytree(RECORDED, run.path)
    for path in (run.config, run.status):
        path.write_text(path.read_text().replace("/old/runs", str(site / "runs")))
    return run


def test_it_is_shown_as_any_run(old: RunDir, queue: Queue, cli: Cli) -> None:
    shown = {verb: cli(verb, old.name) for verb in ("status", "report")}
    assert [outcome.code for outcome in shown.values()] == [0] * 2
    assert "146,610 trained, 34,989 of them generated" in shown["status"].out
    assert "completed" in old.report.read_text()
    assert "completed" in cli("list").out


def test_it_goes_on_from_its_last_checkpoint(old: RunDir, queue: Queue, cli: Cli) -> None:
    outcome = cli("submit", "--resume", old.name, "-o", "run.steps=9", "--dry-run")
    assert outcome.code == 0, outcome.err
    start, events = newest_point(old, RunConfig(), 2, core=(1,), parts=((), ()))
    assert (start.step, start.low, start.extra, events) == (5, 20, (), [])
