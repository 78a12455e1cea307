"""Receives the payload of one offer, or an image, and sums every byte once, as it comes.

- Bytes came -> they are served on at once, and count towards the checksum of their piece.
- A connection failed -> the rest comes from the node before that one in the chain, at the end from the writer. A node
  that was given up is asked last for `AVOID_S`.
- A block of an image has a newer version than the one before it -> it is kept: changes make all of them one version.
- A piece is whole, and its checksum is wrong -> `PieceRefused`, and it comes again from its writer alone.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np

from libra_hpc.checksum import crc32
from libra_hpc.errors import error_text
from libra_hpc.protocol.carriers import Peer, PieceRefused, Publish

from .offers import ArrivingOffer
from .pieces import WHOLE, WeightPiece
from .wire import BLOCK_BYTES, IMAGE, Absent, Caller, Came, DamagedError, Fetch, WireError

AVOID_S = 30.0
"""For which a node that was given up is asked last. Half: a hung node costs every other version a pause."""
REFUSALS = 2
"""Checksums of a piece that may be wrong: on the way, and at its writer; then the whole image is taken."""


class PassedOver(Exception):
    """The version will not be finished; another one replaces it."""


class KnownNodes:
    """What all routes know of nodes, by rank."""

    def __init__(self) -> None:
        self.avoided: dict[int, float] = {}
        """Until when they are asked last."""
        self.newest: dict[int, Peer] = {}
        """Where their carriers are; one that ended has another port when it is there again."""

    def published(self, chain: Sequence[Peer]) -> None:
        for peer in chain:
            if self.newest.get(peer.rank) != peer:
                self.newest[peer.rank] = peer
                self.avoided.pop(peer.rank, None)


class Route:
    """Whom to ask for an offer, nearest first."""

    def __init__(self, peers: Sequence[Peer], known: KnownNodes, exhausted: Callable[[Route], None]) -> None:
        """``exhausted`` is called when all were asked in vain since the last byte; it may raise `PassedOver`."""
        self._known, self._exhausted = known, exhausted
        now = time.monotonic()
        self._peers = sorted(peers, key=lambda peer: known.avoided.get(peer.rank, 0.0) > now)
        self._at = self._absent = 0
        self.failures = 0
        """Since the last byte."""
        self.reason = "no node has it"

    @property
    def peer(self) -> Peer:
        peer = self._peers[self._at % len(self._peers)]
        return self._known.newest.get(peer.rank, peer)

    @property
    def nowhere(self) -> bool:
        """Whether no node that answers will ever have it."""
        return self._absent >= len(self._peers)

    def came(self) -> None:
        """Note that a byte came."""
        self.failures = self._absent = 0

    def failed(self, error: Exception) -> None:
        self.reason = f"rank {self.peer.rank}: {error_text(error) or type(error).__name__}"
        if isinstance(error, Absent):
            self._absent += 1
        else:
            self._known.avoided[self.peer.rank] = time.monotonic() + AVOID_S
        self._at += 1
        self.failures += 1
        if self.failures % len(self._peers) == 0:
            self._exhausted(self)


class ArrivingImage:
    """Blocks of other nodes' images, in a file without a name, each at the version of when it was copied."""

    writer = IMAGE

    def __init__(self, folder: Path, size: int) -> None:
        """Raises `OSError` where there is no room."""
        self.size, self._file = size, tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        os.posix_fallocate(self._file.fileno(), 0, size)
        self.view = memoryview(mmap(self._file.fileno(), size))
        self.versions = np.full(-(-size // BLOCK_BYTES), WHOLE)

    @property
    def version(self) -> int:
        """The oldest of its blocks; -1: not all have come."""
        return int(self.versions.min())

    @property
    def newest(self) -> int:
        return int(self.versions.max())

    @property
    def received(self) -> int:
        """Bytes that have arrived."""
        return int(np.count_nonzero(self.versions >= 0)) * BLOCK_BYTES

    def arrived(self, begin: int, end: int, version: int) -> None:
        if begin % BLOCK_BYTES or end != min(begin + BLOCK_BYTES, self.size):
            raise WireError(f"bytes {begin} to {end} are no block of the image")
        self.versions[begin // BLOCK_BYTES] = version

    def block(self, version: int, begin: int, end: int) -> tuple[int, bytes] | None:
        """Its version and bytes; None: it is not here at ``version`` or a newer one."""
        found = int(self.versions[begin // BLOCK_BYTES])
        data = bytes(self.view[begin:end]) if found >= max(version, 0) else b""
        # Another version of it may have begun to arrive.
        return (found, data) if data and self.versions[begin // BLOCK_BYTES] == found else None

    def receive(self, caller: Caller, version: int, route: Route, report: Callable[[Any], None]) -> None:
        """Get the blocks that are not at ``version`` or a newer one; raises `PassedOver`."""

        def failed(error: Exception) -> None:
            if isinstance(error, DamagedError):
                report(PieceRefused(version, IMAGE, f"of rank {route.peer.rank}: {error}"))
            route.failed(error)

        def came(begin: int, end: int, version: int) -> None:
            self.arrived(begin, end, version)
            route.came()

        left = np.flatnonzero(self.versions < version)
        self.versions[left] = WHOLE
        for part in np.split(left, np.flatnonzero(np.diff(left) > 1) + 1) if len(left) else ():
            begin, end = int(part[0]) * BLOCK_BYTES, min(self.size, (int(part[-1]) + 1) * BLOCK_BYTES)
            caller.receive(lambda: route.peer, Fetch(version, IMAGE, begin, end), self.view, came, failed)


class OfferReceiver:
    def __init__(
        self, caller: Caller, offer: ArrivingOffer, route: Callable[[bool], Route], report: Callable[[Any], None]
    ) -> None:
        """``route`` makes the way to the offer, or to its writer alone."""
        self._caller, self._offer, self._route, self._report = caller, offer, route, report
        self._left, self._crc = deque(offer.offer.pieces), 0
        """Pieces of which not all has come, and the checksum of what has come of the first one."""

    def run(self) -> None:
        """Receive the whole offer; raises `PassedOver`."""
        self._receive(0, self._offer.size, self._route(False), self._came)

    def _receive(self, begin: int, end: int, route: Route, came: Came) -> None:
        """[begin, end) of the payload, from whoever has it."""

        def arrived(begin: int, end: int, version: int) -> None:
            route.came()
            came(begin, end, version)

        fetch = Fetch(self._offer.version, self._offer.writer, begin, end)
        self._caller.receive(lambda: route.peer, fetch, self._offer.view, arrived, route.failed)

    def _came(self, begin: int, end: int, version: int) -> None:
        self._offer.arrived(end)
        while self._left and begin < end:
            piece = self._left[0]
            last = piece.at + piece.size
            self._crc = crc32(self._offer.view[max(begin, piece.at) : min(end, last)], self._crc)
            if end < last:
                return
            self._left.popleft()
            crc, self._crc, begin = self._crc, 0, last
            if crc != piece.crc32:
                self._again(piece)

    def _again(self, piece: WeightPiece) -> None:
        offer, end = self._offer, piece.at + piece.size
        for refusals in range(1, REFUSALS + 1):
            reason = f"{piece.block.tensor} has another checksum"
            self._report(PieceRefused(offer.version, offer.writer, reason))
            if refusals == REFUSALS:
                raise PassedOver
            self._receive(piece.at, end, self._route(True), lambda begin, end, version: None)
            if crc32(offer.view[piece.at : end]) == piece.crc32:
                return


def nodes_before(message: Publish, rank: int) -> list[Peer]:
    """Return the peers that get every version before ``rank``, nearest first."""
    ranks = [peer.rank for peer in message.chain]
    place = ranks.index(rank) if rank in ranks else len(ranks)
    return list(reversed(message.chain[:place]))


def nodes_with(message: Publish, writer_rank: int, rank: int) -> list[Peer]:
    """Whom ``rank`` asks for an offer of ``writer_rank``, nearest first; nobody for its own."""
    if writer_rank == rank:
        return []
    before = nodes_before(message, rank)
    return [*before, *(peer for peer in message.chain if peer.rank == writer_rank and peer not in before)]
