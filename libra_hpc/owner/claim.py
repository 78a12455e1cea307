"""Taking, renewing and releasing the lease of a run (`libra_hpc.process.lease`).

- No lease, a released one, or one of a process of this machine that has ended -> taken at once.
- A process of this machine has it -> refused.
- A process of another machine has it -> its counter is watched for `WATCH_S`: unchanged -> taken, renewed -> refused.
- Two take the same generation -> the file system lets one of them make it; the other is refused.
- The lease was removed, and its run directory is there -> it is made again; without the directory the owner ends.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from pathlib import Path

import msgspec

from libra_hpc.errors import OperationError
from libra_hpc.files import write_once
from libra_hpc.process.lease import BYTES, RENEW_S, Lease, RunFolder, boot, lease_file, newest_lease, start_ticks

WATCH_S = 4 * RENEW_S
"""Half: a file system that shows renewals late would give a run two owners; double: a take-over takes longer."""
POLL_S = 0.25
"""Between two readings of another's lease."""


class LeaseRefused(OperationError):
    """Somebody else has the run; the text has the host, and since when."""


class HeldLease:
    """A lease of this process, renewed in a thread."""

    def __init__(self, folder: Path, generation: int, lease: Lease) -> None:
        self.generation, self.nonce = generation, lease.nonce
        self._folder, self._lease, self._place = folder, lease, RunFolder(folder.parent)
        self._released = threading.Event()
        self.taken = ""
        """Who took it, or that the run has no folder any more, as a sentence; empty while nobody did."""
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def _renew(self) -> None:
        while not self._released.wait(RENEW_S) and not self.check():
            # A file system that takes no writes does not end the run; others see that for themselves.
            with contextlib.suppress(OSError):
                self._write(msgspec.structs.replace(self._lease, renewed=self._lease.renewed + 1))

    def check(self) -> str:
        """Read the newest lease, before a write by a process that may have been stopped for long; returns `taken`."""
        with contextlib.suppress(OSError):
            generation, found = newest_lease(self._folder)
            if found is not None and generation >= self.generation and found.nonce != self.nonce:
                self.taken = f"another owner has taken the run: {_whose(found)}"
            self.taken = self.taken or self._place.gone(generation >= self.generation)
            if generation < self.generation and not self._place.doubts:
                self._folder.mkdir(mode=0o700, exist_ok=True)
                write_once(lease_file(self._folder, self.generation), encode_lease(self._lease))
        return self.taken

    def _write(self, lease: Lease) -> None:
        self._lease = lease
        with lease_file(self._folder, self.generation).open("r+b") as file:
            file.write(encode_lease(lease))

    def release(self) -> None:
        self._released.set()
        self._thread.join(RENEW_S)
        with contextlib.suppress(OSError):
            self._write(msgspec.structs.replace(self._lease, released=True))

    def __enter__(self) -> HeldLease:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def encode_lease(lease: Lease) -> bytes:
    """`BYTES` bytes, so that it can be replaced in place."""
    return msgspec.json.encode(lease).ljust(BYTES - 1) + b"\n"


def acquire(folder: Path, patience_s: float = 0.0) -> HeldLease:
    """Take the lease of a run.

    Raises `LeaseRefused` where somebody else has it after ``patience_s``, and `OSError` where it cannot be written.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return _take(folder)
        except LeaseRefused:
            if time.monotonic() >= deadline:
                raise
            time.sleep(POLL_S)


def _take(folder: Path) -> HeldLease:
    generation, found = newest_lease(folder)
    if generation and (found is None or not (found.released or found.dead)):
        if found is not None and found.here:
            raise LeaseRefused(_whose(found))
        generation = _watch(folder, generation, found)
    own = os.getpid()
    lease = Lease(secrets.token_hex(8), socket.gethostname(), boot(), own, start_ticks(own) or 0, time.time())
    if not write_once(lease_file(folder, generation + 1), encode_lease(lease)):
        raise LeaseRefused("another process has just taken the run")
    for old in range(max(1, generation - 4), generation):
        with contextlib.suppress(OSError):
            lease_file(folder, old).unlink(missing_ok=True)
    try:
        return HeldLease(folder, generation + 1, lease)
    except RuntimeError:  # no thread can be started
        lease_file(folder, generation + 1).unlink(missing_ok=True)
        raise


def _watch(folder: Path, generation: int, before: Lease | None) -> int:
    """Wait whether another machine's owner renews its lease; returns the generation that may be taken over."""
    deadline = time.monotonic() + WATCH_S
    while time.monotonic() < deadline:
        time.sleep(POLL_S)
        number, found = newest_lease(folder)
        if found is not None and found.released:
            return number
        if found is None and number == generation:
            continue  # read while it was being written
        if (number, found) != (generation, before):
            raise LeaseRefused("another process has just taken the run" if found is None else _whose(found))
    return generation


def _whose(lease: Lease) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(lease.since))
    return f"process {lease.pid} on {lease.host} owns the run since {at}"
