"""Which elements of a block changed, as a piece: the encoding that is smallest at the block's density.

Bytes relative to dense bf16: byte gaps 0.033 at 2.2 % changed, a bitmap 0.36 at 29 %.  `libra_hpc.weights.pieces`
describes the encodings and reads them.  Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from .pieces import GAPS, Encoded, Encoding, TensorBlock, elements, gaps

Bits = npt.NDArray[np.uint8]
"""One bit an element, lowest first."""
Index = npt.NDArray[np.int32]
"""Ascending positions."""
DENSEST: dict[Encoding, float] = {"gap16": 0.0027, "gap8": 0.125, "bitmap": 0.8}
"""Share of changed elements up to which an encoding is smallest, for values of 2 bytes; above all: dense."""


def encoding_for(changed: int, count: int) -> Encoding:
    return next((encoding for encoding, most in DENSEST.items() if changed <= most * count), "dense")


def dense(block: TensorBlock, dtype: str, values: npt.NDArray[Any]) -> Encoded:
    """``values``: bits of all elements of the block, row-major."""
    return Encoded(block, dtype, "dense", len(values), (values,))


def sparse(block: TensorBlock, dtype: str, encoding: Encoding, index: Index, values: npt.NDArray[Any]) -> Encoded:
    """``index``: positions within the block; ``values``: bits of these elements alone."""
    if encoding == "bitmap":
        mask = np.zeros(elements(block), np.bool_)
        mask[index] = True
        return Encoded(block, dtype, encoding, len(index), (values, np.packbits(mask, bitorder="little")))
    return Encoded(block, dtype, encoding, len(index), (values, gaps(index, GAPS[encoding])))


def set_bits(bits: Bits) -> Index:
    """Positions of the bits that are set, in one pass of machine code: numpy's takes 3 to 8 times as long."""
    count = int(np.bitwise_count(bits).sum())
    out: Index = np.empty(count + 1, np.int32)
    compiled(_set_bits)(bits, out)
    return out[:count]


def _set_bits(bits: Bits, out: Index) -> None:
    """Without a branch a bit, which no processor could foresee; the place behind the last one is scratch."""
    count = 0
    for at in range(len(bits)):
        byte = bits[at]
        if byte:
            for bit in range(8):
                out[count] = at * 8 + bit
                count += byte >> bit & 1


def overwrite(target: Any, values: Any, marks: Any, gaps: bool, block: tuple[int, int, int]) -> bool:
    """Put values where marks say, in one pass; False: one more or less, or outside.  ``block``: elements, columns,
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
