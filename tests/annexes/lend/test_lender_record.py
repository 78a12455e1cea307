"""Records of lenders: torn ones, lenders that are gone, and clocks that differ."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import pytest

from libra_hpc.annexes.lend import lender_record as records
from libra_hpc.annexes.lend.guest_process import GuestProcess, takes, wanting
from libra_hpc.annexes.lend.lender_record import LenderRecord, LendTerms
from libra_hpc.facts.rundir import RunDir
from libra_hpc.gate.gated_steps import Behind, GateConfig, GivenTokens, GuestReport, read_report
from libra_hpc.process.code_stamp import code_stamp
from libra_hpc.protocol.joining import FIRST_GUEST, DoorRecord

DOOR = DoorRecord(1, "h", ("127.0.0.1",), 1, "00" * 32, code_stamp(), "", FIRST_GUEST)


def record(name: str, **changes: object) -> LenderRecord:
    boot, pid, ticks = records.own_identity()
    made = LenderRecord(name, "node7", boot, pid, ticks, "4711", LendTerms(0.5))
    return msgspec.structs.replace(made, **changes)


def gone(place: Path) -> dict[str, bool]:
    return {name: is_gone for name, (_, is_gone) in records.all_records(place).items()}


def test_a_record_is_private_and_comes_back_as_it_was(tmp_path: Path) -> None:
    records.write_record(tmp_path, record("a", tokens=7))
    assert records.record_file(tmp_path, "a").stat().st_mode & 0o777 == 0o600
    assert records.all_records(tmp_path) == {"a": (record("a", tokens=7), False)}
    records.revoked_file(tmp_path, "a").touch()
    records.remove_record(tmp_path, "a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("data", [b"", b"{", b'{"name": "a"}', b"\xff\xfe"])
def test_a_torn_record_is_named_and_hides_no_other(data: bytes, tmp_path: Path) -> None:
    records.write_record(tmp_path, record("a"))
    records.record_file(tmp_path, "b").write_bytes(data)
    assert records.all_records(tmp_path) == {"a": (record("a"), False), "b": (None, False)}


def test_a_lender_whose_process_has_ended_is_gone_at_once_and_one_elsewhere_after_three_renewals(
    tmp_path: Path,
) -> None:
    records.write_record(tmp_path, record("ended", ticks=1))
    records.write_record(tmp_path, record("elsewhere", boot="another"))
    assert gone(tmp_path) == {"ended": True, "elsewhere": False}
    past = time.time() - records.GONE_S - 1.0
    os.utime(records.record_file(tmp_path, "elsewhere"), (past, past))
    assert gone(tmp_path)["elsewhere"]
    records.log_file(tmp_path, "ended").touch()
    records.log_file(tmp_path, "elsewhere").touch()
    records.remove_ended(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere.json", "elsewhere.out"]


def test_a_lender_whose_clock_is_an_hour_off_is_not_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, skew in (("late", -3600.0), ("early", 3600.0)):
        records.write_record(tmp_path, record(name, boot="another", since=time.time() + skew))
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 7200.0)
    assert gone(tmp_path) == {"early": False, "late": False}


def test_tokens_of_an_engine_that_was_restarted_count_from_0(tmp_path: Path) -> None:
    file = tmp_path / "report"
    given = GivenTokens(Behind(GateConfig(page="", ttft_s=1.0), str(file)))
    for tokens in ({"a": 100}, {"a": 150, "b": 10}, {"a": 20, "b": 10}):
        given.beat(tokens)
    assert read_report(file) == GuestReport(beats=3, tokens=180)
    file.write_bytes(b"{")
    assert read_report(file) is None


def test_only_runs_that_are_open_and_want_lenders_are_served(tmp_path: Path) -> None:
    wanted = {"b": ["x", "l*"], "a": "any", "no": [], "other": ["m"], "over": "any"}
    for name, borrows in wanted.items():
        run = RunDir(tmp_path / name)
        run.path.mkdir()
        run.write_json(run.config, {"borrow": {"lenders": borrows}})
        run.door.write_bytes(msgspec.json.encode(msgspec.structs.replace(DOOR, open=name != "over")))
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "door.json").write_bytes(b"{")
    (tmp_path / "file").touch()
    assert [run.name for run in wanting(tmp_path, "l")] == ["a", "b"]
    assert wanting(tmp_path / "absent", "l") == []
    assert takes(RunDir(tmp_path / "a"), "l") is None, "its status cannot be read"


def test_neither_a_linked_run_nor_one_that_others_may_have_put_there_is_served(tmp_path: Path) -> None:
    """Below a shared folder of runs."""
    elsewhere, shared = tmp_path / "elsewhere", tmp_path / "shared"
    for path in (elsewhere / "link", shared / "open", shared / "file", shared / "mine"):
        path.mkdir(parents=True)
        run = RunDir(path)
        run.write_json(run.config, {"borrow": {"lenders": "any"}})
        run.door.write_bytes(msgspec.json.encode(DOOR))
    (shared / "link").symlink_to(elsewhere / "link")
    (shared / "open").chmod(0o777)
    (shared / "file" / "door.json").rename(elsewhere / "door.json")
    (shared / "file" / "door.json").symlink_to(elsewhere / "door.json")
    assert [run.name for run in wanting(shared, "l")] == ["mine"]


def test_what_a_guest_prints_follows_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(records.VARIABLE, str(tmp_path))
    (tmp_path / "precious").write_text("kept")
    records.log_file(tmp_path, "l").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"):
        GuestProcess(RunDir(tmp_path / "run"), "l", LendTerms(0.5), str(tmp_path / "page"))
    assert (tmp_path / "precious").read_text() == "kept"
