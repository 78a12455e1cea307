"""The weights of a node as resources for another cluster, which may have another layout.

- ``/weights``: `ServedVersion`, JSON.
- ``/offers/VERSION/WRITER/manifest``, ``/payload``: bytes of an offer (`libra_hpc.weights.pieces`).
- ``/image?tensor=NAME&offset=0&rows=1&cols=8&stride=8``: elements of a block of the image, row-major.
"""

from __future__ import annotations

import contextlib
import hmac
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import msgspec
import numpy as np

from .image import IMAGE_FILE, reading
from .offers import OfferStore, StoredOffer
from .pieces import VALUES, WHOLE, TensorBlock
from .transport.http_proof import NotServed, Refused
from .transport.http_server import Part
from .weightfile import WeightFileError, file_header


class ServedDelta(msgspec.Struct, frozen=True):
    """The offers of ``writers`` turn ``base`` into ``version``."""

    version: int
    base: int
    writers: tuple[str, ...]


class ServedVersion(msgspec.Struct, frozen=True):
    """The newest version, and the deltas that lead to it, oldest first; the image has it, or one after it."""

    version: int
    dtype: str
    """Type of an element, in the words of safetensors files."""
    deltas: tuple[ServedDelta, ...]

    @property
    def oldest(self) -> int:
        """The version from which the deltas lead to the newest."""
        return self.deltas[0].base if self.deltas else self.version


def reading_secret(secret: bytes) -> bytes:
    """What another cluster gets of a run's secret: it reads weights, and cannot pose as a node."""
    return hmac.digest(secret, b"weights over http", "sha256")


class ServedWeights:
    """What is served: the image of a node, and those of its offers that lead to the image's version."""

    def __init__(self, folder: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str, store: OfferStore) -> None:
        self._store = store
        self._image, self._shapes, self._dtype = folder / IMAGE_FILE, shapes, dtype
        header, places = file_header(shapes, dtype)
        self._starts = {name: len(header) + begin for name, (begin, _) in places.items()}
        self._deltas: dict[int, ServedDelta] = {}

    def add(self, delta: ServedDelta) -> None:
        """All offers of a version are in the store."""
        stored = {version: one for version, one in self._deltas.items() if self._stored(one)}
        # Replaced, not changed: others read it.
        self._deltas = stored if delta.base == WHOLE else {**stored, delta.version: delta}

    def read(self, target: str, begin: int, end: int) -> Part:
        """Bytes [begin, end) of a resource, or fewer; raises `NotServed`, and `Refused` for what is no resource."""
        url = urlsplit(target)
        match url.path.split("/"):
            case ["", "weights"]:
                served = self._served()
                return _part(served.version, msgspec.json.encode(served), begin, end)
            case ["", "offers", version, writer, "manifest" | "payload" as kind]:
                offer = self._offer(version, writer)
                if kind == "manifest":
                    return _part(offer.version, offer.manifest, begin, end)
                data = os.pread(offer.file, max(0, min(end, offer.size) - begin), begin)
                return Part(offer.version, offer.size, data)
            case ["", "image"]:
                return self._block(self._asked(url.query), begin, end)
        raise Refused(f"there is no {url.path}")

    def _served(self) -> ServedVersion:
        with self._lease() as version:
            pass
        chain: list[ServedDelta] = []
        at = version
        while (delta := self._deltas.get(at)) and self._stored(delta):
            chain.append(delta)
            at = delta.base
        return ServedVersion(version, self._dtype, tuple(reversed(chain)))

    def _stored(self, delta: ServedDelta) -> bool:
        offers = (self._store.find(delta.version, writer, 0.0, 0.0) for writer in delta.writers)
        return all(isinstance(offer, StoredOffer) for offer in offers)

    def _offer(self, version: str, writer: str) -> StoredOffer:
        offer = self._store.find(int(version), writer, 0.0, 0.0) if version.isdecimal() else None
        if not isinstance(offer, StoredOffer) or int(version) not in self._deltas:
            raise NotServed(f"version {version} of {writer} is not stored")
        return offer

    def _asked(self, query: str) -> TensorBlock:
        values = parse_qs(query)
        try:
            words = [values.get(name, [""])[0] for name in TensorBlock._fields]
            block = msgspec.convert(words, TensorBlock, strict=False)
        except msgspec.ValidationError as error:
            raise Refused(f"no block of a tensor ({error})") from error
        size = int(np.prod(self._shapes.get(block.tensor, (0,))))
        last = block.offset + (block.rows - 1) * block.stride + block.cols
        if min(block.offset, block.rows - 1, block.cols - 1, block.stride - block.cols) < 0 or last > size:
            raise Refused(f"{block} is no block of {size:,} elements")
        return block

    def _block(self, block: TensorBlock, begin: int, end: int) -> Part:
        tensor, offset, rows, cols, stride = block
        kind = np.dtype(VALUES[self._dtype])
        row = cols * kind.itemsize
        end = min(end, rows * row)
        if begin >= end:
            raise Refused(f"{block} has no byte {begin:,}")
        first, last = begin // row, -(-end // row)
        count = (last - first - 1) * stride + cols
        strides = (stride * kind.itemsize, kind.itemsize)
        at = self._starts[tensor] + (offset + first * stride) * kind.itemsize
        with self._lease() as version:
            memory = np.memmap(self._image, kind, "r", at, (count,))
            data = np.lib.stride_tricks.as_strided(memory, (last - first, cols), strides).tobytes()
        return Part(version, rows * row, data[begin - first * row : end - first * row])

    @contextlib.contextmanager
    def _lease(self) -> Iterator[int]:
        """The version of the image, which stays the same within the block; raises `NotServed`."""
        try:
            with reading(self._image) as version:
                yield version
        except WeightFileError as error:
            raise NotServed(str(error)) from error


def _part(version: int, data: bytes, begin: int, end: int) -> Part:
    return Part(version, len(data), data[begin:end])
