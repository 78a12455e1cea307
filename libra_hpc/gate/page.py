"""The page that a server shares with the guest on its device: a file of 4096 bytes in memory, 64 slots of 64 bytes.

- Slot 0: magic, format, 1 while the owner gives nothing (of the lender), and the end of the last step (of the guest).
- Slots 1 to 63, one per server process: what it serves, at least every 0.25 s.
- A slot changes while it is read -> read again; it stays torn -> its process counts as silent.
- A process has ended without freeing its slot -> the slot does not count.

Little-endian.  `beside_server` writes the same layout without this package.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from math import inf
from pathlib import Path
from typing import Self

from libra_hpc.errors import invalid
from libra_hpc.files import write_atomic
from libra_hpc.policies.serving.serving_view import ServingView

MAGIC, FORMAT = b"LIBRASRV", 4
PAGE_BYTES, SLOT_BYTES, SLOTS = 4096, 64, 64
HEAD = struct.Struct("<8sIIQ")
CLOSED_AT, STEPPED_AT = 12, 16
"""Bytes before its last two fields, which have different writers."""
SLOT = struct.Struct("<IIQIII")
"""Process id (0: free), sequence (odd while it is written), `time.monotonic_ns` of the write, requests served,
99 % quantiles of first tokens alone and beside the guest (microseconds)."""
TRIES = 64
"""Reads of a slot until it is torn; writing one takes some microseconds."""
ENDED_S = 2.0
"""Seconds of silence until it is looked up whether the process lives; eight beats."""
NS, MICRO = 1e-9, 1e-6


class Page:
    """The page at ``path``, for its reader.  Raises `UserError` when there is none."""

    def __init__(self, path: str | Path) -> None:
        try:
            with open(path, "r+b") as file:
                self._map = mmap.mmap(file.fileno(), PAGE_BYTES)
        except (OSError, ValueError) as error:
            raise invalid("gate.page", str(path), str(error), f"a file of {PAGE_BYTES} bytes") from error
        if HEAD.unpack_from(self._map)[:2] != (MAGIC, FORMAT):
            raise invalid("gate.page", str(path), "it has another format", f"a page of format {FORMAT}")

    @classmethod
    def create(cls, path: Path, mode: int = 0o600) -> Self:
        """Make a page, open and without a server."""
        write_atomic(path, HEAD.pack(MAGIC, FORMAT, 0, 0).ljust(PAGE_BYTES, b"\0"), mode)
        return cls(path)

    def set_closed(self, closed: bool) -> None:
        struct.pack_into("<I", self._map, CLOSED_AT, closed)

    def stepped(self) -> None:
        """A step of the guest has ended."""
        struct.pack_into("<Q", self._map, STEPPED_AT, time.monotonic_ns())

    def read(self) -> ServingView:
        """What all processes of the server do, in seconds of `time.monotonic`."""
        closed = bool(HEAD.unpack_from(self._map)[2])
        written, served, alone_s, beside_s = inf, 0, 0.0, 0.0
        for offset in range(SLOT_BYTES, PAGE_BYTES, SLOT_BYTES):
            if self._map[offset : offset + 4] == b"\0\0\0\0":
                continue
            slot = self._slot(offset)
            if slot is None:
                continue
            written, served = min(written, slot.written), served + slot.served
            # Of several processes, the one whose users wait longest beside the guest.
            alone_s, beside_s = max((alone_s, beside_s), (slot.alone_s, slot.beside_s), key=lambda one: one[::-1])
        return ServingView(closed, written if written < inf else -inf, served, alone_s, beside_s)

    def _slot(self, offset: int) -> ServingView | None:
        """One process; None for one that has ended."""
        for _ in range(TRIES):
            pid, sequence, written, served, *micros = SLOT.unpack(self._map[offset : offset + SLOT.size])
            if not sequence % 2 and self._map[offset : offset + 8] == struct.pack("<II", pid, sequence):
                break
        else:
            written = 0
        if not pid or (time.monotonic() - written * NS > ENDED_S and not os.path.exists(f"/proc/{pid}")):
            return None
        return ServingView(False, written * NS, served, *(MICRO * one for one in micros))
