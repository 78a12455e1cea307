"""What a server process writes into the page, from a view."""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

from libra_hpc.gate.page import MICRO, NS, PAGE_BYTES, SLOT, SLOT_BYTES
from libra_hpc.policies.serving.serving_view import ServingView


class PageWriter:
    """Slot ``number`` (from 1), as a server process writes it."""

    def __init__(self, path: str | Path, number: int = 1, pid: int = 0) -> None:
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), PAGE_BYTES)
        self._offset, self._pid, self._sequence = number * SLOT_BYTES, pid or os.getpid(), 0

    def write(self, view: ServingView) -> None:
        """Write a view, but for ``closed``."""
        self._put(self._sequence + 1)
        micros = round(view.alone_s / MICRO), round(view.beside_s / MICRO)
        fields = (self._sequence + 1, round(view.written / NS), view.served, *micros)
        SLOT.pack_into(self._map, self._offset, self._pid, *fields)
        self._sequence = (self._sequence + 2) % (1 << 32)
        self._put(self._sequence)

    def free(self) -> None:
        struct.pack_into("<I", self._map, self._offset, 0)

    def _put(self, sequence: int) -> None:
        struct.pack_into("<II", self._map, self._offset, self._pid, sequence)
