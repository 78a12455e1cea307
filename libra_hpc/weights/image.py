"""The image of a node: the newest weights as one safetensors file in shared memory, brought up to date in place.

- `Image.apply` -> offers of one version are written into it, under an exclusive lock of the file.
- `Image.fill` -> all of it is replaced by blocks of several versions; the changes up to the newest of them follow.
- A writer was killed half-way -> the same version again ends what it began: values overwrite.  Until then no reader
  finds a version, as between blocks and the last of their changes.
- `reading` -> its version, which stays the same within the block; the kernel frees the lock of a dead reader.
- `pin` -> a copy of one version, beside an image that goes on; `write_pinned` -> a checkpoint's file of it.

Needs no torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from libra_hpc.checksum import crc32
from libra_hpc.errors import error_text
from libra_hpc.files import write_atomic

from .delta import compiled, overwrite, piece_values
from .pieces import VALUES, WHOLE, Buffer, Offer, WeightPiece, elements, offer_fault
from .weightfile import COPY_BYTES, FLOATS, LENGTH, PLAIN, WeightFileError, Wrapped, file_header, tensor_bytes

IMAGE_FILE = "image.safetensors"


class _State(msgspec.Struct, frozen=True):
    version: int = WHOLE
    changing: int = WHOLE
    """The newest version of which it may have a part; as ``version``: none."""

    @property
    def whole(self) -> bool:
        return 0 <= self.version == self.changing


_decoder = msgspec.json.Decoder(_State)


class NoVersion(WeightFileError):
    """The image has no whole version at the moment."""


class Image:
    """The writing end; one process of a node has it."""

    def __init__(self, folder: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> None:
        """Open the image of ``folder``, or make it with all its pages.

        Raises `WeightFileError` where there is no room, or the image of another model.
        """
        self.shapes, self.dtype = dict(shapes), dtype
        self.path = folder / IMAGE_FILE
        header, places = file_header(self.shapes, dtype)
        self._places = {name: begin for name, (begin, _) in places.items()}
        self.offset = len(header)
        """Byte where the first tensor begins."""
        self._bytes = tensor_bytes(self.shapes, dtype)
        if not self.path.exists():
            self._create(header)
        self._file = self.path.open("r+b")
        if self._file.read(len(header)) != header or self._file.seek(0, 2) != self.offset + self._bytes:
            self._file.close()
            raise WeightFileError(f"{self.path}: it is the image of another model.")
        self._memory = mmap.mmap(self._file.fileno(), 0, mmap.MAP_SHARED | mmap.MAP_POPULATE)

    @property
    def version(self) -> int:
        """-1: it holds none yet, or its writer ended while it changed the first."""
        return _state(self.path).version

    def apply(self, version: int, offers: Sequence[tuple[Offer, Buffer]]) -> None:
        """Bring it to ``version`` with the offers of all writers and their payloads, whose checksums were compared.

        Raises `WeightFileError` before anything is changed: for offers of another model, and those that change
        another version than this one.  An offer that names elements outside of its block is found later: the image
        then has no version until one arrives whole.
        """
        state = _state(self.path)
        self._check(version, offers, state)
        whole = any(offer.base == WHOLE for offer, _ in offers)
        newest = version if whole else max(version, state.changing)
        with _locked(self._file, fcntl.LOCK_EX):
            self._note(_State(state.version, max(newest, state.changing)))
            for offer, payload in offers:
                for piece in offer.pieces:
                    self._write(piece, payload)
            self._note(_State(version, newest))

    def fill(self, version: int, newest: int, tensors: memoryview) -> None:
        """Replace it by blocks of versions from ``version`` to ``newest``; changes overwrite, so they make it whole."""
        state, at = _state(self.path), self.offset
        with _locked(self._file, fcntl.LOCK_EX):
            self._note(_State(state.version, max(newest, state.changing)))
            for part in _parts(tensors):
                at += os.pwrite(self._file.fileno(), part, at)
            self._note(_State(version, newest))

    def block(self, begin: int, end: int) -> tuple[int, bytes] | None:
        """Its version, and a copy of these bytes of its tensors; None: it is not whole.  For who keeps writers away."""
        state = _state(self.path)
        return (state.version, os.pread(self._file.fileno(), end - begin, self.offset + begin)) if state.whole else None

    def _create(self, header: bytes) -> None:
        whole = self.offset + self._bytes
        partial = self.path.with_suffix(".part")
        try:
            with partial.open("w+b") as file:
                # Writing to a mapped page that a full file system cannot give would kill the process.
                os.posix_fallocate(file.fileno(), 0, whole)
                file.write(header)
            _state_path(self.path).unlink(missing_ok=True)
            partial.replace(self.path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise WeightFileError(f"{self.path}: no image of {whole:,} bytes ({error_text(error)}).") from error

    def _check(self, version: int, offers: Sequence[tuple[Offer, Buffer]], state: _State) -> None:
        for offer, _ in offers:
            if offer.version != version or offer.base != offers[0][0].base:
                raise WeightFileError(f"{offer.writer} offers {offer.version} of {offer.base}, expected {version}.")
            if fault := offer_fault(offer, self.shapes, self.dtype):
                raise WeightFileError(f"{offer.writer} offers version {version}: {fault}.")
        base = offers[0][0].base if offers else state.version
        if base == WHOLE:
            pieces = [piece for offer, _ in offers for piece in offer.pieces]
            if (found := sum(elements(piece.block) * FLOATS[piece.dtype] for piece in pieces)) != self._bytes:
                raise WeightFileError(f"Version {version} has {found:,} bytes, and the model {self._bytes:,}.")
        elif base != state.version or state.version < state.changing < version:
            has = state.version if state.version == state.changing else f"a part of {state.changing}"
            raise WeightFileError(f"{self.path}: it has {has}, and version {version} changes {base}.")

    def _write(self, piece: WeightPiece, payload: Buffer) -> None:
        name, offset, rows, cols, stride = piece.block
        target = np.frombuffer(
            self._memory, VALUES[piece.dtype], math.prod(self.shapes[name]), self.offset + self._places[name]
        )[offset:]
        if piece.encoding == "dense":
            _, values = piece_values(piece, payload)
            strides = (stride * target.itemsize, target.itemsize)
            block = np.lib.stride_tricks.as_strided(target, (rows, cols), strides)
            block[:] = values.reshape(rows, cols)
            return
        values = np.frombuffer(payload, target.dtype, piece.changed, piece.at)
        gaps = np.frombuffer(memoryview(payload)[piece.at + values.nbytes : piece.at + piece.size], np.uint8)
        one_row = rows == 1 or stride == cols
        width = elements(piece.block) if one_row else cols
        if not compiled(overwrite)(target, values, gaps, (elements(piece.block), width, stride)):
            raise WeightFileError(f"A piece of {piece.block.tensor} has values outside of its block.")

    def _note(self, state: _State) -> None:
        write_atomic(_state_path(self.path), msgspec.json.encode(state))


@contextlib.contextmanager
def reading(path: Path) -> Iterator[int]:
    """The version of an image, which does not change within the block; raises `WeightFileError` where there is none."""
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(_locked(held.enter_context(path.open("rb")), fcntl.LOCK_SH))
            state = _state(path)
        except OSError as error:
            raise WeightFileError(f"{path}: {error_text(error)}.") from error
        if not state.whole:
            raise NoVersion(f"{path}: it holds no whole version.")
        yield state.version


def pin(image: Path) -> tuple[int, BinaryIO]:
    """Copy an image aside in its file system, without a name; returns its version and the copy, which ends when closed.

    Raises `WeightFileError` where there is no version, and `OSError` where there is no room.
    """
    copy = tempfile.TemporaryFile(dir=image.parent)  # noqa: SIM115
    try:
        with reading(image) as version, image.open("rb") as source, _pages(source) as pages:
            for part in _parts(pages):
                copy.write(part)
            copy.flush()
    except BaseException:
        copy.close()
        raise
    return version, copy


def write_pinned(copy: BinaryIO, target: Path, wrapped: Wrapped = PLAIN) -> tuple[int, int]:
    """Write a copy to a file of another file system, durably; returns its size and CRC-32.

    ``wrapped``: what surrounds the tensors in the file of a wrapper.

    Whoever is killed meanwhile leaves ``target`` as it was. Raises `OSError`, also where there is no room.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    size = crc = 0
    try:
        with partial.open("wb") as file, _pages(copy) as pages:
            own = LENGTH + int.from_bytes(pages[:LENGTH], "little") if wrapped.header else 0
            for part in chain([memoryview(wrapped.header)], _parts(pages[own:]), wrapped.others()):
                crc = crc32(part, crc)
                size += file.write(part)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        partial.unlink(missing_ok=True)
    return size, crc


@contextlib.contextmanager
def _pages(file: BinaryIO) -> Iterator[memoryview]:
    with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory, memoryview(memory) as view:
        yield view


def _parts(pages: memoryview) -> Iterator[memoryview]:
    for begin in range(0, len(pages), COPY_BYTES):
        with pages[begin : begin + COPY_BYTES] as part:
            yield part


def _state_path(image: Path) -> Path:
    return image.with_suffix(".state")


def _state(image: Path) -> _State:
    try:
        return _decoder.decode(_state_path(image).read_bytes())
    except FileNotFoundError:
        return _State()


@contextlib.contextmanager
def _locked(file: BinaryIO, kind: int) -> Iterator[None]:
    fcntl.flock(file, kind)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)
