"""A server lends its idle GPU to a running job: revoked, given again, and each process of the two killed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from libra_hpc.annexes.lend.lender_record import all_records
from libra_hpc.facts.rundir import RunDir
from tests.annexes.lend.served import SmallServer, wait

from .harness import SIMULATED, Chaos, sound

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]
BORROWS = SIMULATED + '\n[borrow]\nlenders = "any"\n'


def guests(case: Chaos, kind: str) -> int:
    return len(case.events(f"guest_{kind}"))


FAULTS = (
    *(
        "guest killed",
        "engine killed",
        "revoked",
        "record torn",
        "record dated back",
        "lender stopped",
        "lender killed",
    ),
    *("server killed", "link cut", "leader stopped", "guest stopped", "wrong secret", "two borrowers"),
    *("engine killed", "server stopped", "server killed", "lender killed", "record torn", "leader killed", "revoked"),
)
"""In this order; a stopped guest is silent until its lender kills it."""
GUEST_STAYS = ("record torn", "record dated back", "lender stopped", "leader stopped", "server stopped")
SYS_PIDFD_GETFD = 438
FREE_S = 15.0
"""From a fault until the memory of a lender and its lease are free again."""
ENDS = ("guest killed", "guest stopped", "link cut", "lender killed", "server killed", "wrong secret")
"""Faults that end the guest, and its engine with it."""
STOPPED_S = 12.0
"""Longer than the lender needs to see that its server is silent; shorter than the run needs to give rank 0 up."""


def engine_of(guest: int, rank: int) -> int:
    """The process of a guest's engine."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            mine = f"PPid:\t{guest}\n" in (folder / "status").read_text()
            if mine and f"/r{rank}.0.json" in (folder / "cmdline").read_text():
                return int(folder.name)
    raise AssertionError(f"guest {rank} has no engine")


def cut_links(process: int) -> int:
    """Shut the TCP connections of a process down, wherever they are in a message; returns how many."""
    libc, handle, cut = ctypes.CDLL(None, use_errno=True), os.pidfd_open(process), 0
    for path in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(OSError):
            if not os.readlink(path).startswith("socket:"):
                continue
            with socket.socket(fileno=libc.syscall(SYS_PIDFD_GETFD, handle, int(path.name), 0)) as found:
                if found.family == socket.AF_INET:
                    found.shutdown(socket.SHUT_RDWR)
                    cut += 1
    os.close(handle)
    return cut


def freed(place: Path, left: list[int]) -> None:
    """None of these processes, a guest first, is left, and a lender that lends has another guest."""

    def is_free() -> bool:
        known = [one.pid for one, gone in all_records(place).values() if one and not gone and one.state == "lends"]
        children = [Path(f"/proc/{one}/task/{one}/children").read_text().split() for one in known]
        return not any(Path(f"/proc/{one}").exists() for one in left) and all(children)

    wait(is_free, "free memory and lease", FREE_S)


def stop_for(process: int) -> None:
    os.kill(process, signal.SIGSTOP)
    time.sleep(STOPPED_S)
    os.kill(process, signal.SIGCONT)


def with_another_secret(case: Chaos, lent: SmallServer) -> None:
    """A guest is refused that has not the secret of the ranks."""
    assert case.run is not None
    door, refused = case.run.door, lent.log.read_text().count("with code 2")
    written = door.read_bytes()
    door.write_bytes(msgspec.json.encode({**msgspec.json.decode(written), "secret": "00" * 32}))
    os.kill(int(case.events("guest_joined")[-1]["pid"]), signal.SIGTERM)
    wait(lambda: lent.log.read_text().count("with code 2") > refused, "a refused guest")
    door.write_bytes(written)


def back_and_forth(case: Chaos, lent: SmallServer, name: str) -> None:
    case.cli("lend", "revoke", name)
    wait(lambda: [one["state"] for one in lent.records()] == ["paused"], "a lender that is free", FREE_S)
    case.cli("lend", "revoke", name, "--return")


def with_a_second_run(case: Chaos, lent: SmallServer, name: str) -> None:
    """Which has the lender once the first one had to leave."""
    other = Chaos(case.folder / "other", text=BORROWS, steps=4000, hybrid=0, rollout=1, runs=case.folder / "runs")
    other.cli("submit", str(other.run_file), "--executor", "local")
    other.run = RunDir(case.folder / "runs" / "t-002")
    other.reach(2)
    assert not guests(other, "joined"), "the lender has one guest at a time"
    back_and_forth(case, lent, name)
    other.wait(lambda: guests(other, "serves"), "a guest of the other run")
    assert lent.wait("lends")["borrower"] == str(other.run.path)
    other.cli("cancel", str(other.run.path))
    sound(other, "cancelled")


