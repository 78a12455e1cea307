"""Serves the offers and the image of a node to other carriers: a thread for every caller.

- The offer is arriving -> what there is of it is sent on, then what comes.
- The image is asked for -> a copy of one block after the other, each with its version: the image goes on meanwhile.
- It is not here yet, or no more of it -> a sign of life every `WAITING_S`.
- It will not be here -> ABSENT with the reason; the caller asks another node.
- An image is arriving here -> its blocks are sent on as they come.
- A part of a snapshot is asked for -> its files, as they are (`weights/parts.py`).
- A caller without the secret, or one that does not read for `UNREAD_S` -> its connection is closed; silent ones keep
  nobody out (`Unproven`).
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from pathlib import Path
from typing import Protocol

from libra_hpc.checksum import crc32
from libra_hpc.protocol.callers import PROVE_S, NoProof, Unproven, called_by
from libra_hpc.protocol.joining import guest_secret, is_guest

from .offers import UNKNOWN_S, OfferStore, StoredOffer
from .parts import PART, ServedPart, served_part
from .receiver import ArrivingImage
from .wire import (
    ABSENT,
    BLOCK_BYTES,
    CRC32,
    DATA,
    FRAME_BYTES,
    HEADER,
    IMAGE,
    LEASE,
    LEASED,
    MANIFEST,
    WAITING,
    WAITING_S,
    Absent,
    BandwidthPace,
    Fetch,
    WireError,
    limit_pauses,
    read_fetch,
    shake,
)

UNREAD_S = 10.0
"""For a caller to take any byte: a network that drops packets pauses for up to a few seconds."""

log = logging.getLogger("libra_hpc.carrier")


class ImageSource(Protocol):
    """The node's image."""

    arriving: ArrivingImage | None
    """The next one, which others may have as it comes."""

    @property
    def size(self) -> int:
        """Bytes of its tensors."""

    def block(self, version: int, begin: int, end: int) -> tuple[int, bytes] | None:
        """Bytes of its tensors, and their version, ``version`` or a newer one; None: not yet.  Raises `Absent`."""


class CarrierServer:
    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        store: OfferStore,
        image: ImageSource,
        parts: Path | None = None,
        *,
        rank: int,
        guests: bytes = b"",
        pace: BandwidthPace | None = None,
    ) -> None:
        """``parts``: folder of snapshots; None: it serves none. ``pace``: budget of all that is sent.

        ``guests``: their secret; empty: it is derived from ``secret``.
        """
        self._listener, self._secret, self._store, self._image = listener, secret, store, image
        self._guests, self._pace = guests or guest_secret(secret), pace or BandwidthPace(0.0)
        self._rank, self._parts = rank, parts
        self._unproven = Unproven()

    def start(self) -> None:
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                stream, address = self._listener.accept()
                threading.Thread(target=self._serve, args=(stream, address), daemon=True).start()
            except (OSError, RuntimeError) as error:
                # Too many open files or threads; others are served later.
                if self._listener.fileno() < 0:
                    return
                log.warning("a caller was not accepted: %s", error)
                time.sleep(WAITING_S)

    def _serve(self, stream: socket.socket, address: object) -> None:
        handshake = called_by(b"weights", lambda rank: self._guests if is_guest(rank) else self._secret, self._rank)
        with stream:
            try:
                limit_pauses(stream, PROVE_S, PROVE_S)
                with self._unproven.proving(stream):
                    rank, _ = shake(handshake, stream)
                limit_pauses(stream, UNREAD_S, UNREAD_S)
                while True:
                    # On one machine the bytes that were sent last are the file's own pages, so the offer stays until
                    # the caller asks again or leaves.
                    fetch = read_fetch(stream)
                    sent = self._answer(stream, rank, fetch)  # noqa: F841
            except (WireError, NoProof) as error:
                log.warning("the connection from %s was closed: %s", address, error)
            except OSError:
                pass  # the caller left, or does not read

    def _answer(self, stream: socket.socket, rank: int, fetch: Fetch) -> StoredOffer | ServedPart | None:
        try:
            if fetch.writer == IMAGE:
                self._send_blocks(stream, fetch)
                return None
            offer = self._found(stream, rank, fetch)
            if fetch.end < 0:
                manifest = CRC32.pack(crc32(offer.manifest)) + offer.manifest
                stream.sendall(HEADER.pack(MANIFEST, len(manifest)) + manifest)
            elif 0 <= fetch.begin <= fetch.end <= offer.size:
                self._send_range(stream, offer, fetch.begin, fetch.end)
            else:
                raise WireError(f"bytes {fetch.begin} to {fetch.end} of an offer of {offer.size}")
            return offer
        except Absent as absent:
            reason = str(absent).encode()
            stream.sendall(HEADER.pack(ABSENT, len(reason)) + reason)
            return None

    def _found(self, stream: socket.socket, rank: int, fetch: Fetch) -> StoredOffer | ServedPart:
        if not fetch.writer.startswith(PART):
            return self._store.awaited(fetch.version, fetch.writer, lambda: stream.sendall(HEADER.pack(WAITING, 0)))
        if self._parts is None or is_guest(rank):
            raise Absent("no snapshots are served here")
        return served_part(self._parts, fetch.writer)

    def _send_blocks(self, stream: socket.socket, fetch: Fetch) -> None:
        begin, until = fetch.begin, time.monotonic() + UNKNOWN_S
        if not 0 <= begin <= fetch.end <= self._image.size:
            raise WireError(f"bytes {begin} to {fetch.end} of an image of {self._image.size}")
        while begin < fetch.end:
            end = min(fetch.end, begin - begin % BLOCK_BYTES + BLOCK_BYTES)
            try:
                block = self._image.block(fetch.version, begin, end)
            except Absent:
                if time.monotonic() > until:
                    raise
                block = None
            if block is None:
                stream.sendall(HEADER.pack(WAITING, 0))
                time.sleep(WAITING_S)
                continue
            version, data = block
            lease = HEADER.pack(LEASED, LEASE.size) + LEASE.pack(version, crc32(data))
            stream.sendall(lease + HEADER.pack(DATA, len(data)), socket.MSG_MORE)
            for at in range(0, len(data), step := int(min(len(data), self._pace.most))):
                self._pace.wait(min(step, len(data) - at))
                stream.sendall(data[at : at + step])
            begin += len(data)

    def _send_range(self, stream: socket.socket, offer: StoredOffer | ServedPart, begin: int, end: int) -> None:
        """Frames as the bytes come."""
        while begin < end:
            available = offer.available(begin, end, WAITING_S)
            if available > begin:
                count = int(min(available - begin, FRAME_BYTES, self._pace.most))
                self._pace.wait(count)
                stream.sendall(HEADER.pack(DATA, count), socket.MSG_MORE)
                _send_file(stream, offer.file, begin, count)
                begin += count
            elif offer.removed:
                raise Absent("it was removed")
            else:
                stream.sendall(HEADER.pack(WAITING, 0))


def _send_file(stream: socket.socket, file: int, offset: int, count: int) -> None:
    """From the file's pages, without a copy; raises `OSError` when the caller does not read."""
    while count:
        sent = os.sendfile(stream.fileno(), file, offset, count)
        if not sent:
            raise ConnectionError("the file is shorter than it was")
        offset, count = offset + sent, count - sent
