"""Weight relay: a version-numbered file travels from the training node that exported it to every rollout node, down a binomial tree of agents.

The file is HF-named safetensors in /dev/shm.  It is cut in chunks of `CHUNK_BYTES`; a chunk is forwarded as soon as it arrives, so the depth of the tree
costs one chunk, not one file.  Generation goes on while bytes move: only the finished, checksummed file is handed to the engines.  Newest wins: a
receiver drops an unfinished older version, and a publisher never queues a second version behind an unfinished one to the same rank.

Receivers ask for what they miss (`WeightsWanted`): a node that joins, an engine that was rebuilt, and a subtree whose inner node died all recover
by the same message.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from libra_hpc.protocol.mesh import MeshMessage, WeightsChunk

CHUNK_BYTES = 16 << 20
"""Large enough that MPI bandwidth is reached, small enough that a tree of depth 5 starts its last hop after 80 MiB."""
KEEP_VERSIONS = 2
"""An engine may still be reading the previous file when the next one is complete."""

Send = Callable[[int, MeshMessage, memoryview], None]


def halves(ranks: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
    """Split receivers into at most two (head, rest) pairs: the children of one node of the tree."""
    if not ranks:
        return []
    middle = (len(ranks) + 1) // 2
    parts = (ranks[:middle], ranks[middle:])
    return [(part[0], tuple(part[1:])) for part in parts if part]


class Publisher:
    """The sending end, on the node whose replica exports."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.version = -1
        self.path: Path | None = None
        self.crc32 = 0

    def publish(self, version: int, path: Path, crc32: int, ranks: Sequence[int]) -> None:
        """Send ``path`` to ``ranks``; it must stay unchanged until `KEEP_VERSIONS` newer versions exist."""
        previous = self.path
        self.version, self.path, self.crc32 = version, path, crc32
        self._send_file(ranks)
        if previous is not None and previous != path:
            _prune(path.parent, path.name.split("-")[0])

    def answer(self, rank: int, have: int) -> bool:
        """Send the newest version to one rank; False when it already has it."""
        if self.path is None or self.version <= have:
            return False
        self._send_file([rank])
        return True

    def _send_file(self, ranks: Sequence[int]) -> None:
        if not ranks or self.path is None:
            return
        with self.path.open("rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            view = memoryview(mmap.mmap(handle.fileno(), size, access=mmap.ACCESS_READ))
        for head, rest in halves(ranks):
            for offset in range(0, size, CHUNK_BYTES):
                self._send(head, WeightsChunk(self.version, offset, size, self.crc32, rest), view[offset : offset + CHUNK_BYTES])


class Receiver:
    """The receiving and forwarding end, on a rollout node.  ``complete`` is called with (version, path, crc32) of each checked file.

    Chunks of a version come in the order of their offsets, as MPI keeps that of messages between two ranks; any other order fails the checksum.
    """

    def __init__(self, folder: Path, send: Send, complete: Callable[[int, Path, int], None]) -> None:
        self._folder, self._send, self._complete = folder, send, complete
        self._version = -1
        self._received = 0
        self._sum = 0
        self._temporary: Path | None = None
        self.newest = -1
        self.newest_path: Path | None = None
        self.newest_crc32 = 0
        self.corrupt = 0

    def chunk(self, message: WeightsChunk, blob: bytes) -> None:
        """Take one chunk, forward it, and finish the file when it was the last."""
        view = memoryview(blob)
        for head, rest in halves(message.relay):
            self._send(head, WeightsChunk(message.version, message.offset, message.size, message.crc32, rest), view)
        if message.version <= self.newest or message.version < self._version:
            return
        if message.version > self._version or message.offset == 0:
            self._abandon()
            self._version, self._received, self._sum = message.version, 0, 0
            self._temporary = self._folder / f".incoming-{message.version}"
            self._temporary.write_bytes(b"")
        assert self._temporary is not None
        with self._temporary.open("r+b") as handle:
            handle.seek(message.offset)
            handle.write(view)
        # Summed as it comes: the agent's loop must not stop for the seconds that the sum of a whole file takes.
        self._sum = zlib.crc32(view, self._sum)
        self._received += len(view)
        if self._received == message.size:
            self._finish(message)

    def _finish(self, message: WeightsChunk) -> None:
        assert self._temporary is not None
        if self._sum != message.crc32:
            self.corrupt += 1
            self._abandon()
            self._version = self.newest
            return
        path = self._folder / f"weights-{message.version:08d}.safetensors"
        self._temporary.replace(path)
        self._temporary = None
        self.newest, self.newest_path, self.newest_crc32 = message.version, path, message.crc32
        _prune(self._folder, "weights")
        self._complete(message.version, path, message.crc32)

    def _abandon(self) -> None:
        if self._temporary is not None:
            with contextlib.suppress(FileNotFoundError):
                self._temporary.unlink()
            self._temporary = None


def _prune(folder: Path, prefix: str) -> None:
    for old in sorted(folder.glob(f"{prefix}-*.safetensors"))[: -KEEP_VERSIONS - 1]:
        old.unlink(missing_ok=True)
