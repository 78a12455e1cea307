"""The checksum of a saved state's file, and of weights on their way, which are summed in parts."""

from __future__ import annotations

import zlib
from pathlib import Path

CHUNK = 1 << 20
"""Bytes per read while summing: large enough to hide the call, small enough to stay in cache."""
POLYNOMIAL = 0xEDB88320
"""Of CRC-32, the highest power in the lowest bit."""


def file_crc32(path: str | Path) -> int:
    """``zlib.crc32`` of a whole file; raises `OSError` when it cannot be read."""
    crc, buffer = 0, bytearray(CHUNK)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc = zlib.crc32(view[:count], crc)
    return crc


def joined_crc32(first: int, second: int, size: int) -> int:
    """The checksum of bytes with checksum ``first`` and, behind them, ``size`` bytes with checksum ``second``."""
    shifted, power = first, 1 << 23  # x ** 8, a byte
    while size:
        if size & 1:
            shifted = _product(power, shifted)
        power, size = _product(power, power), size >> 1
    return shifted ^ second


def _product(a: int, b: int) -> int:
    """Of two polynomials modulo `POLYNOMIAL`."""
    product = 0
    while a:
        if a & 1 << 31:
            product ^= b
        a, b = a << 1 & 0xFFFFFFFF, b >> 1 ^ POLYNOMIAL if b & 1 else b >> 1
    return product
