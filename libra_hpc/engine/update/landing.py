"""Where the elements of offered pieces lie in the parameters of one vLLM worker: pure, in numpy.

A piece names elements of a block of a Hugging Face tensor; a `Slice` is where a rectangle of a tensor lies in a
flattened parameter. What costs time is per changed element alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from libra_hpc.weights.blocks import Slice
from libra_hpc.weights.pieces import TensorBlock

Places = npt.NDArray[np.int64]


class Landed(NamedTuple):
    """Elements of a piece that a slice has."""

    places: Places
    """Int64[m], in the flattened parameter."""
    chosen: slice | Places
    """Which elements of the piece."""


def tensor_places(block: TensorBlock, index: Places) -> Places:
    """Positions within a block, ascending, as positions in its flattened tensor, ascending."""
    if block.rows == 1 or block.stride == block.cols:
        return index + block.offset
    rows, cols = np.divmod(index, block.cols)
    return np.asarray(block.offset + rows * block.stride + cols)


def landed(places: Places, where: Slice) -> Landed:
    """The elements of ``where`` among ``places``, ascending positions in its tensor."""
    _, offset, rows, cols, width = where.block
    first, last = np.searchsorted(places, (offset, offset + (rows - 1) * width + cols))
    inside = places[first:last] - offset
    if rows == 1 or (cols == width and where.stride == cols):
        return Landed(inside + where.offset, slice(int(first), int(last)))
    at, col = np.divmod(inside, width)
    kept = np.flatnonzero(col < cols)
    return Landed(where.offset + at[kept] * where.stride + col[kept], first + kept)


def transposed(places: Places, rows: int, cols: int) -> Places:
    """Positions in matrices of ``rows`` x ``cols``, one behind the other, after each is transposed."""
    matrix, rest = np.divmod(places, rows * cols)
    row, col = np.divmod(rest, cols)
    return np.asarray(matrix * rows * cols + col * rows + row)
