"""A server lends its idle GPU to a running job: revoked, given again, and each process of the two killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from libra_hpc.facts.rundir import read_lines
from libra_hpc.lender import lender_record as records
from libra_hpc.process.reaper import descendants
from tests.lender.served import LEND, SERVER

from .harness import SIMULATED, Chaos, sound

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]
BORROWS = SIMULATED + "\n[borrow]\nlenders = true\n"


class Lent:
    """A server that lends to the runs of a case."""

    def __init__(self, case: Chaos) -> None:
        self.case, self.place = case, case.folder / "lenders"
        environment = {**os.environ, records.VARIABLE: str(self.place)}
        self.port_file = case.folder / "port"
        script = case.folder / "server.py"
        script.write_text(SERVER)
        command = [*LEND, "--runs", str(case.folder / "runs"), "--", sys.executable, str(script), str(self.port_file)]
        with (case.folder / "server.log").open("w") as log:
            self.server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        os.environ[records.VARIABLE] = str(self.place)

    def records(self) -> list[dict[str, Any]]:
        return json.loads(self.case.cli("lenders", "--json").stdout)  # type: ignore[no-any-return]

    def wait(self, state: str) -> dict[str, Any]:
        found: list[dict[str, Any]] = []

        def reached() -> bool:
            found[:] = self.records()
            return bool(found) and found[0]["state"] == state

        self.case.wait(reached, f"a lender that {state}; ended: {self.server.poll()}")
        return found[0]

    def answers(self) -> bool:
        """Whether the server serves."""
        url = f"http://127.0.0.1:{self.port_file.read_text()}/v1/completions"
        with urllib.request.urlopen(url, data=b"{}", timeout=30) as answer:
            return bool(answer.read() == b"token")

    def end(self) -> None:
        os.environ.pop(records.VARIABLE, None)
        if self.server.poll() is None:
            self.server.kill()
        self.server.wait()


def wait(condition: Callable[[], object], what: str, limit_s: float = 60.0) -> None:
    """Also after the run has ended."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def given(case: Chaos) -> int:
    """Tokens of trained batches that guests generated."""
    assert case.run is not None
    return int(sum(line["guest_tokens"] for line in read_lines(case.run.metrics)))


def guests(case: Chaos, kind: str) -> int:
    return len(case.events(f"guest_{kind}"))


def test_a_server_lends_until_it_is_revoked_and_outlives_its_lender(tmp_path: Path) -> None:
    case = Chaos(tmp_path, text=BORROWS, steps=4000, hybrid=0, rollout=1)
    case.submit()
    lent = Lent(case)
    try:
        case.wait(lambda: given(case) > 0, "trained tokens of the lender")
        record = lent.wait("lends")
        assert record["borrower"] == str(case.run.path if case.run else "")
        wait(lambda: lent.records()[0]["tokens"] > 0, "tokens in the record")
        case.cli("lenders", "--revoke", record["name"])
        paused = lent.wait("paused")
        assert paused["why"] == "revoked"
        assert case.events("guest_leaves")[-1]["reason"] == "it got SIGTERM"
        assert (guests(case, "left"), guests(case, "lost")) == (1, 0)
        assert lent.answers()
        case.cli("lenders", "--return", record["name"])
        case.wait(lambda: guests(case, "serves") == 2, "the second guest")
        os.kill(record["pid"], signal.SIGKILL)
        case.wait(lambda: guests(case, "left") == 2, "the guest without its lender has left")
        assert lent.wait("gone")["name"] == record["name"]
        assert lent.answers()
        case.cli("cancel", str(case.run.path if case.run else ""))
        sound(case, "cancelled")
        assert lent.answers()
    finally:
        lent.end()


FAULTS = ("guest killed", "engine killed", "revoked", "guest stopped", "record torn")
"""In turns; a stopped guest is silent until its lender kills it."""


def engine_of(guest: int, rank: int) -> int:
    """The process of a guest's engine."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            mine = f"PPid:\t{guest}\n" in (folder / "status").read_text()
            if mine and f"/r{rank}.0.json" in (folder / "cmdline").read_text():
                return int(folder.name)
    raise AssertionError(f"guest {rank} has no engine")


def inject(case: Chaos, lent: Lent, fault: str) -> None:
    """A fault, from which a guest serves again by itself."""
    name, joined = lent.wait("lends")["name"], case.events("guest_joined")[-1]
    guest = int(joined["pid"])
    if fault == "guest killed":
        os.kill(guest, signal.SIGKILL)
    elif fault == "engine killed":
        os.kill(engine_of(guest, joined["rank"]), signal.SIGKILL)
    elif fault == "guest stopped":
        os.kill(guest, signal.SIGSTOP)
    elif fault == "revoked":
        case.cli("lenders", "--revoke", name)
        lent.wait("paused")
        case.cli("lenders", "--return", name)
    else:
        (lent.place / f"{name}.json").write_bytes(b'{"name": "')


@pytest.mark.timeout(900)
def test_twenty_faults_of_a_lender_in_a_row_cost_neither_run_nor_users_anything(tmp_path: Path) -> None:
    case = Chaos(tmp_path, text=BORROWS, steps=4000, hybrid=0, rollout=1)
    case.submit()
    lent = Lent(case)
    try:
        case.wait(lambda: guests(case, "serves") == 1, "a guest")
        for number in range(20):
            fault = FAULTS[number % len(FAULTS)]
            served, steps = guests(case, "serves"), len(case.steps())
            inject(case, lent, fault)
            if fault == "record torn":
                case.wait(lent.records, "the record is whole again")
            else:
                case.wait(lambda served=served: guests(case, "serves") > served, f"a guest after: {fault}")
            assert lent.answers(), fault
            case.wait(lambda steps=steps: len(case.steps()) > steps, f"steps after: {fault}")
        case.cli("cancel", str(case.run.path if case.run else ""))
        sound(case, "cancelled")
        assert case.events("guest_lost"), "killed guests were found"
        assert not case.events("node_lost"), "no node of the run was blamed"
    finally:
        lent.end()


def test_a_killed_guest_is_followed_by_another_and_a_killed_server_ends_all(tmp_path: Path) -> None:
    case = Chaos(tmp_path, text=BORROWS, steps=4000, hybrid=0, rollout=1)
    case.submit()
    lent = Lent(case)
    try:
        case.wait(lambda: guests(case, "serves") == 1, "a guest")
        os.kill(case.events("guest_joined")[-1]["pid"], signal.SIGKILL)
        case.wait(lambda: guests(case, "serves") == 2, "a guest again")
        lender = lent.wait("lends")["pid"]
        guest = case.events("guest_joined")[-1]["pid"]
        lent.end()
        wait(lambda: not Path(f"/proc/{lender}").exists(), "the end of the lender")
        assert not Path(f"/proc/{guest}").exists()
        assert list(lent.place.iterdir()) == []
        case.cli("cancel", str(case.run.path if case.run else ""))
        sound(case, "cancelled")
        assert guests(case, "lost") == 1
        assert not [pid for pid in descendants() if pid in (lender, guest)]
    finally:
        lent.end()
