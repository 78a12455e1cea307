"""Whether the job of a stopped run is queued again, and what its result then says."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from libra_hpc.facts.rundir import RunDir, read_lines
from libra_hpc.slurm.outcome import RanksEnded, Requeues, decide, main, read_requeues

ENDED = RanksEnded(signalled=True, met=True, again=None, has_result=True, tries=1, recoveries=0, restarts=3)


def word(**requeues: Any) -> str:
    values: dict[str, Any] = {"stopped": "time_limit", "allowed": 5, "used": 1, "step": 40, **requeues}
    return decide(ENDED._replace(requeues=Requeues(**values))).word


def test_a_run_at_its_time_limit_is_queued_again_as_often_as_allowed() -> None:
    assert word() == "requeue"
    assert word(used=5) == "stop"
    assert word(allowed=0) == "stop"
    assert word(stopped="") == "stop", "cancelled, failed or completed"


def test_a_preempted_run_is_queued_again_without_an_allowance() -> None:
    assert word(stopped="preempted", allowed=0) == "requeue"


def test_starts_that_save_no_further_step_end_the_chain() -> None:
    assert word(before=(20, 40)) == "requeue"
    assert word(before=(20, 40, 40)) == "fail"
    assert word(before=(40, 40), step=41) == "requeue"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path)
    made.logs(1).mkdir(parents=True)
    made.checkpoint(40).mkdir(parents=True)
    (made.checkpoint(40) / "state.json").write_text("{}")
    return made


def stopped(run: RunDir, state: str, signal: str = "", preempted: bool = False) -> str:
    if state:
        run.write_json(run.result, {"state": state, "message": "step 40 is saved", "step": 40})
    return read_requeues(run, 1, signal=signal, preempted=preempted, allowed=1, used=0).stopped


@pytest.mark.parametrize(
    ("state", "signal", "preempted", "found"),
    [
        ("time_limit", "", False, "time_limit"),
        ("time_limit", "USR1", False, "time_limit"),
        ("time_limit", "TERM", False, ""),
        ("", "USR1", False, "time_limit"),
        ("", "TERM", False, ""),
        ("", "", False, ""),
        ("cancelled", "TERM", False, ""),
        ("cancelled", "TERM", True, "preempted"),
        ("time_limit", "USR1", True, "preempted"),
        ("completed", "USR1", True, ""),
        ("failed", "TERM", True, ""),
    ],
)
def test_what_stopped_the_run(run: RunDir, state: str, signal: str, preempted: bool, found: str) -> None:
    assert stopped(run, state, signal, preempted) == found


def test_a_run_that_somebody_asked_to_stop_is_never_queued_again(run: RunDir) -> None:
    run.stop.write_text("{}")
    assert stopped(run, "time_limit") == stopped(run, "cancelled", "TERM", preempted=True) == ""


def command(run: RunDir, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["outcome", str(run.path), "1", *arguments])
    return main()


def test_requeues_are_logged_and_the_third_without_progress_fails_the_run(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(3):
        stopped(run, "time_limit")
        command(run, monkeypatch, "--requeues", "9", "--requeued", str(number))
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == [f"requeue time limit at step 40; requeue {number} of 9" for number in (1, 2)]
    assert said[2].startswith("fail the last 2 starts saved no step after step 40: slurm.time_limit is too short")
    assert [event["step"] for event in read_lines(run.events) if event["kind"] == "job_requeued"] == [40, 40]
    assert command(run, monkeypatch, "--requeues", "9", "--requeued", "2", "--final") == 1
    assert run.read_json(run.result)["state"] == "failed"
    assert capsys.readouterr().out.startswith("the run failed: the last 2 starts saved no step")


def test_a_refused_requeue_and_used_up_requeues_are_in_the_result(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped(run, "time_limit")
    refused = "Requested operation is presently disabled\nfor job 7"
    assert command(run, monkeypatch, "--requeues", "9", "--final", f"--refused={refused}") == 1
    why = "Requested operation is presently disabled for job 7"
    result = run.read_json(run.result)
    assert (result["state"], result["message"]) == ("time_limit", f"step 40 is saved; not queued again: {why}")
    stopped(run, "time_limit")
    command(run, monkeypatch, "--requeues", "2", "--requeued", "2", "--final")
    assert capsys.readouterr().out.splitlines()[-1] == (
        "the run was stopped by the time limit: step 40 is saved; not queued again: time limit at step 40, and all 2 of"
        " slurm.requeues are used"
    )
