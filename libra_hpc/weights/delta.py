"""Which elements of a block changed, as a piece (`libra_hpc.weights.pieces`).

Gaps are 0.033 of the bytes of dense bf16 where 2.2 % changed, and 0.44 at 29 %.  Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from .pieces import MOST_GAP, VALUES, Buffer, Encoded, TensorBlock, WeightPiece, elements
from .weightfile import WeightFileError

Bits = npt.NDArray[np.uint8]
"""One bit an element, lowest first."""
DENSE = 2 / 3
"""Share of changed elements from which on all of them are fewer bytes than gaps, for values of 2 bytes."""
GATHERED = 1 << 10
"""Bytes of bits at a time: their places stay in the processor's cache."""
COUNTS = np.bitwise_count(np.arange(256, dtype=np.uint8)).astype(np.int64)
PLACES = np.zeros((256, 8), np.int32)
"""Places of the bits that are set in a byte."""
for _byte in range(256):
    PLACES[_byte, : COUNTS[_byte]] = [bit for bit in range(8) if _byte >> bit & 1]


def dense(block: TensorBlock, dtype: str, values: npt.NDArray[Any]) -> Encoded:
    """``values``: bits of all elements of the block, row-major."""
    return Encoded(block, dtype, "dense", len(values), (values,))


def marked(block: TensorBlock, dtype: str, bits: Bits, values: npt.NDArray[Any]) -> Encoded:
    """Encode the elements whose bit is set; ``values``: bits of all elements of the block, or of these alone."""
    count = count_set(bits)
    out = np.empty(count, values.dtype) if len(values) > count else values
    gaps = np.empty(count + elements(block) // MOST_GAP, np.uint8)
    return Encoded(block, dtype, "gap8", count, (out, gaps[: compiled(_gather)(bits, values, out, gaps)]))


def count_set(bits: Bits) -> int:
    return int(np.bitwise_count(bits).sum(dtype=np.int64))


def bits_of(bits: Bits, begin: int, count: int) -> Bits:
    """``count`` of them from ``begin`` on, the rest of the last byte 0."""
    first, shift, size = begin // 8, begin % 8, -(-count // 8)
    out = bits[first : first + size] >> np.uint8(shift)
    if shift:
        high = bits[first + 1 : first + size + 1] << np.uint8(8 - shift)
        out[: len(high)] |= high
    if count % 8:
        out[-1] &= (1 << count % 8) - 1
    return out


def _gather(bits: Bits, values: Any, out: Any, gaps: Any) -> int:
    """Values and gaps of the bits that are set, in one pass; returns how many gaps.

    Eight stores for every byte, without a branch that no processor could foresee; the last of them are written over.
    """
    places = np.empty(8 * GATHERED + 8, np.int32)
    used, marks, behind = 0, 0, 0
    for begin in range(0, len(bits), GATHERED):
        count = 0
        for at in range(begin, min(begin + GATHERED, len(bits))):
            byte = bits[at]
            first, found = np.int32(8 * at), places[count : count + 8]
            for number in range(8):
                found[number] = first + PLACES[byte, number]
            count += COUNTS[byte]
        if len(values) > len(out):
            chosen = out[used : used + count]
            for number in range(count):
                chosen[number] = values[np.uint32(places[number])]
        used += count
        for number in range(count):
            gap = places[number] - behind
            behind = places[number] + 1
            while gap >= MOST_GAP:
                gaps[marks] = MOST_GAP
                marks += 1
                gap -= MOST_GAP
            gaps[marks] = gap
            marks += 1
    return marks


def overwrite(target: Any, values: Any, gaps: Any, block: tuple[int, int, int]) -> bool:
    """Put values behind gaps, in one pass; False: one more or less, or outside.  ``block``: elements, columns,
    elements from row to row."""
    count, cols, stride = block
    at, used, row, begin = 0, 0, 0, 0
    for i in range(len(gaps)):
        gap = int(gaps[i])
        at += gap
        if gap < MOST_GAP:
            if at >= count or used == len(values):
                return False
            while at >= begin + cols:
                begin += cols
                row += stride
            target[row + at - begin] = values[used]
            used += 1
            at += 1
    return used == len(values)


def piece_values(
    piece: WeightPiece, payload: Buffer
) -> tuple[npt.NDArray[np.int64] | None, npt.NDArray[np.int16 | np.int32]]:
    """Positions within the block (row-major, ascending; None: all) and the bits of their values.

    Values are a view of ``payload``, the offer's.  Raises `WeightFileError` for elements outside of the block.
    """
    data = memoryview(payload).cast("B")[piece.at : piece.at + piece.size]
    kind = np.dtype(VALUES[piece.dtype])
    values = np.frombuffer(data, kind, piece.changed)
    if piece.encoding == "dense":
        return None, values
    gaps = np.frombuffer(data[values.nbytes :], np.uint8)
    found = gaps < MOST_GAP
    index = np.cumsum(gaps + found, dtype=np.int64)[found] - 1
    # A forged piece may have a right checksum and still name elements outside of its block.
    if len(index) != piece.changed or index[-1] >= elements(piece.block):
        raise WeightFileError(f"A piece of {piece.block.tensor} has values outside of its block.")
    return index, values


@cache
def compiled(function: Callable[..., Any]) -> Any:
    """``function`` as machine code, without the interpreter's lock; compiled at its first call."""
    # Its import takes 0.7 s, and only a process that has sparse pieces needs it.
    from numba import njit

    try:
        return njit(cache=True, nogil=True)(function)
    except RuntimeError:
        # No folder for the compiled function can be written.
        return njit(nogil=True)(function)
