"""The lease of a run: who gets it, who is refused, and what a world sees of it."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec
import pytest

from libra_hpc.files import write_once
from libra_hpc.owner import claim
from libra_hpc.owner.claim import LeaseRefused, acquire, encode_lease
from libra_hpc.process import lease as leases
from libra_hpc.process.lease import BYTES, Fence, Lease, boot, lease_file, newest_lease, start_ticks
from tests.stage.waiting import wait_until


def of(pid: int = 0, host: str = "", **fields: object) -> Lease:
    """A lease of a process, here unless a host is named."""
    made = Lease("other", host or socket.gethostname(), boot(), pid, start_ticks(pid) or 0, time.time())
    return msgspec.structs.replace(made, **fields)


def write(folder: Path, generation: int, lease: Lease) -> None:
    folder.mkdir(exist_ok=True)
    lease_file(folder, generation).write_bytes(encode_lease(lease))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(claim, "RENEW_S", 0.05)
    monkeypatch.setattr(claim, "POLL_S", 0.02)
    monkeypatch.setattr(claim, "WATCH_S", 2.0)
    monkeypatch.setattr(leases, "CHECK_S", 0.0)
    return tmp_path / "lease"


def test_a_free_a_released_and_a_dead_owners_lease_are_taken_at_once(folder: Path) -> None:
    with acquire(folder) as held:
        assert held.generation == 1
    with acquire(folder) as held:
        assert held.generation == 2
    ended = subprocess.Popen([sys.executable, "-c", ""])
    lease = of(ended.pid, ticks=1)
    ended.wait()
    write(folder, 3, lease)
    with acquire(folder) as held:
        assert held.generation == 4
        assert lease_file(folder, 4).stat().st_size == BYTES
    assert newest_lease(folder)[1] == msgspec.structs.replace(held._lease, released=True)


def test_an_owner_that_lives_here_is_named_and_nothing_is_taken(folder: Path) -> None:
    with acquire(folder), pytest.raises(LeaseRefused) as refused:
        acquire(folder)
    assert str(refused.value).startswith(f"process {os.getpid()} on {socket.gethostname()} owns the run since 2")
    assert newest_lease(folder)[0] == 1


def test_another_machines_owner_is_watched(folder: Path) -> None:
    write(folder, 1, of(4711, "far"))
    with acquire(folder) as held:
        assert held.generation == 2, "it renewed nothing"
    write(folder, 3, of(4711, "far"))
    renewed = threading.Timer(0.1, write, (folder, 3, of(4711, "far", renewed=1)))
    renewed.start()
    with pytest.raises(LeaseRefused, match="process 4711 on far owns the run since"):
        acquire(folder)
    renewed.join()
    released = threading.Timer(0.1, write, (folder, 3, of(4711, "far", released=True)))
    released.start()
    with acquire(folder) as held:
        assert held.generation == 4
    released.join()


def test_a_lease_read_while_it_is_being_written_is_read_again(folder: Path) -> None:
    write(folder, 1, of(4711, "far"))
    torn = threading.Timer(0.1, lease_file(folder, 1).write_bytes, (b"{",))
    torn.start()
    written = threading.Timer(0.2, write, (folder, 1, of(4711, "far", renewed=1)))
    written.start()
    with pytest.raises(LeaseRefused, match="process 4711 on far owns the run since"):
        acquire(folder)
    torn.join()
    written.join()


def test_one_who_waits_gets_a_lease_that_is_released_meanwhile(folder: Path) -> None:
    held = acquire(folder)
    threading.Timer(0.2, held.release).start()
    with acquire(folder, patience_s=30.0) as next_held:
        assert next_held.generation == 2


TAKES = """
import errno, os, pathlib, sys, time
def no_links(*arguments):
    raise OSError(errno.EPERM, "Operation not permitted")
if sys.argv[2] == "no links":
    os.link = no_links
