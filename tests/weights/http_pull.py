"""Another cluster, which pulls the weights of a run over HTTP for engines of its own; it has address and secret alone.

- The deltas from what is here to the newest version are served -> of their pieces those that meet the wanted blocks.
- A part of a block is older than they go back -> it comes from the served image, at any version. Values overwrite, so
  the deltas from the oldest part on make all parts one version, while the image of the run goes on.
- A piece has another checksum -> its tensor comes from the image; a delta is gone, torn or forged -> all does.
- A connection broke, or an answer is not proven -> the same bytes again, over another one; what was proven stays.
- The secret is another one -> another start of the run, whose versions are others: all comes from the image.

Readers of the own image find it at a whole version only (`libra_hpc.weights.image.reading`).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlencode

import msgspec

from libra_hpc.checksum import crc32
from libra_hpc.files import write_atomic
from libra_hpc.models.architecture import Architecture
from libra_hpc.weights.blocks import engine_slices, overlap
from libra_hpc.weights.image import Image, _locked, _State, reading
from libra_hpc.weights.pieces import WHOLE, Offer, TensorBlock, WeightPiece, decode_offer, elements
from libra_hpc.weights.served_weights import ServedDelta, ServedVersion
from libra_hpc.weights.transport.http_proof import PART_BYTES, NotServed, Refused
from libra_hpc.weights.weightfile import FLOATS, WeightFileError
from tests.weights.http_caller import HttpCaller, HttpSource, Received

PADDING = 4
"""Bytes between two pieces, at least, if another is between them: one alone begins at a multiple of its element's."""
STREAMS = 4
"""Requests side by side: between clusters a round trip takes as long as 4 MiB."""
LOOKS = 20
"""At what is served, within a call: a slow link may find the deltas gone when it has the image."""

log = logging.getLogger("libra_hpc.weights")


def wanted_blocks(shape: Architecture, tp: int, ranks: Sequence[int]) -> list[TensorBlock]:
    """What these tensor-parallel ranks of an engine have, each block once."""
    slices = (slices for rank in ranks for slices in engine_slices(shape, tp, rank).values())
    return list(dict.fromkeys(one.block for some in slices for one in some))


def offer_target(version: int, writer: str, part: str) -> str:
    return f"/offers/{version}/{writer}/{part}"


def image_target(block: TensorBlock) -> str:
    return "/image?" + urlencode(block._asdict())


class PulledImage(Image):
    """One whose blocks come one by one."""

    def mixed(self, oldest: int = WHOLE, newest: int = WHOLE) -> None:
        """Its blocks have versions from ``oldest`` to ``newest``, so that no reader finds one unless they are equal.

        Offers that change ``oldest`` to ``newest`` may then be applied: they overwrite what is newer with the same.
        """
        with _locked(self._file, fcntl.LOCK_EX):
            self._note(_State(oldest, newest))

    def place(self, block: TensorBlock, data: bytes) -> None:
        """Write all elements of a block of a `mixed` image, row-major; raises `WeightFileError` for another length."""
        if len(data) != (size := elements(block) * FLOATS[self.dtype]):
            raise WeightFileError(f"{block} has {len(data):,} bytes, expected {size:,}.")
        piece = WeightPiece(block, self.dtype, "dense", elements(block), 0, size, 0)
        self._write(piece, memoryview(data))


