"""Lines that are written later: order, batching, what a kill or a full disk leaves, and that nobody waits."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_hpc.facts import journal as module
from libra_hpc.facts.journal import Journal, LineLog
from libra_hpc.facts.rundir import read_lines


async def test_nothing_is_rendered_or_written_before_the_flush_and_then_all_in_order(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    threads: set[int] = set()

    def render(record: int) -> dict[str, Any]:
        threads.add(threading.get_ident())
        return {"n": record}

    journal: Journal[int] = Journal(path, render)
    for n in range(5):
        journal.add(n)
    assert not threads
    assert not path.exists()
    await asyncio.gather(journal.flush(), journal.flush())
    assert numbers(path) == [0, 1, 2, 3, 4]
    assert threading.get_ident() not in threads
    journal.add(5)
    await journal.close()
    assert numbers(path) == [0, 1, 2, 3, 4, 5]


async def test_a_torn_last_line_of_an_earlier_attempt_costs_that_line_only(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n": 2')
    journal: Journal[int] = Journal(path, lambda n: {"n": n})
    journal.add(3)
    await journal.close()
    assert numbers(path) == [1, 3]


async def test_a_file_that_is_too_long_is_moved_aside_and_the_one_before_is_dropped(tmp_path: Path) -> None:
    path, old = tmp_path / "a.jsonl", tmp_path / "a.jsonl.old"
    journal: Journal[int] = Journal(path, lambda n: {"n": n}, most=20)
    cut = []
    for n in range(9):
        journal.add(n)
        await journal.flush()
        cut.append(journal.cut)
    await journal.close()
    assert (numbers(old), numbers(path)) == ([3, 4, 5], [6, 7, 8])
    assert cut == [False] * 6 + [True] * 3
    # A later start goes on with both files.
    journal = Journal(path, lambda n: {"n": n}, most=20)
    journal.add(9)
    await journal.close()
    assert (numbers(old), numbers(path)) == ([6, 7, 8], [9])
    assert journal.cut


async def test_a_file_that_cannot_be_moved_aside_is_a_fault_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": 1}\n')
    journal: Journal[int] = Journal(path, lambda n: {"n": n}, most=0)
    (tmp_path / "a.jsonl.old").mkdir()
    journal.add(2)
    await journal.flush()
    assert (journal.fault, journal.dropped, numbers(path)) == ("Is a directory", 1, [1])
    (tmp_path / "a.jsonl.old").rmdir()
    journal.add(3)
    await journal.close()
    assert (journal.fault, numbers(path)) == ("", [3])


def numbers(path: Path) -> list[int]:
    return [line["n"] for line in read_lines(path)]


class Disk:
    """A file on a disk with ``room`` bytes left; it may refuse to shorten files too."""

    def __init__(self, log: LineLog, room: int, number: int = errno.ENOSPC) -> None:
        self.file, self.room, self.number = log._handle, room, number
        log._handle = self  # type: ignore[assignment]

    def fileno(self) -> int:
        return self.file.fileno()

    def write(self, data: bytes) -> int:
        part = data[: self.room]
        if not part:
            raise OSError(self.number, os.strerror(self.number))
        self.room -= len(part)
        return self.file.write(part) or 0


@given(rooms=st.lists(st.integers(0, 40), max_size=12), shortens=st.booleans())
def test_a_failed_append_leaves_whole_lines_and_the_next_one_begins_a_line(
    tmp_path_factory: pytest.TempPathFactory, rooms: list[int], shortens: bool
) -> None:
    path = tmp_path_factory.mktemp("disk") / "a.jsonl"
    log = LineLog(path)
    disk = Disk(log, 0)
    written = []
    with pytest.MonkeyPatch.context() as patch:
        if not shortens:
            patch.setattr(os, "ftruncate", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "no")))
        for n, room in enumerate([*rooms, 1000]):
            disk.room = room
            try:
                log.write({"n": n})
                written.append(n)
            except OSError:
                assert not shortens or path.read_bytes().endswith(b"\n") or not path.stat().st_size
        found = numbers(path)
        # Where a file cannot be shortened, a line whose end alone was missing is whole in the end.
        assert found == written if shortens else [n for n in found if n in written] == written
        assert b"\n\n" not in path.read_bytes()


async def test_lines_wait_for_room_and_beyond_the_bound_the_oldest_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LINES", 3)
    path = tmp_path / "a.jsonl"
    journal: Journal[int] = Journal(path, lambda n: {"n": n}, keep=5)
    journal.add(0)
    await journal.flush()
    assert journal._log is not None
    disk = Disk(journal._log, 0)
    for n in range(1, 9):
        journal.add(n)
        await journal.flush()
        assert journal.fault == "No space left on device"
    assert journal.dropped == 3
    disk.room = 30
    await journal.flush()
    assert (journal.fault, numbers(path)) == ("No space left on device", [0, 4, 5, 6]), "a part fitted"
    disk.room = 1000
    await journal.flush()
    assert (journal.fault, numbers(path)) == ("", [0, 4, 5, 6, 7, 8])
    journal.add(9)
    journal.drop()
    await journal.flush()
    assert journal.dropped == 4


async def test_a_file_that_cannot_be_opened_is_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "absent" / "a.jsonl"
    journal: Journal[int] = Journal(path, lambda n: {"n": n}, keep=5)
    journal.add(1)
    await journal.flush()
    assert journal.fault == "No such file or directory"
    path.parent.mkdir()
    await journal.flush()
    assert (journal.fault, numbers(path)) == ("", [1])


def test_a_log_that_was_removed_is_made_again_and_one_whose_folder_is_gone_fails(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    log = LineLog(folder / "events.jsonl")
    log.write({"step": 1})
    (folder / "events.jsonl").unlink()
    log.write({"step": 2})
    assert [line["step"] for line in read_lines(folder / "events.jsonl")] == [2]
    (folder / "events.jsonl").unlink()
    folder.rmdir()
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            log.write({"step": 3})
    assert not folder.exists()
    folder.mkdir()
    log.write({"step": 4})
    assert [line["step"] for line in read_lines(folder / "events.jsonl")] == [4]