from libra_hpc.owner.claim import LeaseRefused, acquire
folder = pathlib.Path(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
try:
    held = acquire(folder)
except LeaseRefused:
    print("refused", flush=True)
else:
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("how", ["links", "no links"])
def test_of_several_at_the_same_time_exactly_one_gets_it(folder: Path, how: str) -> None:
    command = [sys.executable, "-c", TAKES, str(folder), how]
    takers = [subprocess.Popen(command, stdin=-1, stdout=-1, text=True) for _ in range(4)]

    def each(word: str) -> list[str]:
        for taker in takers:
            assert taker.stdin is not None
            taker.stdin.write(word)
            taker.stdin.flush()
        return [taker.stdout.readline().strip() for taker in takers if taker.stdout is not None]

    assert each("") == ["ready"] * 4
    assert sorted(each("\n")) == ["held", *["refused"] * 3]
    for taker in takers:
        taker.communicate()


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_lease_is_taken_where_there_are_no_hard_links(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "link", failing(number))
    with acquire(folder) as held:
        assert held.generation == 1
    assert newest_lease(folder)[1] == msgspec.structs.replace(held._lease, released=True)


def failing(number: int, first: Callable[..., object] = lambda *arguments: None) -> Callable[..., None]:
    """A call of the system that fails, after ``first``."""

    def call(*arguments: object) -> None:
        first(*arguments)
        raise OSError(number, os.strerror(number))

    return call


def test_a_link_whose_answer_was_lost_is_the_own_one_and_that_of_another_is_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", failing(errno.EEXIST, os.link))
    with acquire(folder) as held:
        assert held.generation == 1
    write(folder, 2, of(os.getpid()))
    assert not write_once(lease_file(folder, 2), encode_lease(of(1)))


def test_a_file_that_cannot_be_written_whole_is_not_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()

    def full(path: Path, mode: str) -> IO[bytes]:
        path.touch()
        return open("/dev/full", "wb")

    monkeypatch.setattr(os, "link", failing(errno.EPERM))
    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(OSError, match="No space left"):
        write_once(folder / "order", b"{}")
    assert not list(folder.iterdir())


def test_a_world_stops_only_for_another_owner_of_a_newer_generation(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with acquire(folder) as held:
        fence = Fence(folder, held.nonce, held.generation)
        assert fence.check() == ""
        assert fence.owner is not None
        assert fence.orphaned() == ""
        late = Fence(folder, "younger", held.generation + 1)
        assert late.check() == "", "an older lease, where a file system shows the own one late"
        lease_file(folder, 2).write_bytes(b'{"torn')
        assert (fence.check(), held.taken) == ("", "")
        write(folder, 2, of(4711, "far"))
        assert fence.check().startswith("another owner has the run: process 4711 on far, since ")
        wait_until(lambda: held.taken)
    assert newest_lease(folder)[1] == of(4711, "far", since=newest_lease(folder)[1].since)  # type: ignore[union-attr]
    assert Fence(folder).check() == "", "a world without an owner"


def test_a_lease_that_is_not_renewed_or_cannot_be_read_is_a_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "STALE_S", 0.05)
    own = of(os.getpid(), nonce="own")
    write(folder, 1, own)
    fence = Fence(folder, "own", 1)
    assert (fence.check(), fence.fault) == ("", "")
    time.sleep(0.1)
    assert fence.check() == ""
    assert "has not renewed its lease" in fence.fault
    write(folder, 1, msgspec.structs.replace(own, renewed=1))
    assert (fence.check(), fence.fault) == ("", "")
    lease_file(folder, 1).unlink()
    folder.rmdir()
    folder.write_text("no folder")
    assert fence.check() == ""
    assert "cannot be read" in fence.fault


def test_a_killed_owner_is_named(folder: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1)
    write(folder, 1, of(process.pid, nonce="own"))
    fence = Fence(folder, "own", 1)
    fence.check()
    assert fence.orphaned() == ""
    process.kill()
    process.wait()
    assert fence.orphaned() == f"the owner of the run (process {process.pid} on {socket.gethostname()}) was killed"


def end_of_place(folder: Path, what: str) -> None:
    """Take a run directory away in one of several ways."""
    run = folder.parent
    run.rename(run.with_name("renamed"))
    if what == "replaced":
        run.mkdir()
    elif what == "unreadable":
        run.symlink_to(run)


@pytest.fixture
def looked_at_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner does not look at its lease by itself, and ranks at every call."""
    monkeypatch.setattr(claim, "RENEW_S", 60.0)
    monkeypatch.setattr(leases, "CHECK_S", 0.0)


@pytest.mark.usefixtures("looked_at_by_hand")
@pytest.mark.parametrize("what", ["renamed", "replaced"])
def test_a_run_directory_that_is_gone_ends_owner_and_ranks_after_three_readings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(leases, "GONE_S", 0.2)
    folder = tmp_path / "run-001" / "lease"
    folder.parent.mkdir()
    with acquire(folder) as held:
        fence = Fence(folder, held.nonce, held.generation)
        assert (fence.check(), held.check()) == ("", "")
        end_of_place(folder, what)
        for _ in range(5):
            assert (fence.check(), held.check()) == ("", ""), "one reading proves nothing, nor do many at once"
        time.sleep(0.25)
        sentence = f"the run directory {folder.parent} was removed or renamed; nothing more is saved"
        assert (fence.check(), held.check()) == (sentence, sentence)
        assert not folder.exists(), "nothing is made again"


@pytest.mark.usefixtures("looked_at_by_hand")
@pytest.mark.parametrize("what", ["unreadable", "parent", "back"])
def test_a_run_directory_that_cannot_be_seen_now_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(leases, "GONE_S", 0.1)
    folder = tmp_path / "runs" / "run-001" / "lease"
    folder.parent.mkdir(parents=True)
    with acquire(folder) as held:
        fence = Fence(folder, held.nonce, held.generation)
        if what == "parent":
            folder.parents[1].rename(tmp_path / "unmounted")
        else:
            end_of_place(folder, what)
        for number in range(6):
            if what == "back" and number % 2:
                (folder.parents[1] / "renamed").rename(folder.parent)
            assert (fence.check(), held.check()) == ("", "")
            if what == "back" and number % 2:
                folder.parent.rename(folder.parents[1] / "renamed")
            time.sleep(0.05)
        assert what == "back" or "cannot be read" in fence.fault


@pytest.mark.usefixtures("looked_at_by_hand")
def test_an_owner_makes_a_lease_again_that_was_removed_and_whoever_came_between_ends(folder: Path) -> None:
    with acquire(folder) as held:
        shutil.rmtree(folder)
        assert held.check() == ""
        assert newest_lease(folder) == (1, held._lease)
        lease_file(folder, 1).unlink()
        write(folder, 1, of(4711, "far"))
        assert held.check().startswith("another owner has taken the run: process 4711 on far")
        assert Fence(folder, held.nonce, 1).check().startswith("another owner has the run")
