"""Weights for another cluster: what a node of the run serves over HTTP, and the calls of a guest that lives there.

Resources (`libra_hpc.weights.transport.http_proof`):

- ``/config``: the run's configuration, without what may be a secret.
- ``/offers/VERSION/WRITER/manifest``, ``/payload``: bytes of an offer, as they come (`libra_hpc.weights.pieces`).
- ``/image?tensor=NAME&offset=0&rows=1&cols=8&stride=8``: elements of a block of the image, row-major.

A connection breaks, or an answer is not proven -> `Caller` asks again from the last byte that came.
"""

from __future__ import annotations

import bisect
import contextlib
import hmac
import http.client
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import msgspec
import numpy as np
import numpy.typing as npt

from libra_hpc.errors import error_text
from libra_hpc.models.tensors import Shapes
from libra_hpc.protocol.carriers import Peer
from libra_hpc.protocol.joining import is_guest

from .image import IMAGE_FILE, reading
from .offers import OfferStore
from .pieces import VALUES, TensorBlock
from .transport.http_proof import PART_BYTES, PROOF, SCHEME, VERSION, Refused, answer_proof, request_proof
from .transport.http_server import UNREAD_S, Part
from .transport.token_bucket import BandwidthPace
from .weightfile import WeightFileError, file_header, tensor_type
from .wire import BLOCK_BYTES, IMAGE, WAITING_S, Absent, Caller, DamagedError, Fetch, WireError, end_idle

Elements = npt.NDArray[np.generic]
Blocks = Mapping[str, Sequence[TensorBlock]]
"""By tensor."""


class ServedWeights:
    """What a node serves: its image and its offers."""

    def __init__(self, folder: Path, shapes: Shapes, dtype: str, store: OfferStore, config: bytes) -> None:
        """``config``: what is served of the run's configuration, JSON."""
        self._store, self._config = store, config
        self._image, self._shapes, self._dtype = folder / IMAGE_FILE, shapes, dtype
        header, places = file_header(shapes, dtype)
        self._starts = {name: len(header) + begin for name, (begin, _) in places.items()}

    def read(self, target: str, begin: int, end: int) -> Part:
        """Bytes [begin, end) of a resource, or fewer.

        Raises `Absent`, `Refused` for what is no resource, and `TimeoutError` where no more of an offer comes.
        """
        url = urlsplit(target)
        match url.path.split("/"):
            case ["", "config"]:
                return _part(0, self._config, begin, end)
            case ["", "offers", version, writer, "manifest" | "payload" as kind] if version.isdecimal():
                return self._offer(int(version), writer, kind, begin, end)
            case ["", "image"]:
                return self._block(self._asked(url.query), begin, end)
        raise Refused(f"there is no {url.path}")

    def _offer(self, version: int, writer: str, kind: str, begin: int, end: int) -> Part:
        asked = time.monotonic()
        offer = self._store.awaited(version, writer, lambda: end_idle(asked))
        if kind == "manifest":
            return _part(version, offer.manifest, begin, end)
        end = min(end, offer.size)
        while (have := offer.available(begin, end, WAITING_S)) <= begin < end:
            if offer.removed:
                raise Absent("it was removed")
            end_idle(asked)
        return Part(version, offer.size, os.pread(offer.file, max(0, have - begin), begin))

    def _asked(self, query: str) -> TensorBlock:
        values = parse_qs(query)
        try:
            words = [values.get(name, [""])[0] for name in TensorBlock._fields]
            block = msgspec.convert(words, TensorBlock, strict=False)
        except msgspec.ValidationError as error:
            raise Refused(f"no block of a tensor ({error})") from error
        size = math.prod(self._shapes.get(block.tensor, (0,)))
        last = block.offset + (block.rows - 1) * block.stride + block.cols
        if min(block.offset, block.rows - 1, block.cols - 1, block.stride - block.cols) < 0 or last > size:
            raise Refused(f"{block} is no block of {size:,} elements")
        return block

    def _block(self, block: TensorBlock, begin: int, end: int) -> Part:
        tensor, offset, rows, cols, stride = block
        kind = np.dtype(VALUES[tensor_type(tensor, self._dtype)])
        row = cols * kind.itemsize
        end = min(end, rows * row)
        if begin >= end:
            raise Refused(f"{block} has no byte {begin:,}")
        first, last = begin // row, -(-end // row)
        part = TensorBlock(tensor, 0, last - first, cols, stride)
        at = self._starts[tensor] + (offset + first * stride) * kind.itemsize
        try:
            with reading(self._image) as version:
                memory = np.memmap(self._image, kind, "r", at, ((part.rows - 1) * stride + cols,))
                data = _rectangle(memory, part).tobytes()
        except WeightFileError as error:
            raise Absent(str(error)) from error
        return Part(version, rows * row, data[begin - first * row : end - first * row])


