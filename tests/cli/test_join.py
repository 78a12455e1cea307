"""`libra-hpc join` where nobody can join: one sentence, exit code 2."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from libra_hpc.agent.guest import GuestSettings, Stay
from libra_hpc.facts.rundir import RunDir
from libra_hpc.process.code_stamp import code_stamp
from libra_hpc.protocol.joining import FIRST_GUEST, DoorRecord
from libra_hpc.slurm.queue.query import JobInfo, JobState

from .conftest import Cli, Queue, one_line, write_status

RECORD = DoorRecord(1, "h", ("127.0.0.1",), 1, "00" * 32, code_stamp(), "0" * 16, FIRST_GUEST)


def put(run: RunDir, **changes: object) -> None:
    run.door.write_bytes(msgspec.json.encode(msgspec.structs.replace(RECORD, **changes)))


def test_a_run_that_has_ended_cannot_be_joined(submitted: RunDir, queue: Queue, cli: Cli) -> None:
    put(submitted, open=False)
    write_status(submitted, "completed")
    queue.answer = JobInfo("4711", JobState.COMPLETED)
    assert "RUN = 'quick-001': it has ended: completed; valid: a run that is queued or running." in one_line(
        cli("join", "quick-001")
    )


def test_other_code_and_another_model_are_refused_before_anybody_is_asked(submitted: RunDir, cli: Cli) -> None:
    put(submitted, code="0.0.9+abc")
    assert "it runs with libra-hpc 0.0.9+abc, and this is " in one_line(cli("join", "quick-001"))
    put(submitted)
    assert "here it is another model than that of quick-001" in one_line(cli("join", "quick-001"))
    submitted.door.write_bytes(b"{")
    assert "door.json is no record of a run" in one_line(cli("join", "quick-001"))


def test_a_guest_in_another_cluster_does_not_wait_for_ranks_that_do_not_answer(cli: Cli, tmp_path: Path) -> None:
    put(RunDir(tmp_path))
    outcome = cli("join", str(tmp_path))
    assert outcome.code == 1
    assert f"{tmp_path.name} cannot be joined: its ranks do not answer." in outcome.err


def test_a_run_that_ends_while_a_guest_waits_for_its_ranks_ends_the_wait(
    submitted: RunDir, queue: Queue, cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("libra_hpc_cli.join.ASK_S", 0.0)
    monkeypatch.setattr("libra_hpc_cli.join.POLL_S", 0.0)
    answers = iter([JobInfo("4711", JobState.PENDING, "Resources"), JobInfo("4711", JobState.CANCELLED)])
    monkeypatch.setattr(queue, "ask", lambda run: next(answers))
    outcome = cli("join", "quick-001")
    assert outcome.code == 2
    assert "waiting for its ranks" in outcome.err
    assert "it has ended: cancelled" in outcome.err


def test_a_budget_for_weights_reaches_the_guest(submitted: RunDir, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    put(submitted)
    settings: list[GuestSettings] = []

    async def serve(run: object, record: object, config: object, given: GuestSettings) -> Stay:
        settings.append(given)
        return Stay("over", "the run ended")

    monkeypatch.setattr("libra_hpc_cli.join.check_record", lambda run, record, config: None)
    monkeypatch.setattr("libra_hpc_cli.join.serve", serve)
    for options in (["--weights-mb-s=50"], []):
        assert cli("join", "quick-001", *options).code == 0
    assert [given.pull_mb_s for given in settings] == [50.0, 0.0]
    assert "--weights-mb-s" in one_line(cli("join", "quick-001", "--weights-mb-s=-1"))
