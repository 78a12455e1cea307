"""The lender as a process beside a server, with a guest that does as `libra-hpc join` does but rolls nothing out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from libra_hpc.annexes.lend import lender_record as records
from libra_hpc.annexes.lend.lender import Lender, LendSettings
from libra_hpc.annexes.lend.lender_record import LenderRecord, LendTerms
from libra_hpc.facts.rundir import RunDir
from libra_hpc.gate.page import Page
from libra_hpc.policies.serving.serving_view import ServingView
from libra_hpc.process.code_stamp import code_stamp
from libra_hpc.protocol.joining import FIRST_GUEST, DoorRecord
from tests.gate.page_writer import PageWriter
from tests.stage.waiting import alive

from .served import wait

GUEST = """
import json, os, signal, sys, time
run, behind = sys.argv[2], json.load(open(sys.argv[4]))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
with open(run + "/guests", "a") as file:
    print(os.getpid(), file=file)
for beat in range(1, 10000):
    asleep = open(behind["gate"]["page"], "rb").read()[12] == 1
    with open(behind["report"] + ".new", "w") as file:
        json.dump({"beats": beat, "tokens": 10 * beat, "asleep": asleep}, file)
    os.rename(behind["report"] + ".new", behind["report"])
    time.sleep(0.05)
"""
SERVER = """
import asyncio, os, subprocess, sys
from libra_hpc.annexes.lend.beside_server.libra_hpc_serving import Watch
async def app(scope, receive, send):
    pass
async def serve():
    await Watch(app)({"type": "lifespan"}, None, None)
    settings = sys.argv[1].replace('"server":0', '"server":%d' % os.getpid())
    subprocess.Popen([sys.executable, "-m", "libra_hpc.annexes.lend.lender", settings], start_new_session=True)
    await asyncio.sleep(600)
