"""`libra-hpc report`: where the page goes, how the run stands, and mistakes in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from libra_hpc.facts.status import encode_status
from libra_hpc.files import write_atomic
from libra_hpc.slurm.queue.query import JobInfo, JobState
from tests.facts import synthetic

from .conftest import Cli, Outcome, Queue, one_line


def test_the_page_is_written_where_it_should_and_its_path_printed(site: Path, queue: Queue, cli: Cli) -> None:
    run = synthetic.make_run(site / "runs")
    assert cli("report", "quick-001", "--out", "page.html").out == f"{site / 'page.html'}\n"
    assert not run.report.exists()
    assert cli("report", "quick-001") == Outcome(0, f"{run.report}\n", "")
    assert "completed" in run.report.read_text()
    assert run.report.stat().st_mode & 0o777 == 0o600, "only its owner reads it"
    refused = one_line(cli("report", "quick-001", "--out", "absent/page.html"))
    assert "--out = 'absent/page.html': the page cannot be written (No such file or directory); valid:" in refused


NO_END = "No end of this run is recorded."


@pytest.mark.parametrize(
    ("last", "job", "shown", "hidden"),
    [
        ("running", JobState.RUNNING, [NO_END], []),
        ("running", JobState.NODE_FAIL, ["a node failed"], [NO_END]),
        ("running", JobState.UNKNOWN, [NO_END, "Slurm has no record of it"], []),
        ("cancelled", JobState.CANCELLED, ['<p class="state cancelled">cancelled</p>'], [NO_END]),
        ("cancelled", JobState.PENDING, ['<p class="state requeued">requeued</p>'], []),
    ],
)
def test_a_run_without_a_recorded_end_is_reported_as_its_job_stands(
    last: str, job: JobState, shown: list[str], hidden: list[str], site: Path, queue: Queue, cli: Cli
) -> None:
    run = synthetic.make_run(site / "runs")
    run.result.unlink()
    write_atomic(run.status, encode_status(synthetic.make_status(run, state=last)))
    queue.answer = JobInfo("4711", job)
    cli("report", "quick-001")
    text = run.report.read_text()
    assert [words in text for words in (*shown, *hidden)] == [True] * len(shown) + [False] * len(hidden)
