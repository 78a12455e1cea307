"""The checksum of a file of a saved state."""

from __future__ import annotations

import zlib
from pathlib import Path

CHUNK = 1 << 22
"""Bytes per read while summing: large enough to hide the call, small enough to stay in cache."""


def file_crc32(path: str | Path) -> int:
    """``zlib.crc32`` of a whole file; raises `OSError` when it cannot be read."""
    crc, buffer = 0, bytearray(CHUNK)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc = zlib.crc32(view[:count], crc)
    return crc