class HttpStream:
    """One connection to a node of the run."""

    def __init__(self, url: str, secret: bytes) -> None:
        """``url``: http://HOST:PORT.  Raises `OSError`."""
        self._secret, self._nonce = secret, ""
        with _broken():
            self._http = http.client.HTTPConnection(urlsplit(url).netloc, timeout=UNREAD_S)
            self._http.connect()
        # Another connection has another nonce.
        self._http.auto_open = 0
        self.close = self._http.close

    def whole(self, target: str) -> tuple[int, bytes]:
        """Version and bytes of a resource; the oldest version, where they come in several answers."""
        version, total, data = self.read(target, 0, PART_BYTES)
        while len(data) < total:
            part = self.read(target, len(data), len(data) + PART_BYTES)
            version, data = min(version, part.version), data + part.data
        return version, data

    def read(self, target: str, begin: int, end: int) -> Part:
        """At least one of these bytes of a resource; raises `OSError`, `WireError` and `Absent`."""
        span, own = f"bytes={begin}-{end - 1}", secrets.token_hex(16)
        request = request_proof(self._secret, (self._nonce, own), target, span)
        with _broken():
            self._http.request("GET", target, headers={"Range": span, "Authorization": f"{SCHEME} {own} {request}"})
            answer = self._http.getresponse()
            data = answer.read(PART_BYTES)
        if answer.status == 401:
            if self._nonce:
                raise WireError("it has another secret")
            self._nonce = answer.getheader("WWW-Authenticate", "").removeprefix(f"{SCHEME} ") or "none"
            return self.read(target, begin, end)
        version, sent = answer.getheader(VERSION, ""), answer.getheader("Content-Range", "")
        expected = answer_proof(self._secret, request, (answer.status, version, sent), data)
        if not hmac.compare_digest(expected.encode(), answer.getheader(PROOF, "").encode()):
            raise DamagedError("An answer has no proof.")
        if answer.status != 206 or not 0 < len(data) <= end - begin:
            raise (Absent if answer.status == 404 else WireError)(data.decode(errors="replace"))
        return Part(int(version), int(sent.rpartition("/")[2]), data)


class ImagePlaces:
    """Where the elements that a node gets of an image lie in its bytes."""

    def __init__(self, shapes: Shapes, dtype: str, own: Blocks | None = None) -> None:
        """``own``: of an engine's rank, such as those of `engine_slices`; None: all, for a node with whole engines."""
        self._dtype, self._places = dtype, list(file_header(shapes, dtype)[1].items())
        self._own = own or {name: [TensorBlock(name, 0, math.prod(size), 1, 1)] for name, size in shapes.items()}

    def pull(self, stream: HttpStream, version: int, begin: int, end: int, image: memoryview) -> int:
        """Get what is own of bytes [begin, end) at ``version`` or a newer one; returns the oldest that came."""
        versions = list[int]()
        for (first, last), kind, block in self._blocks(begin, end):
            found, data = stream.whole("/image?" + urlencode(block._asdict()))
            if found < version:
                raise Absent(f"its image has version {found}")
            flat = np.frombuffer(image[first:last], kind)
            _rectangle(flat, block)[:] = np.frombuffer(data, kind).reshape(block.rows, block.cols)
            versions.append(found)
        return min(versions, default=version)

    def _blocks(self, begin: int, end: int) -> Iterator[tuple[tuple[int, int], np.dtype[Any], TensorBlock]]:
        """Bytes of a tensor, their type, and whole rows of its blocks."""
        number = bisect.bisect_right(self._places, begin, key=lambda place: place[1][0])
        for name, (low, high) in self._places[max(0, number - 1) :]:
            kind = np.dtype(VALUES[tensor_type(name, self._dtype)])
            if low >= end:
                return
            for block in self._own.get(name, ()):
                first = max(0, ((begin - low) // kind.itemsize - block.offset) // block.stride)
                last = min(block.rows, -((block.offset - (end - low) // kind.itemsize) // block.stride))
                if first < last:
                    at = block.offset + first * block.stride
                    yield (low, high), kind, block._replace(offset=at, rows=last - first)


class OutsideCaller(Caller):
    """Asks a run in another cluster at one URL, and other guests as every carrier does."""

    def __init__(self, url: str, rank: int, secret: bytes, pace: BandwidthPace, places: ImagePlaces) -> None:
        super().__init__(rank, secret, pace)
        self._url, self._places = url, places

    def manifest(self, peer: Peer, fetch: Fetch) -> bytes:
        if is_guest(peer.rank):
            return super().manifest(peer, fetch)
        with contextlib.closing(HttpStream(self._url, self._secret)) as stream:
            return stream.whole(f"/offers/{fetch.version}/{fetch.writer}/manifest")[1]

    def _receive(self, peer: Peer, fetch: Fetch, payload: memoryview, arrived: Callable[[int, int], None]) -> None:
        if is_guest(peer.rank):
            super()._receive(peer, fetch, payload, arrived)
            return
        at, image = fetch.begin, fetch.writer == IMAGE
        target = f"/offers/{fetch.version}/{fetch.writer}/payload"
        with contextlib.closing(HttpStream(self._url, self._secret)) as stream:
            while at < fetch.end:
                end, version = min(at + (BLOCK_BYTES if image else PART_BYTES), fetch.end), fetch.version
                self._pace.wait(end - at)
                if image:
                    version = self._places.pull(stream, version, at, end, payload)
                else:
                    data = stream.read(target, at, end).data
                    end = at + len(data)
                    payload[at:end] = data
                arrived(end, version)
                at = end


def _part(version: int, data: bytes, begin: int, end: int) -> Part:
    return Part(version, len(data), data[begin:end])


def _rectangle(flat: Elements, block: TensorBlock) -> Elements:
    strides = (block.stride * flat.itemsize, flat.itemsize)
    return np.lib.stride_tricks.as_strided(flat[block.offset :], (block.rows, block.cols), strides)


@contextlib.contextmanager
def _broken() -> Iterator[None]:
    try:
        yield
    except http.client.HTTPException as error:
        raise ConnectionError(error_text(error) or type(error).__name__) from error
