"""Offers: the weights of one version that one process owns, as a payload file and a manifest in shared memory.

A piece holds values of a strided block of one Hugging Face tensor.  It overwrites, so applying it twice does no harm.
The values come first, then which elements they are:

- ``dense``: all of them, row-major.
- ``gap8``: a byte each, elements skipped before it; `MOST_GAP` skips as many and holds no value.

A piece begins at a multiple of its element's bytes, as the tensors of an image do.  The manifest is renamed into place
after the payload is whole.  It comes from another process, perhaps of another cluster: `decode_offer` believes nothing.
Needs no torch.
"""

from __future__ import annotations

import math
import mmap
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from libra_hpc.checksum import crc32, crc32_combine
from libra_hpc.errors import error_text
from libra_hpc.files import write_atomic
from libra_hpc.models.published import Shapes

from .weightfile import WeightFileError, tensor_type

Buffer = bytes | bytearray | memoryview | mmap.mmap
Encoding = Literal["gap8", "dense"]
VALUES: dict[str, npt.DTypeLike] = {"BF16": np.int16, "F32": np.int32}
"""Integers with the bits of an element, by safetensors' name of the type."""
MOST_GAP = 255
WHOLE = -1
"""The base of an offer that needs no version before it."""
WRITERS, PART_BYTES = 8, 8 << 20
"""Threads that write a payload, and bytes that one sums and writes at a time: a page of shared memory costs more to get
than its bytes to copy. Half the threads: half as fast on a free node; double: in the way of the other processes."""
WRITER = re.compile(r"[A-Za-z0-9.]{1,32}")


class TensorBlock(NamedTuple):
    """``rows`` x ``cols`` elements of a tensor; (r, c) is at ``offset + r * stride + c`` of the flattened tensor."""

    tensor: str
    offset: int
    rows: int
    cols: int
    stride: int


class WeightPiece(msgspec.Struct, frozen=True, array_like=True):
    block: TensorBlock
    dtype: str
    """``BF16`` or ``F32``; the latter is always dense."""
    encoding: Encoding
    changed: int
    """Elements whose value is in it."""
    at: int
    """Where its bytes begin in the payload."""
    size: int
    crc32: int


class Offer(msgspec.Struct, frozen=True):
    """What turns ``base`` into ``version``, as far as ``writer`` has it; blocks do not overlap."""

    version: int
    base: int
    """`WHOLE`: whole tensors."""
    writer: str
    """The process that wrote it, for example ``t0.1``: node and local rank."""
    pieces: tuple[WeightPiece, ...]
    size: int
    """Bytes of the payload."""


_decoder = msgspec.msgpack.Decoder(Offer)


class Encoded(NamedTuple):
    """A piece before it has a place in a payload."""

    block: TensorBlock
    dtype: str
    encoding: Encoding
    changed: int
    data: Iterable[npt.NDArray[Any]]
    """Its bytes, in order: contiguous arrays, each valid until the next is asked for."""


def offer_path(folder: Path, version: int, writer: str) -> Path:
    """The manifest's path."""
    return folder / f"offer-{version:08d}-{writer}.manifest"


def payload_path(manifest: Path) -> Path:
    return manifest.with_suffix(".pieces")


def write_offer(folder: Path, version: int, base: int, writer: str, encoded: Iterable[Encoded]) -> Offer:
    """Write payload and manifest; an earlier offer of the name is replaced.  Raises `OSError` when there is no room.

    Readers of a replaced payload keep the old file: it is removed, not written over.
    """
    manifest = offer_path(folder, version, writer)
    manifest.unlink(missing_ok=True)
    payload = payload_path(manifest)
    payload.unlink(missing_ok=True)
    pieces: list[WeightPiece] = []
    at = 0
    try:
        with payload.open("xb") as file, ThreadPoolExecutor(WRITERS) as threads:
            for block, dtype, encoding, changed, data in encoded:
                begin = at = at + -at % np.dtype(VALUES[dtype]).itemsize
                crc = 0
                for array in data:
                    whole = array.data.cast("B")
                    cuts = range(0, len(whole), PART_BYTES)
                    parts = [(at + cut, whole[cut : cut + PART_BYTES]) for cut in cuts]
                    found = (threads.map if len(parts) > 1 else map)(partial(_write, file.fileno()), parts)
                    for (_, part), own in zip(parts, found, strict=True):
                        crc = crc32_combine(crc, own, len(part))
                    at += len(whole)
                pieces.append(WeightPiece(block, dtype, encoding, changed, begin, at - begin, crc))
    except OSError:
        payload.unlink(missing_ok=True)
        raise
    offer = Offer(version, base, writer, tuple(pieces), at)
    write_atomic(manifest, msgspec.msgpack.encode(offer))
    return offer


