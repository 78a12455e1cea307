"""Sends weight files from one node of the tree to its children, as fast as each child takes the chunks.

- A child took a chunk -> the next is read and sent; at most `IN_FLIGHT` are not taken.
- Another file is started for a child -> unsent chunks of the one before are dropped.
- The mesh drops a chunk (the child is lost), or the file cannot be read -> the child's stream ends; it asks again
  later.

Every chunk is a copy, so a file may be removed while a chunk of it waits to be sent.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from libra_hpc.protocol.agents import MeshMessage, WeightsChunk

CHUNK_BYTES = 16 << 20
"""Large enough to reach the network's bandwidth; small enough that a tree of depth 5 starts its last hop after 80
MiB."""
IN_FLIGHT = 4
"""Chunks: one on the wire, three for the pauses of the sender's loop.

Half: a busy loop leaves the link idle; double: 128 MiB are held per child.
"""

Send = Callable[[int, MeshMessage, bytes, Callable[[bool], None]], None]
"""``send(rank, message, blob, done)``; ``done(True)`` once the blob was taken, ``done(False)`` when it was dropped."""


class WeightFile(NamedTuple):
    """A version's file; ``path`` may be unfinished."""

    version: int
    path: Path
    size: int
    crc32: int


class _Stream:
    def __init__(self, file: WeightFile, relay: tuple[int, ...]) -> None:
        self.file, self.relay = file, relay
        self.offset = 0
        self._handle = file.path.open("rb", buffering=0)

    def read(self, available: int) -> bytes:
        """The next chunk out of the first ``available`` bytes, or nothing; raises `OSError` when the file lacks it."""
        wanted = min(CHUNK_BYTES, available - self.offset)
        if wanted <= 0:
            return b""
        chunk = os.pread(self._handle.fileno(), wanted, self.offset)
        if len(chunk) < wanted:
            raise OSError(errno.EIO, f"{self.file.path} is shorter than it was")
        return chunk

    def close(self) -> None:
        self._handle.close()


class Flow:
    def __init__(self, send: Send) -> None:
        self._send = send
        self._streams: dict[int, _Stream] = {}
        self._in_flight: Counter[int] = Counter()
        self._available = 0

    def start(self, file: WeightFile, available: int, rank: int, relay: tuple[int, ...]) -> None:
        """Send a file to one child from its beginning, as far as it is ``available``."""
        before = self._streams.get(rank)
        if before is not None and before.file.version == file.version:
            # It asked for itself alone; those behind it still need the file.
            relay = relay or before.relay
        self._end(rank)
        # A file that newer ones have replaced: the child gets those.
        with contextlib.suppress(FileNotFoundError):
            self._streams[rank] = _Stream(file, relay)
        self._available = available
        self._post(rank)

    def grow(self, available: int) -> None:
        """So many bytes of the file exist by now."""
        self._available = available
        for rank in list(self._streams):
            self._post(rank)

    def drop(self) -> None:
        for rank in list(self._streams):
            self._end(rank)

    def _post(self, rank: int) -> None:
        while self._in_flight[rank] < IN_FLIGHT and (stream := self._streams.get(rank)) is not None:
            try:
                blob = stream.read(self._available)
            except OSError:
                self._end(rank)
                break
            if not blob:
                break
            file, offset = stream.file, stream.offset
            stream.offset += len(blob)
            if stream.offset == file.size:
                self._end(rank)
            self._in_flight[rank] += 1
            chunk = WeightsChunk(file.version, offset, size=file.size, crc32=file.crc32, relay=stream.relay)
            self._send(rank, chunk, blob, partial(self._taken, rank))

    def _taken(self, rank: int, arrives: bool) -> None:
        self._in_flight[rank] -= 1
        if not arrives:
            self._end(rank)
        self._post(rank)

    def _end(self, rank: int) -> None:
        stream = self._streams.pop(rank, None)
        if stream is not None:
            stream.close()


def halves(ranks: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
    """Split receivers into at most two (head, rest) pairs: the children of one node of the tree."""
    if not ranks:
        return []
    middle = (len(ranks) + 1) // 2
    parts = (ranks[:middle], ranks[middle:])
    return [(part[0], tuple(part[1:])) for part in parts if part]
