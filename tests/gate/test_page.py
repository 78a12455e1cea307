"""The page between a server and the guest on its device: what is written is read, and nothing torn."""

from __future__ import annotations

import multiprocessing
import os
import struct
import subprocess
import time
from pathlib import Path

import pytest

from libra_hpc.errors import UserError
from libra_hpc.gate.page import FORMAT, HEAD, MAGIC, PAGE_BYTES, SLOT_BYTES, Page
from libra_hpc.policies.serving.serving_view import ServingView
from tests.gate.page_writer import PageWriter


@pytest.fixture
def path(tmp_path: Path) -> Path:
    Page.create(tmp_path / "page")
    return tmp_path / "page"


def view(**fields: float) -> ServingView:
    return ServingView(**{"written": time.monotonic(), **fields})  # type: ignore[arg-type]


def test_a_new_page_is_open_and_has_no_server(path: Path) -> None:
    assert path.stat().st_size == PAGE_BYTES
    assert path.stat().st_mode & 0o777 == 0o600
    assert Page(path).read() == ServingView()


def test_the_layout_is_that_of_the_middleware(path: Path) -> None:
    PageWriter(path, 2, pid=os.getpid()).write(ServingView(False, 5.0, 3, 0.5, 0.75))
    raw = path.read_bytes()
    assert raw[:24] == struct.pack("<8sIIQ", b"LIBRASRV", 4, 0, 0)
    slot = (os.getpid(), 2, 5_000_000_000, 3, 500_000, 750_000)
    assert struct.unpack_from("<IIQIII", raw, 2 * SLOT_BYTES) == slot


def test_processes_add_up_and_the_oldest_sign_of_life_counts(path: Path) -> None:
    now = time.monotonic()
    PageWriter(path, 1).write(view(written=now - 1.0, served=1, alone_s=0.25, beside_s=0.5))
    PageWriter(path, 63).write(view(written=now, served=2, alone_s=0.75))
    assert Page(path).read() == pytest.approx(ServingView(False, now - 1.0, 3, 0.25, 0.5), abs=1e-6)


def test_the_owner_closes_and_opens(path: Path) -> None:
    guest, lender = Page(path), Page(path)
    for closed in (True, False):
        lender.set_closed(closed)
        guest.stepped()
        assert guest.read().closed is closed


def test_a_freed_slot_and_that_of_an_ended_process_do_not_count(path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    PageWriter(path, 1, pid=ended.pid).write(view(written=time.monotonic() - 60.0, served=5))
    writer = PageWriter(path, 2)
    writer.write(view(served=1))
    assert Page(path).read().served == 1
    writer.free()
    assert Page(path).read() == ServingView()


def test_a_live_process_that_is_silent_counts(path: Path) -> None:
    PageWriter(path, 1).write(view(written=time.monotonic() - 60.0, served=5))
    PageWriter(path, 2).write(view())
    found = Page(path).read()
    assert found.served == 5
    assert found.written < time.monotonic() - 59.0


def test_a_writer_that_was_stopped_in_the_middle_is_silent(path: Path) -> None:
    PageWriter(path).write(view(served=5))
    with path.open("r+b") as file:
        file.seek(SLOT_BYTES + 4)
        file.write(struct.pack("<I", 3))
    assert Page(path).read().written == 0.0


def write_for_ever(path: str) -> None:
    writer, count = PageWriter(path), 0
    while True:
        count += 1
        writer.write(view(served=count % 1000, alone_s=count % 1000 / 1000))


def test_no_view_is_torn(path: Path) -> None:
    writer = multiprocessing.get_context("spawn").Process(target=write_for_ever, args=(str(path),), daemon=True)
    writer.start()
    try:
        page, seen = Page(path), set[int]()
        while len(seen) < 200:
            found = page.read()
            if found.written:
                assert found.served == round(1000 * found.alone_s)
                seen.add(found.served)
    finally:
        writer.kill()
        writer.join()


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "No such file"),
        (b"", "gate.page"),
        (b"x" * PAGE_BYTES, "another format"),
        (HEAD.pack(MAGIC, FORMAT + 1, 0, 0).ljust(PAGE_BYTES, b"\0"), "another format"),
    ],
    ids=("none", "empty", "text", "newer"),
)
def test_the_error_names_a_file_that_is_no_page(content: bytes | None, named: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "page").write_bytes(content)
    with pytest.raises(UserError, match=named):
        Page(tmp_path / "page")