def inject(case: Chaos, lent: SmallServer, record: dict[str, Any], fault: str) -> SmallServer:
    """A fault, from which a guest serves again by itself; the server that is lent from then on."""
    served, joined = guests(case, "serves"), case.events("guest_joined")[-1]
    name, guest, path = record["name"], int(joined["pid"]), lent.place / f"{record['name']}.json"
    match fault:
        case "guest killed":
            os.kill(guest, signal.SIGKILL)
        case "engine killed":
            os.kill(engine_of(guest, joined["rank"]), signal.SIGKILL)
        case "guest stopped":
            os.kill(guest, signal.SIGSTOP)
        case "link cut":
            assert cut_links(guest)
        case "revoked":
            slept = guests(case, "sleeps")
            back_and_forth(case, lent, name)
            assert guests(case, "sleeps") == slept + 1
            case.wait(lambda: guests(case, "serves") > served, "the same guest, awake")
            assert case.events("guest_joined")[-1]["pid"] == guest
        case "wrong secret":
            with_another_secret(case, lent)
        case "two borrowers":
            with_a_second_run(case, lent, name)
        case "record torn":
            path.write_bytes(b'{"name": "')
        case "record dated back":
            os.utime(path, (0.0, 0.0))
            assert all_records(lent.place)[name][1], "it counts as gone until it is renewed"
        case "leader killed":
            case.signal_agent(0, signal.SIGKILL)
        case "leader stopped":
            stop_for(case.agent(0))
        case "server stopped":
            stop_for(lent.server.pid)
        case "lender stopped":
            os.kill(record["pid"], signal.SIGSTOP)
            assert lent.wait("gone")["name"] == name
            os.kill(record["pid"], signal.SIGCONT)
        case "lender killed":
            os.kill(record["pid"], signal.SIGKILL)
            wait(lambda: not Path(f"/proc/{guest}").exists(), "the end of the guest without its lender")
            assert lent.answers(), fault
            lent.end()
            lent = SmallServer(case)
            lent.wait("lends")
            assert {path.stem for path in lent.place.iterdir() if path.stem == name} == set(), (
                "what the killed one left"
            )
            return lent
        case "server killed":
            lent.end()
            wait(lambda: not list(lent.place.iterdir()), "the end of the lender without its server")
            assert not Path(f"/proc/{guest}").exists()
            return SmallServer(case)
        case _:
            raise AssertionError(fault)
    return lent


@pytest.mark.timeout(1200)
def test_twenty_faults_of_a_lender_in_a_row_cost_neither_run_nor_users_anything(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    case = Chaos(tmp_path, text=BORROWS, steps=4000, hybrid=0, rollout=1)
    run = case.submit()
    lent = SmallServer(case)
    try:
        case.wait(lambda: guests(case, "serves") == 1, "a guest")
        for number, fault in enumerate(FAULTS):
            record, served, began = lent.wait("lends"), guests(case, "serves"), time.monotonic()
            joined = case.events("guest_joined")[-1]
            guest = int(joined["pid"])
            left = [guest, engine_of(guest, joined["rank"])] if fault in ENDS else []
            with ThreadPoolExecutor() as beside:
                free = beside.submit(freed, lent.place, left)
                lent = inject(case, lent, record, fault)
                free.result()
            if fault not in GUEST_STAYS:
                case.wait(lambda served=served: guests(case, "serves") > served, f"a guest after: {fault}")
            lent.wait("lends")
            assert lent.answers(), fault
            before = case.guest_tokens()
            case.wait(lambda before=before: case.guest_tokens() > before, f"trained tokens of the guest after: {fault}")
            print(f"{number + 1}. {fault}: {time.monotonic() - began:.0f} s", flush=True)
        assert len(FAULTS) == 20
        wait(lambda: len(list(run.offers.iterdir())) == 1, "the end of offers of killed lenders")
        case.cli("cancel", str(run.path))
        sound(case, "cancelled")
        assert case.events("guest_lost"), "killed guests were found"
        assert not case.events("node_lost"), "no node of the run was blamed"
    finally:
        lent.end()
