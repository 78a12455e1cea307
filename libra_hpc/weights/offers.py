"""The offers of weight versions that a node has, whole or arriving, and what is served of them.

An offer is a manifest and a payload file in the node's shared memory (`libra_hpc.weights.pieces`). What has arrived
of it is served on at once.

- Offers take more than the cap -> the oldest go that image and engines of this node have. A slower node that lacks
  them takes the image.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from functools import cached_property
from mmap import MAP_POPULATE, MAP_SHARED, mmap
from pathlib import Path

from .pieces import Offer, payload_path
from .wire import WAITING_S, Absent

SPARE = "spare-{}.pieces"
UNKNOWN_S = 2.0
"""For a version to be published here that a caller already asks for: both messages are sent at the same time."""
KEEP_VERSIONS = 2
"""Newest versions that stay whatever the cap: a node behind this one may have begun with either."""


class PayloadFile:
    """A file with all its pages; ``view`` are its bytes."""

    file = -1

    def __init__(self, path: Path, size: int) -> None:
        """Raises `OSError` where there is no room: that is the end of the process at a mapped page."""
        self.path, self.size = path, size
        path.unlink(missing_ok=True)
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            if size:
                os.posix_fallocate(self.file, 0, size)
            self.view = memoryview(mmap(self.file, size) if size else b"")
        except OSError:
            path.unlink()
            raise

    def __del__(self) -> None:
        if self.file >= 0:
            os.close(self.file)

    def rename(self, path: Path) -> None:
        self.path.replace(path)
        self.path = path


class Spares:
    """Payload files of removed offers: their pages are used again.

    A page of shared memory costs more to get and to give back than its bytes cost to receive.

    - An offer was removed, and nobody reads it -> its file is a spare, under a name of its own.
    - A payload of the same size arrives -> it goes into the spare.
    - A payload of another size arrives, as when only changes follow -> the spares are freed.
    """

    def __init__(self, folder: Path) -> None:
        """Free the files that an earlier process left."""
        self._folder = folder
        self._spares: list[PayloadFile] = []
        self._taking = threading.Lock()
        for path in folder.glob(SPARE.format("*")):
            path.unlink()

    def payload(self, path: Path, size: int) -> PayloadFile:
        """Room for a payload; raises `OSError`."""
        with self._taking:
            for spare in self._spares:
                if spare.size == size:
                    self._spares.remove(spare)
                    spare.rename(path)
                    return spare
            while self._spares:
                self._spares.pop().path.unlink(missing_ok=True)
        return PayloadFile(path, size)

    def retire(self, payload: PayloadFile) -> None:
        """Its offer is removed, and others may still read it: it has another name until `keep`."""
        with contextlib.suppress(FileNotFoundError):
            payload.rename(self._folder / SPARE.format(payload.file))

    def keep(self, payload: PayloadFile) -> None:
        """Keep a payload file that nobody reads, for another payload."""
        self._spares.append(payload)


class StoredOffer:
    """One offer; threads that serve it call `available`."""

    file, removed = -1, False

    def __init__(self, offer: Offer, manifest: bytes, path: Path) -> None:
        """``manifest``: of the offer, as it is served; ``path``: that of the manifest."""
        self.offer, self.manifest, self.path = offer, manifest, path
        self.version, self.writer, self.size = offer.version, offer.writer, offer.size
        self.payload = payload_path(path)
        self.file = self._open()
        self.received = offer.size
        """Bytes that are here, from the first on."""
        self._grown = threading.Condition()

    def __del__(self) -> None:
        if self.file >= 0:
            os.close(self.file)

    def _open(self) -> int:
        # Writable: memory that is only readable cannot be registered with a network device.
        return os.open(self.payload, os.O_RDWR)

    @cached_property
    def view(self) -> memoryview:
        """The offer's payload."""
        return memoryview(mmap(self.file, self.size, MAP_SHARED | MAP_POPULATE) if self.size else b"")

    def available(self, begin: int, end: int, wait_s: float = 0.0) -> int:
        """End of what is there of [begin, end); waits until that is more than nothing."""
        with self._grown:
            self._grown.wait_for(lambda: self.received > begin or self.removed, wait_s)
            return max(begin, min(self.received, end))

    def remove(self) -> None:
        """Its files go; what reads them now may end."""
        with self._grown:
            self.removed = True
            self._grown.notify_all()
        self.path.unlink(missing_ok=True)
        self._unlink()

    def _unlink(self) -> None:
        self.payload.unlink(missing_ok=True)


class ArrivingOffer(StoredOffer):
    """One that comes from other nodes, into room that was made for it."""

    def __init__(self, offer: Offer, manifest: bytes, path: Path, spares: Spares) -> None:
        """Raises `OSError` where there is no room."""
        self._spares = spares
        self._room = spares.payload(payload_path(path), offer.size)
        super().__init__(offer, manifest, path)
        self.received = 0

    def __del__(self) -> None:
        if self.removed:
            self._spares.keep(self._room)

    def _open(self) -> int:
        return self._room.file

    def _unlink(self) -> None:
        self._spares.retire(self._room)

    @cached_property
    def view(self) -> memoryview:
        return self._room.view

    def arrived(self, end: int) -> None:
        """Bytes up to ``end`` are in the file."""
        with self._grown:
            self.received = end
            self._grown.notify_all()


class OfferStore:
    """All offers of a node, by version and writer."""

    def __init__(self, cap_bytes: int) -> None:
        self._cap = cap_bytes
        self._offers: dict[tuple[int, str], StoredOffer] = {}
        self._added = threading.Condition()
        self._expected = -1
        self._whole = -1

    def expect(self, version: int) -> None:
        """A version was published; its offers will be here."""
        with self._added:
            self._expected = max(self._expected, version)
            self._added.notify_all()

    def add(self, offer: StoredOffer) -> None:
        with self._added:
            self._offers[offer.version, offer.writer] = offer
            self._added.notify_all()

    def drop(self, offer: StoredOffer) -> None:
        with self._added:
            if self._offers.get((offer.version, offer.writer)) is offer:
                del self._offers[offer.version, offer.writer]
        offer.remove()

    def whole(self, version: int) -> None:
        """This node needs nothing more of versions up to this one."""
        with self._added:
            self._whole = max(self._whole, version)
            self._added.notify_all()

    def awaited(self, version: int, writer: str, waits: Callable[[], object]) -> StoredOffer:
        """An offer once it begins to arrive; ``waits`` is called every `WAITING_S` until then, and may raise.

        Raises `Absent` where it does not come.
        """
        unknown_until = time.monotonic() + UNKNOWN_S
        while True:
            with self._added:
                self._added.wait_for(lambda: (version, writer) in self._offers or self._whole >= version, WAITING_S)
                if offer := self._offers.get((version, writer)):
                    return offer
                if self._whole >= version:
                    raise Absent(f"version {version} is not stored any more")
                if self._expected < version and time.monotonic() > unknown_until:
                    raise Absent(f"version {version} was not published here")
            waits()

    def prune(self, applied: int) -> None:
        """Remove what is beyond the cap, oldest first; image and engines have ``applied``, and need what follows."""
        with self._added:
            versions = sorted({version for version, _ in self._offers})
            bytes_of = {v: sum(offer.size for offer in self._offers.values() if offer.version == v) for v in versions}
            left, old = sum(bytes_of.values()), []
            for version in versions[:-KEEP_VERSIONS]:
                if left > self._cap and version <= min(applied, self._whole):
                    old += [offer for offer in self._offers.values() if offer.version == version]
                    left -= bytes_of[version]
        for offer in old:
            self.drop(offer)
