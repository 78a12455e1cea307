"""Parts of snapshots on the wire of weights: a folder of a node, as files that another node pulls side by side.

Names are ``RANK/NAME`` below the node's folder of snapshots (`libra_hpc.state.snapshot_keeper`).

- A manifest is asked for -> the names and sizes of the part's files; nothing of a guest's request is answered.
- A connection broke -> the file goes on at its last byte; nothing came for `GIVE_UP_S` -> `OSError`.

What came is checked by the part's own manifest, which has the checksums with which its files were written.
"""

from __future__ import annotations

import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from libra_hpc.errors import error_text
from libra_hpc.protocol.carriers import Peer

from .wire import Absent, Caller, Fetch, WireError

PART = "part "
"""Begins the writer of a `Fetch` that is none of weights."""
STREAMS = 4
"""Files at a time: one stream reaches 2.5 GB/s."""
RETRY_S = 0.5
GIVE_UP_S = 10.0
"""Without a byte: a busy node pauses for seconds, and a carrier that ended is there again at another port."""

Listing = dict[str, int]
_listed = msgspec.json.Decoder(Listing)
"""Bytes of every file, by its name."""


class ServedPart:
    """The listing of a part (``file`` -1), or one of its files; a server sends it as it sends an offer."""

    removed = False

    def __init__(self, manifest: bytes, file: int, size: int) -> None:
        self.manifest, self.file, self.size = manifest, file, size

    def __del__(self) -> None:
        if self.file >= 0:
            os.close(self.file)

    def available(self, begin: int, end: int, wait_s: float = 0.0) -> int:
        return end


def served_part(folder: Path, writer: str) -> ServedPart:
    """What ``writer`` names; raises `Absent` for anything else than a part or a file of one."""
    names = writer.removeprefix(PART).split("/")
    if not 2 <= len(names) <= 3 or not names[0].isdecimal() or any(not _plain(name) for name in names):
        raise Absent(f"{writer!r} is no part of a snapshot")
    path = folder.joinpath(*names)
    try:
        if len(names) == 2:
            listing = {file.name: file.stat().st_size for file in path.iterdir() if file.is_file()}
            return ServedPart(msgspec.json.encode(listing), -1, 0)
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise Absent(error_text(error)) from error
    return ServedPart(b"", file, os.fstat(file).st_size)


def pull_part(caller: Caller, peer: Peer, source: str, target: Path) -> None:
    """Get a part into a new folder; raises `OSError` when it does not come, or where there is no room."""
    writer = f"{PART}{source}"
    try:
        listing = _listed.decode(_listing(caller, peer, writer))
        if not all(map(_plain, listing)):
            raise WireError(f"rank {peer.rank} lists a file outside of the part")
        target.mkdir(parents=True)
        with ThreadPoolExecutor(STREAMS, thread_name_prefix="part") as threads:
            pulls = [
                threads.submit(_pull_file, caller, peer, f"{writer}/{name}", target / name, size)
                for name, size in listing.items()
            ]
        for pull in pulls:
            pull.result()
    except (WireError, Absent, msgspec.DecodeError) as error:
        raise OSError(f"rank {peer.rank}: {error}") from error


def _listing(caller: Caller, peer: Peer, writer: str) -> bytes:
    since = time.monotonic()
    while True:
        try:
            return caller.manifest(peer, Fetch(-1, writer))
        except (OSError, WireError) as error:
            _pause(since, error)


def _pull_file(caller: Caller, peer: Peer, writer: str, path: Path, size: int) -> None:
    since = time.monotonic()

    def arrived(begin: int, end: int, version: int) -> None:
        nonlocal since
        since = time.monotonic()

    with path.open("xb+", buffering=0) as file:
        if not size:
            return
        # Without room for a page of a map the process would end.
        os.posix_fallocate(file.fileno(), 0, size)
        with mmap.mmap(file.fileno(), size) as pages, memoryview(pages) as view:
            caller.receive(lambda: peer, Fetch(-1, writer, 0, size), view, arrived, lambda error: _pause(since, error))


def _pause(since: float, error: Exception) -> None:
    """Before the next try; raises ``error`` when the last byte was long ago, or it is not there."""
    if isinstance(error, Absent) or time.monotonic() - since > GIVE_UP_S:
        raise error
    time.sleep(RETRY_S)


def _plain(name: str) -> bool:
    return name == Path(name).name and name not in ("", ".", "..")