asyncio.run(serve())
"""


class Ended(NamedTuple):
    """A guest that has ended."""

    run: RunDir
    code: int
    tokens: int

    def ended(self) -> bool:
        return True


class Scene:
    def __init__(self, folder: Path) -> None:
        self.place, self.runs, package = folder / "lenders", folder / "runs", folder / "path" / "libra_hpc_cli"
        for path in (self.place, self.runs, package, folder / "private"):
            path.mkdir(parents=True)
        (package / "app.py").write_text(GUEST)
        (package / "__init__.py").touch()
        page = folder / "private" / "page"
        self.page = Page.create(page)
        settings = LendSettings("l", LendTerms(0.5), str(self.runs), str(page), 0)
        path = os.pathsep.join([str(package.parent), str(Path(__file__).parents[3])])
        environment = {"PYTHONPATH": path, records.VARIABLE: str(self.place), "LIBRA_HPC_SERVING_PAGE": str(page)}
        argv = [sys.executable, "-c", SERVER, msgspec.json.encode(settings).decode()]
        self.server = subprocess.Popen(argv, env={**os.environ, **environment})

    def run(self, name: str, *takes: str) -> RunDir:
        """One that may borrow from any lender, and borrows from these; without a name from this one."""
        run = RunDir(self.runs / name)
        run.logs(1).mkdir(parents=True)
        run.write_json(run.config, {"borrow": {"lenders": "any"}})
        run.write_json(run.status, {"takes": takes or ["l"]})
        self.open(run, True)
        return run

    def open(self, run: RunDir, is_open: bool) -> None:
        door = DoorRecord(1, "h", ("127.0.0.1",), 1, "00" * 32, code_stamp(), "", FIRST_GUEST, is_open)
        run.door.write_bytes(msgspec.json.encode(door))

    def record(self) -> LenderRecord | None:
        return records.all_records(self.place).get("l", (None, False))[0]

    def reach(self, state: str) -> LenderRecord:
        wait(lambda: (record := self.record()) is not None and record.state == state, state)
        record = self.record()
        assert record is not None
        return record


def guests(run: RunDir) -> list[int]:
    """Process ids of all that a run had."""
    path = run.path / "guests"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    try:
        yield made
    finally:
        made.server.kill()
        made.server.wait()
        wait(lambda: (record := made.record()) is None or not alive(record.pid), "the end of the lender")


def test_one_run_has_it_until_its_owner_revokes_it_and_then_the_next_has_its_turn(scene: Scene) -> None:
    assert scene.reach("free").why == "no run takes it"
    one, two = scene.run("one"), scene.run("two")
    assert scene.reach("lends").borrower == str(one.path)
    wait(lambda: guests(one), "its guest")
    assert (guests(two), scene.page.read().closed) == ([], False)
    wait(lambda: (record := scene.record()) is not None and record.tokens > 0, "its first report")
    records.revoked_file(scene.place, "l").touch()
    paused = scene.reach("paused")
    assert (paused.why, paused.borrower, paused.tokens > 0) == ("revoked", "", True)
    assert scene.page.read().closed
    first = ServingView(written=time.monotonic() + 600.0, alone_s=0.1, beside_s=0.11)
    PageWriter(scene.place.with_name("private") / "page", 2).write(first)
    wait(
        lambda: (record := scene.record()) is not None and (record.alone_ms, record.beside_ms) == (100.0, 110.0),
        "first tokens",
    )
    assert alive(guests(one)[0]), "it sleeps"
    records.revoked_file(scene.place, "l").unlink()
    wait(lambda: guests(two), "a guest of the run that had none")
    assert scene.reach("lends").borrower == str(two.path)
    assert not alive(guests(one)[0])
    assert scene.server.poll() is None


def test_a_guest_that_sleeps_is_woken_for_its_run_once_that_takes_the_lender_again(scene: Scene) -> None:
    run = scene.run("one")
    wait(lambda: (record := scene.record()) is not None and record.tokens > 0, "a guest")
    records.revoked_file(scene.place, "l").touch()
    assert scene.reach("paused").borrower == ""
    run.write_json(run.status, {"takes": []})
    records.revoked_file(scene.place, "l").unlink()
    scene.reach("free")
    assert scene.page.read().closed, "nobody takes it"
    run.write_json(run.status, {"takes": ["l"]})
    assert scene.reach("lends").borrower == str(run.path)
    wait(lambda: not scene.page.read().closed, "an open page")
    assert len(guests(run)) == 1
    assert alive(guests(run)[0])


def test_a_run_gets_an_offer_first_and_a_guest_while_it_takes_it(scene: Scene) -> None:
    run = scene.run("one", "another")
    offer = run.offers / "l.json"
    wait(offer.exists, "an offer")
    assert (offer.read_bytes(), scene.reach("free").borrower, guests(run)) == (b"[0,1]", "", [])
    run.write_json(run.status, {"takes": ["l"]})
    wait(lambda: guests(run), "its guest")
    two = scene.run("two")
    run.write_json(run.status, {"takes": []})
    wait(lambda: guests(two), "the guest of the run that takes it now")
    assert not alive(guests(run)[0])
    wait(lambda: not offer.exists(), "the end of the other offer")
    assert (len(guests(run)), (two.offers / "l.json").exists()) == (1, True)


def test_a_killed_guest_is_followed_by_another_one(scene: Scene) -> None:
    one, two = scene.run("one"), scene.run("two")
    wait(lambda: guests(one), "a guest")
    os.kill(guests(one)[0], signal.SIGKILL)
    wait(lambda: guests(two), "the next guest")
    assert len(guests(one)) == 1, "a run whose guest failed waits"


def test_a_run_whose_guests_fail_waits_twice_as_long_each_time_until_one_gives_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(records.VARIABLE, str(tmp_path))
    Page.create(tmp_path / "page")
    lender = Lender(LendSettings("l", LendTerms(0.5), str(tmp_path), str(tmp_path / "page"), 0))
    run = RunDir(tmp_path / "one")

    def wait_s(code: int, tokens: int) -> float:
        """Seconds until the run has another guest, after one that ended so."""
        lender._guest = Ended(run, code, tokens)  # type: ignore[assignment]
        lender._collect()
        return lender._retries[run.path].wait_s(time.monotonic())

    assert [round(wait_s(1, 0)) for _ in range(7)] == [30, 60, 120, 240, 480, 900, 900]
    assert [round(wait_s(1, 5)), round(wait_s(1, 0)), wait_s(0, 0)] == [30, 60, 0.0]


def test_a_killed_lender_leaves_no_guest_and_the_server_goes_on(scene: Scene) -> None:
    one = scene.run("one")
    pid = scene.reach("lends").pid
    wait(lambda: guests(one), "a guest")
    os.kill(pid, signal.SIGKILL)
    wait(lambda: not alive(guests(one)[0]), "the end of the guest")
    assert records.all_records(scene.place)["l"][1], "the record is of one that is gone"
    assert scene.server.poll() is None


def test_a_killed_server_leaves_neither_lender_nor_guest_nor_record(scene: Scene) -> None:
    one = scene.run("one")
    lender = scene.reach("lends").pid
    wait(lambda: guests(one), "a guest")
    scene.server.kill()
    wait(lambda: not alive(lender), "the end of the lender")
    assert not alive(guests(one)[0])
    assert list(scene.place.iterdir()) == []