class HttpPuller:
    """One caller at a time; a call that failed goes on where it was when it is made again."""

    def __init__(self, source: HttpSource, image: PulledImage, blocks: Iterable[TensorBlock]) -> None:
        """``blocks``: of the image, which are held at its version; see `wanted_blocks`."""
        self._image, self._caller = image, HttpCaller(source)
        self._pool = ThreadPoolExecutor(STREAMS, "http-pull")
        self._mark = image.path.with_suffix(".source")
        self._identity = hashlib.sha256(source.secret).hexdigest().encode()
        have = WHOLE
        with contextlib.suppress(WeightFileError, FileNotFoundError), reading(image.path) as version:
            have = version if self._mark.read_bytes() == self._identity else WHOLE
        self._whole = have != WHOLE
        """Whether readers find a version."""
        self._parts = {part: have for block in blocks for part in _parts(block, FLOATS[image.dtype])}
        """The version of each."""
        self._by_tensor: dict[str, list[TensorBlock]] = defaultdict(list)
        for part in self._parts:
            self._by_tensor[part.tensor].append(part)

    def pull(self) -> int:
        """Bring the image to the newest version; returns it.

        Raises `NotServed` when there is none yet, `OSError` or `Refused` when the server is out of reach or has another
        secret, and `WeightFileError` when it has another model.
        """
        for _ in range(LOOKS):
            served = msgspec.json.decode(self._caller.read("/weights").data, type=ServedVersion)
            if served.dtype != self._image.dtype:
                raise WeightFileError(f"Weights of type {served.dtype} are served, expected {self._image.dtype}.")
            if stale := [part for part, version in self._parts.items() if version < served.oldest]:
                self._fill(stale)
            elif self._update(served):
                return served.version
        raise NotServed(f"what is served was gone {LOOKS} times before it was here")

    def _fill(self, stale: Sequence[TensorBlock]) -> None:
        """Write parts from the served image; no reader finds a version until they are one."""
        self._image.mixed()
        self._whole = False
        write_atomic(self._mark, self._identity)
        found = self._each((image_target(part), 0, None) for part in stale)
        for part, (version, data) in zip(stale, found, strict=True):
            self._image.place(part, data)
            self._parts[part] = version

    def _update(self, served: ServedVersion) -> bool:
        """Bring all parts to the served version; False: some have to come from the image, or are newer."""
        oldest, newest = min(self._parts.values()), served.version
        if max(self._parts.values()) > newest:
            return False
        offers: list[tuple[Offer, Path]] = []
        try:
            for delta in served.deltas:
                for writer in delta.writers if delta.version > oldest else ():
                    path = self._image.path.with_name(f"pull-{delta.version:08d}-{writer}.pieces")
                    offer = self._offer(delta, writer, path)
                    # One change from the oldest part to the newest version, as values of later offers overwrite.
                    offers.append((msgspec.structs.replace(offer, version=newest, base=oldest), path))
            if min(self._parts.values()) < oldest:
                return False
            if not self._whole:
                self._image.mixed(oldest, newest)
            if offers:
                self._image.apply(newest, offers)
        except (NotServed, Refused, WeightFileError) as error:
            log.warning("all weights come whole: %s", error)
            self._parts = dict.fromkeys(self._parts, WHOLE)
            return False
        finally:
            for path in self._image.path.parent.glob("pull-*.pieces"):
                path.unlink()
        self._parts, self._whole = dict.fromkeys(self._parts, newest), True
        return True

    def _offer(self, delta: ServedDelta, writer: str, path: Path) -> Offer:
        """What of an offer is of use here, with its payload at ``path``; a damaged piece makes its tensor stale."""
        offer = decode_offer(self._caller.read(offer_target(delta.version, writer, "manifest")).data, writer)
        if (offer.version, offer.writer) != (delta.version, writer) or offer.base > delta.base:
            raise WeightFileError(
                f"An offer of {offer.version} of {offer.writer} came for {delta.version} of {writer}."
            )
        pieces = tuple(piece for piece in offer.pieces if self._meets(piece, delta.version))
        target, spans = offer_target(delta.version, writer, "payload"), list(_spans(pieces))
        with path.open("w+b") as file:
            file.truncate(offer.size)
            found = self._each((target, *span) for span in spans)
            for (begin, _), (_, data) in zip(spans, found, strict=True):
                file.seek(begin)
                file.write(data)
            for piece in pieces:
                file.seek(piece.at)
                if crc32(file.read(piece.size)) != piece.crc32:
                    name = piece.block.tensor
                    log.warning("a piece of %s in version %d of %s is damaged", name, delta.version, writer)
                    self._parts |= dict.fromkeys(self._by_tensor[name], WHOLE)
        return msgspec.structs.replace(offer, pieces=pieces)

    def _meets(self, piece: WeightPiece, version: int) -> bool:
        """Whether a part has an element of the piece, and one of its tensor is older.

        A piece may write older values into a newer part, so those after it must then be taken too.
        """
        parts = self._by_tensor.get(piece.block.tensor, ())
        return any(overlap(part, piece.block) for part in parts) and version > min(self._parts[part] for part in parts)

    def _each(self, asked: Iterable[tuple[str, int, int | None]]) -> Iterator[Received]:
        """What `HttpCaller.read` returns, in order; some are asked for ahead."""
        ahead: deque[Future[Received]] = deque()
        try:
            for one in asked:
                ahead.append(self._pool.submit(self._caller.read, *one))
                if len(ahead) == 2 * STREAMS:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()


def _parts(block: TensorBlock, itemsize: int) -> Iterator[TensorBlock]:
    """Rows of a block that come in one answer."""
    rows = max(1, PART_BYTES // (block.cols * itemsize))
    for row in range(0, block.rows, rows):
        yield block._replace(offset=block.offset + row * block.stride, rows=min(rows, block.rows - row))


def _spans(pieces: Iterable[WeightPiece]) -> Iterator[tuple[int, int]]:
    """Ranges of the payload that are the pieces, each at most as long as an answer."""
    begin = end = 0
    for piece in pieces:
        if piece.at - end >= PADDING:
            yield from _cut(begin, end)
            begin = piece.at
        end = piece.at + piece.size
    yield from _cut(begin, end)


def _cut(begin: int, end: int) -> Iterator[tuple[int, int]]:
    return ((at, min(at + PART_BYTES, end)) for at in range(begin, end, PART_BYTES))
