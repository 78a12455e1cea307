"""What the owner writes while no rank 0 lives."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from libra_hpc.facts import fact_writer
from libra_hpc.facts.rundir import RunDir, read_lines
from libra_hpc.facts.status import encode_status, read_status
from libra_hpc.owner import owner_records as module
from libra_hpc.owner.owner_records import OwnerRecords, met_before
from libra_hpc.protocol.ranks_stop import RanksStop
from tests.facts import synthetic


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path)
    made.logs(1).mkdir(parents=True)
    made.write_json(made.config, {"run": {"steps": 40}})
    return made


def test_a_status_without_a_rank_0_is_whole_and_otherwise_that_of_rank_0(run: RunDir) -> None:
    records = OwnerRecords(run, 1)
    records.status("restarting", "start 1: the agents did not meet; all ranks restart")
    found = read_status(run, 1)
    assert found is not None
    assert (found.state, found.steps, found.nodes) == ("restarting", 40, [])
    run.status.write_bytes(encode_status(synthetic.make_status(run, state="running")))
    before = read_status(run, 1)
    records.status("restarting", "the planner's agent (rank 0) was lost")
    found = read_status(run, 1)
    assert before is not None
    assert found is not None
    assert (found.state, found.message) == ("restarting", "the planner's agent (rank 0) was lost")
    assert (found.step, len(found.nodes)) == (before.step, len(before.nodes))


def test_what_rank_0_left_is_read_and_an_earlier_start_leaves_nothing(run: RunDir) -> None:
    run.ended(1).write_text('{"why": "lost", "sentence": "node 1 was lost", "step": 7}')
    records = OwnerRecords(run, 1)
    records.clear()
    assert records.end() is None
    records.event("cannot_now", reason="")
    assert not met_before(run)
    records.event("agent_joined", rank=0)
    assert met_before(run)
    run.ended(1).write_text('{"why": "lost", "sentence": "node 1 was lost", "step": 7}')
    assert records.end() == RanksStop("lost", "node 1 was lost", 7)
    run.ended(1).write_text('{"why": "lo')
    assert records.end() is None


def test_result_and_status_are_written_on_a_full_disk(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run.status.write_bytes(encode_status(synthetic.make_status(run, state="running")))
    records = OwnerRecords(run, 1)

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fact_writer, "write_atomic", full)
    monkeypatch.setattr(module.LineLog, "append", full)
    records.status("restarting", "the planner's agent (rank 0) was lost")
    full_disk = f"the planner's agent (rank 0) was lost; {run.status} cannot be written: No space left on device"
    assert run.read_json(run.status)["message"] == full_disk
    records.result("failed", "the planner's agent (rank 0) was lost", 7)
    assert run.read_json(run.result)["state"] == "failed"
    found = read_status(run, 1)
    assert found is not None
    assert (found.state, found.message) == ("failed", "the planner's agent (rank 0) was lost")
    assert "events.jsonl cannot be written" in capfd.readouterr().out
    records.close()
    assert not [path for path in run.path.rglob(".*") if "reserve" in path.name]


def test_a_requeue_is_logged_with_the_step_that_is_saved(run: RunDir) -> None:
    records = OwnerRecords(run, 1)
    assert records.idle() == ()
    for _ in range(2):
        records.requeue("time limit at step 40; requeue 1 of 9", 40)
    assert records.idle() == (40, 40)
    assert [event["step"] for event in read_lines(run.events) if event["kind"] == "job_requeued"] == [40, 40]


def test_nothing_goes_on_with_a_run_that_somebody_wants_to_end(run: RunDir) -> None:
    run.checkpoint(40).mkdir(parents=True)
    (run.checkpoint(40) / "state.json").write_text("{}")
    assert OwnerRecords(run, 1).position() == (False, 40)
    run.stop.write_text("{}")
    assert OwnerRecords(run, 1).position() == (True, 40)
