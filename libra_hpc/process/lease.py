"""The lease of a run directory: who owns the run, on a file system that several machines share.

- A file ``lease-<generation>.json`` per owner; the newest generation owns, and its owner renews a counter in it.
- Written in place, in blocks that it has -> a full disk does not end it.
- A world reads another's nonce in a newer generation -> `Fence.taken`; it stops and writes nothing more.
- The lease is not renewed, or cannot be read -> `Fence.fault`, which is a warning and ends nothing.
- The run directory was removed or renamed (`RunFolder`) -> as if another had taken the run: there is none to write to.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from pathlib import Path

import msgspec

from libra_hpc.errors import error_text

RENEW_S = 2.0
"""Between two renewals.  Half: twice the writes; double: another machine waits longer before it takes over."""
CHECK_S = 1.0
"""Between two readings of a fence."""
STALE_S = 30.0
"""Without a renewal, until that is a warning: a file system may hang for some seconds."""
GONE_S, GONE_READINGS = 30.0, 3
"""Seconds and readings in a row without the run directory that prove that it was removed or renamed.

Half: a cache of an NFS client may show an old folder; double: what is trained meanwhile is lost too."""
BYTES = 512
"""Size of a lease, whatever it contains."""
_NAME = re.compile(r"lease-(\d{6})\.json")


class Lease(msgspec.Struct, frozen=True):
    """Content of a lease."""

    nonce: str
    host: str
    boot: str
    """Identity of the running kernel, and the name space of process ids."""
    pid: int
    ticks: int
    """Kernel start time of that process (`start_ticks`)."""
    since: float
    """Epoch seconds."""
    renewed: int = 0
    released: bool = False

    @property
    def here(self) -> bool:
        """Whether its process is, or was, on this machine."""
        return (self.host, self.boot) == (socket.gethostname(), boot())

    @property
    def dead(self) -> bool:
        """Whether its process was on this machine and has ended."""
        return self.here and start_ticks(self.pid) != self.ticks


_decoder = msgspec.json.Decoder(Lease)


def boot() -> str:
    """What distinguishes process ids of this machine from those of others, and of this machine before."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.stat('/proc/self/ns/pid').st_ino}"


def start_ticks(pid: int) -> int | None:
    """Kernel start time of a live process in clock ticks since boot; None without one, or for a zombie."""
    # Collect it if it is our own child, so that it does not stay a zombie.
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def lease_file(folder: Path, generation: int) -> Path:
    return folder / f"lease-{generation:06d}.json"


def newest_lease(folder: Path) -> tuple[int, Lease | None]:
    """The newest generation, 0 without one, and its content, None where it is torn; raises `OSError`."""
    try:
        found = [int(match[1]) for name in os.listdir(folder) if (match := _NAME.fullmatch(name))]
    except FileNotFoundError:
        found = []
    if not found:
        return 0, None
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        return max(found), _decoder.decode(lease_file(folder, max(found)).read_bytes())
    return max(found), None


class RunFolder:
    """A run directory by its inode, which it keeps for life; a file system that fails proves nothing."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._inode, self._since = folder, 0, 0.0
        self.doubts = 0
        """Readings in a row that did not find it."""

    def gone(self, seen: bool) -> str:
        """That the folder was removed or renamed, as a sentence, once that is proven; raises `OSError`.

        ``seen``: it is there, by what was just read in it.
        """
        if seen or self._there():
            self._inode, self.doubts = self._inode or os.stat(self._folder).st_ino, 0
            return ""
        now = time.monotonic()
        self._since = self._since if self.doubts else now
        self.doubts += 1
        if self.doubts < GONE_READINGS or now - self._since < GONE_S:
            return ""
        return f"the run directory {self._folder} was removed or renamed; nothing more is saved"

    def _there(self) -> bool:
        try:
            return os.stat(self._folder).st_ino == self._inode or not self._inode
        except FileNotFoundError:
            return self._folder.name in os.listdir(self._folder.parent)


class Fence:
    """What a world sees of the lease that it lives under; without a nonce it sees nothing."""

    def __init__(self, folder: Path, nonce: str = "", generation: int = 0) -> None:
        self._folder, self._nonce, self._generation = folder, nonce, generation
        self._place = RunFolder(folder.parent)
        self._checked_at = float("-inf")
        self._renewed, self._renewed_at = -1, time.monotonic()
        self.taken = ""
        """Who has the run instead, or that it has no folder any more, as a sentence; empty while it goes on."""
        self.fault = ""
        """Why it is not known whether the owner lives; empty while it renews its lease."""
        self.owner: Lease | None = None
        """The own owner's lease as last read."""

    def check(self) -> str:
        """Read the newest lease, at most every `CHECK_S`; returns `taken`.  Not for an event loop."""
        now = time.monotonic()
        if not self._nonce or self.taken or now - self._checked_at < CHECK_S:
            return self.taken
        self._checked_at = now
        try:
            generation, lease = newest_lease(self._folder)
            # Where the own lease is, the folder is: no other call is needed.
            self.taken = self._place.gone(lease is not None and lease.nonce == self._nonce)
        except OSError as error:
            self.fault = f"the run's lease cannot be read: {error_text(error)}"
            return ""
        if lease is not None and generation >= self._generation and lease.nonce != self._nonce:
            at = time.strftime("%H:%M:%S", time.localtime(lease.since))
            self.taken = f"another owner has the run: process {lease.pid} on {lease.host}, since {at}"
        elif lease is not None and lease.nonce == self._nonce and lease.renewed != self._renewed:
            self.owner, self._renewed, self._renewed_at, self.fault = lease, lease.renewed, now, ""
        elif now - self._renewed_at > STALE_S:
            self.fault = self.fault or f"the run's owner has not renewed its lease for {STALE_S:.0f} s"
        return self.taken

    def orphaned(self) -> str:
        """That the owner's process has ended, as a sentence; empty where it lives or nobody knows."""
        if self.owner is None or not self.owner.dead:
            return ""
        return f"the owner of the run (process {self.owner.pid} on {self.owner.host}) was killed"