def _write(file: int, part: tuple[int, memoryview]) -> int:
    """Write bytes to their place; returns their checksum."""
    at, left = part
    crc = crc32(left)
    while left:
        done = os.pwrite(file, left, at)
        at, left = at + done, left[done:]
    return crc


def read_offer(path: Path) -> Offer:
    """The offer of a manifest whose whole payload lies beside it; raises `WeightFileError`."""
    try:
        data = path.read_bytes()
        size = payload_path(path).stat().st_size
    except OSError as error:
        raise WeightFileError(f"{path}: {error_text(error)}.") from error
    offer = decode_offer(data, str(path))
    if path.name != offer_path(path.parent, offer.version, offer.writer).name:
        raise WeightFileError(f"{path}: it holds version {offer.version} of {offer.writer}.")
    if size != offer.size:
        raise WeightFileError(f"{path}: its payload has {size:,} bytes, expected {offer.size:,}.")
    return offer


def decode_offer(data: bytes, origin: str) -> Offer:
    """The offer of a manifest's bytes; ``origin`` names them in errors.  Raises `WeightFileError`."""
    try:
        offer = _decoder.decode(data)
    except (ValueError, RecursionError) as error:
        raise WeightFileError(f"{origin}: no whole manifest ({error_text(error)}).") from error
    if not WRITER.fullmatch(offer.writer) or not WHOLE <= offer.base < offer.version:
        raise WeightFileError(f"{origin}: version {offer.version} of {offer.writer!r} cannot change {offer.base}.")
    end = 0
    for piece in offer.pieces:
        if fault := _piece_fault(piece, end, offer.base == WHOLE):
            raise WeightFileError(f"{origin}: a piece of {piece.block.tensor} {fault}.")
        end = piece.at + piece.size
    if end != offer.size:
        raise WeightFileError(f"{origin}: its pieces have {end:,} bytes, its payload {offer.size:,}.")
    return offer


def elements(block: TensorBlock) -> int:
    return block.rows * block.cols


def _piece_fault(piece: WeightPiece, end: int, whole: bool) -> str:
    """Why a piece that follows one that ends at ``end`` cannot be; empty: it can."""
    _, offset, rows, cols, stride = piece.block
    count = elements(piece.block)
    if offset < 0 or rows < 1 or cols < 1 or (rows > 1 and stride < cols):
        return f"is no block: {rows} x {cols} elements from {offset} in steps of {stride}"
    if piece.dtype not in VALUES:
        return f"has type {piece.dtype!r}, not one of {', '.join(VALUES)}"
    if piece.encoding != "dense" and (whole or piece.dtype == "F32"):
        return f"is encoded as {piece.encoding}, and should be dense"
    if not 0 < piece.changed <= count or (piece.encoding == "dense" and piece.changed != count):
        return f"has {piece.changed:,} values for {count:,} elements"
    if piece.at != end + -end % np.dtype(VALUES[piece.dtype]).itemsize:
        return f"begins at byte {piece.at:,}, and the one before it ends at {end:,}"
    low, high = _sizes(piece)
    return "" if low <= piece.size <= high else f"has {piece.size:,} bytes, which {piece.encoding} cannot have"


def _sizes(piece: WeightPiece) -> tuple[int, int]:
    """Fewest and most bytes of such a piece."""
    values = piece.changed * np.dtype(VALUES[piece.dtype]).itemsize
    if piece.encoding == "dense":
        return values, values
    fewest = values + piece.changed
    return fewest, fewest + elements(piece.block) // MOST_GAP


def offer_fault(offer: Offer, shapes: Shapes, dtype: str) -> str:
    """How an offer does not fit a model in ``dtype`` with these tensors, as a sentence; empty: it does."""
    for block, found, *_ in (msgspec.structs.astuple(piece) for piece in offer.pieces):
        if block.tensor not in shapes:
            return f"{block.tensor} is no tensor of the model"
        if found != (expected := tensor_type(block.tensor, dtype)):
            return f"{block.tensor} is {found}, expected {expected}"
        last = block.offset + (block.rows - 1) * block.stride + block.cols
        if last > (size := math.prod(shapes[block.tensor])):
            return f"a piece of {block.tensor} ends at element {last:,} of {size:,}"
    return ""
