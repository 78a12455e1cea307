"""Which elements of a block changed, as a piece: the encoding that is smallest at the block's density.

Bytes relative to dense bf16: byte gaps 0.033 at 2.2 % changed, a bitmap 0.36 at 29 %.  `libra_hpc.weights.pieces`
describes the encodings.  Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from .pieces import GAPS, VALUES, Buffer, Encoded, Encoding, TensorBlock, WeightPiece, elements
from .weightfile import WeightFileError

Bits = npt.NDArray[np.uint8]
"""One bit an element, lowest first."""
Index = npt.NDArray[np.int32]
"""Ascending positions."""
DENSEST: dict[Encoding, float] = {"gap16": 0.0027, "gap8": 0.125, "bitmap": 0.8}
"""Share of changed elements up to which an encoding is smallest, for values of 2 bytes; above all: dense."""

GATHERED = 1 << 10
"""Bytes of bits at a time: their places stay in the processor's cache."""
COUNTS = np.bitwise_count(np.arange(256, dtype=np.uint8)).astype(np.int64)
PLACES = np.zeros((256, 8), np.int32)
"""Places of the bits that are set in a byte."""
for _byte in range(256):
    PLACES[_byte, : COUNTS[_byte]] = [bit for bit in range(8) if _byte >> bit & 1]


def encoding_for(changed: int, count: int) -> Encoding:
    return next((encoding for encoding, most in DENSEST.items() if changed <= most * count), "dense")


def dense(block: TensorBlock, dtype: str, values: npt.NDArray[Any]) -> Encoded:
    """``values``: bits of all elements of the block, row-major."""
    return Encoded(block, dtype, "dense", len(values), (values,))


def sparse(block: TensorBlock, dtype: str, encoding: Encoding, index: Index, values: npt.NDArray[Any]) -> Encoded:
    """``index``: ascending positions within the block; ``values``: bits of these elements alone."""
    mask = np.zeros(elements(block), np.bool_)
    mask[index] = True
    return marked(block, dtype, encoding, np.packbits(mask, bitorder="little"), values)


def marked(block: TensorBlock, dtype: str, encoding: Encoding, bits: Bits, values: npt.NDArray[Any]) -> Encoded:
    """Encode the elements whose bit is set, like `sparse`; ``values`` are all of the block, or these alone."""
    count = count_set(bits)
    # The place behind the last one is scratch.
    out = np.empty(count + 1, values.dtype)[:-1] if len(values) > count else values
    if encoding == "bitmap":
        if out is not values:
            compiled(_chosen)(bits, values, out.base)
        return Encoded(block, dtype, encoding, count, (out, bits))
    most = int(np.iinfo(GAPS[encoding]).max)
    gaps = np.empty(count + elements(block) // most, GAPS[encoding])
    return Encoded(block, dtype, encoding, count, (out, gaps[: compiled(_gather)(bits, values, most, out, gaps)]))


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


def _chosen(bits: Bits, values: Any, out: Any) -> None:
    """Values whose bit is set: one store for every element, without a branch that no processor could foresee."""
    used, last = np.uint64(0), len(values) // 8
    for at in range(last):
        byte, first = np.uint64(bits[at]), np.uint64(8 * at)
        for number in range(8):
            out[used] = values[first + np.uint64(number)]
            used += byte >> np.uint64(number) & np.uint64(1)
    for at in range(8 * last, len(values)):
        out[used] = values[at]
        used += np.uint64(bits[last]) >> np.uint64(at % 8) & np.uint64(1)


def _gather(bits: Bits, values: Any, most: int, out: Any, gaps: Any) -> int:
    """Values and gaps of the bits that are set, in one pass; returns how many gaps.

    Eight stores for every byte, without such a branch; the last of them are written over.
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
            while gap >= most:
                gaps[marks] = most
                marks += 1
                gap -= most
            gaps[marks] = gap
            marks += 1
    return marks


def overwrite(target: Any, values: Any, marks: Any, gaps: bool, block: tuple[int, int, int]) -> bool:
    """Put values where marks are, in one pass; False: one more or less, or outside.  ``block``: elements, columns,
    elements from row to row."""
    count, cols, stride = block
    most = 255 if marks.itemsize == 1 else 65535
    at, used, row, begin = 0, 0, 0, 0
    for i in range(len(marks)):
        mark = int(marks[i])
        if gaps:
            at += mark
            bits = 0 if mark == most else 1
        else:
            at, bits = 8 * i, mark
        while bits:
            if bits & 1:
                if at >= count or used == len(values):
                    return False
                while at >= begin + cols:
                    begin += cols
                    row += stride
                target[row + at - begin] = values[used]
                used += 1
            at += 1
            bits >>= 1
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
    rest = data[values.nbytes :]
    marks, index = np.frombuffer(rest, GAPS.get(piece.encoding, np.uint8)), np.empty(piece.changed, np.int64)
    # A forged piece may have a right checksum and still name elements outside of its block.
    if not compiled(_located)(index, marks, piece.encoding != "bitmap") or index[-1] >= elements(piece.block):
        raise WeightFileError(f"A piece of {piece.block.tensor} has values outside of its block.")
    return index, values


def _located(out: Any, marks: Any, gaps: bool) -> bool:
    """Positions of all marks; False: they are more or fewer than ``out`` has room for."""
    most = 255 if marks.itemsize == 1 else 65535
    at, used = 0, 0
    for i in range(len(marks)):
        mark = int(marks[i])
        if gaps:
            at += mark
            bits = 0 if mark == most else 1
        else:
            at, bits = 8 * i, mark
        while bits:
            if bits & 1:
                if used == len(out):
                    return False
                out[used] = at
                used += 1
            at += 1
            bits >>= 1
    return used == len(out)


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
