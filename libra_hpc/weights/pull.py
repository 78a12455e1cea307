"""Pulls the offers of other nodes, one version after the other, from the nearest node of the chain that has them.

- A version was published -> each offer comes from the node before this one, while that still receives it.
- A connection broke, is silent for `SILENT_S`, or brings nothing for `IDLE_S` -> the node before that one (`Route`).
- No node sends more -> `Stalled`; they are asked again after a pause, `RETRY_S` and then longer.
- An offer of this node is not whole -> `PieceRefused`; the trainers offer the version again, with whole tensors.
- The base is not here, or no node has the version any more -> blocks of other nodes' images, at that version or newer
  ones, and then what changed. A block that came is not asked for again.
- A version was published that needs nothing of those before it -> those that have not begun to arrive are left out.
  One that has is finished, unless no node sends more of it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from msgspec import structs

from libra_hpc.errors import error_text
from libra_hpc.files import write_atomic
from libra_hpc.protocol.carriers import NotStored, Peer, PieceRefused, Publish, Stalled, VersionHere

from .offers import ArrivingOffer, OfferStore, Spares, StoredOffer
from .pieces import Offer, decode_offer, offer_path, read_offer
from .receiver import ArrivingImage, KnownNodes, OfferReceiver, PassedOver, Route, nodes_before, nodes_with
from .server import ImageSource
from .weightfile import WeightFileError
from .wire import IMAGE, Absent, Caller, DamagedError, Fetch, WireError

RETRY_S, RETRY_MAX_S = 0.2, 5.0
"""Pauses after all nodes were asked in vain."""
MOST_THREADS = 1024
"""Never reached: work that waits for other work must not wait for a thread. Threads begin when they are needed."""

Report = Callable[[Any], None]
Landed = StoredOffer | ArrivingImage


class Puller:
    """See the module docstring; `run` is the body of one thread, every other method may be called from any."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        caller: Caller,
        *,
        image: ImageSource,
        store: OfferStore,
        complete: Callable[[tuple[Publish, Sequence[Landed]]], None],
        report: Report,
    ) -> None:
        """``complete`` gets every version, in order, with its offers."""
        self._folder, self._rank, self._caller, self._image = folder, rank, caller, image
        self._arriving: ArrivingImage | None = None
        """An image of which not every block is here."""
        self._spares = Spares(folder)
        self._store, self._complete, self._report = store, complete, report
        self._queue: deque[Publish] = deque()
        self._published = threading.Condition()
        self._known = KnownNodes()
        self._threads = ThreadPoolExecutor(thread_name_prefix="pull", max_workers=MOST_THREADS)
        self.have = -1
        """The newest version that is whole on this node."""
        self.wanted = -1
        """This version gives way to none; -1: no such version."""

    def publish(self, message: Publish) -> None:
        self._store.expect(message.version)
        self._known.published(message.chain)
        with self._published:
            self._queue.append(message)
            self._published.notify_all()

    def run(self) -> None:
        while True:
            with self._published:
                self._published.wait_for(lambda: bool(self._queue))
                message = self._next()
            if message.version > self.have:
                self._obtain(message)

    def _next(self) -> Publish:
        """The oldest version that is needed: for the newest, for those that change it, or as the one that is wanted."""
        places = range(1, len(self._queue))
        if wanted := [place for place, message in enumerate(self._queue) if message.version == self.wanted]:
            places = range(1, wanted[0] + 1)
        for place in reversed(places):
            if self._queue[place].base <= self.have:
                for _ in range(place):
                    self._queue.popleft()
                break
        return self._queue.popleft()

    def _obtain(self, message: Publish) -> None:
        """Get a version, or a newer image; returns early when a newer version needs nothing of it."""
        pause_s = RETRY_S
        while message.version > self.have:
            try:
                if message.base > self.have:
                    self._take_image(message, message.base)
                else:
                    self._take(
                        message, [(writer, nodes_with(message, rank, self._rank)) for writer, rank in message.writers]
                    )
                continue
            except PassedOver:
                if self._replaced(message):
                    return
            except OSError as error:
                self._report(NotStored(message.version, error_text(error)))
            # The first failure may be a call that fails once here; a node asked for its image may wait for this one.
            if pause_s > RETRY_S and message.base <= self.have and self._image_instead(message):
                continue
            self._wait(pause_s)
            pause_s = min(2 * pause_s, RETRY_MAX_S)

    def _image_instead(self, message: Publish) -> bool:
        """Try for another node's image once; whether this node now has the version."""
        try:
            self._take_image(message, message.version)
        except (PassedOver, OSError):
            return False
        return message.version <= self.have

    def _take(self, message: Publish, offers: Sequence[tuple[str, list[Peer]]]) -> None:
        """Pull offers side by side; raises `PassedOver`, and `OSError` where there is no room."""
        began = time.monotonic()
        pulls = [self._threads.submit(self._offer, message, writer, peers) for writer, peers in offers]
        stored, failure = [], None
        for pull in pulls:
            try:
                stored.append(pull.result())
            except (PassedOver, OSError) as error:
                failure = error
        if failure is not None:
            raise failure
        self._here(message, stored, time.monotonic() - began if any(peers for _, peers in offers) else 0.0)

    def _take_image(self, message: Publish, version: int) -> None:
        """Pull an image at ``version`` or later; what comes goes on where it was.  Raises as `_take`."""
        began, others = time.monotonic(), [peer for peer in message.chain if peer.rank != self._rank]
        peers = nodes_before(message, self._rank) or others
        if not peers:
            self._report(Stalled(message.version, IMAGE, 0, "no other node has an image"))
            raise PassedOver
        image = self._arriving = self._image.arriving = self._arriving or ArrivingImage(self._folder, self._image.size)
        route = self._route(message, IMAGE, peers)
        try:
            image.receive(self._caller, version, route, self._report)
        except PassedOver:
            self._report(Stalled(message.version, IMAGE, image.received, route.reason))
            raise
        self._here(structs.replace(message, version=image.version, base=-1), [image], time.monotonic() - began)

    def _here(self, message: Publish, stored: Sequence[Landed], wire_s: float) -> None:
        self._arriving = None
        self.have = message.version
        self._store.whole(self.have)
        files = tuple(str(offer.path) for offer in stored if isinstance(offer, StoredOffer))
        self._report(VersionHere(self.have, message.base, files, sum(offer.size for offer in stored), wire_s))
        self._complete((message, stored))

    def _offer(self, message: Publish, writer: str, peers: list[Peer]) -> StoredOffer:
        """One offer, whole and intact."""
        if not peers:
            return self._own(message, writer)
        manifest, offer = self._manifest(message, Fetch(message.version, writer), peers)
        path = offer_path(self._folder, offer.version, writer)
        stored = ArrivingOffer(offer, manifest, path, self._spares)
        writers = [peer for peer in peers if peer.rank == dict(message.writers).get(writer)] or peers[-1:]
        try:
            self._store.add(stored)

            def route(alone: bool) -> Route:
                return self._route(message, writer, writers if alone else peers, stored)

            OfferReceiver(self._caller, stored, route, self._report).run()
            # Last: whoever sees the manifest finds an intact payload.
            write_atomic(path, manifest)
        except BaseException:
            self._store.drop(stored)
            raise
        return stored

    def _own(self, message: Publish, writer: str) -> StoredOffer:
        """An offer that a process of this node wrote."""
        path = offer_path(self._folder, message.version, writer)
        try:
            offer = read_offer(path)
            self._check(offer, Fetch(message.version, writer), message)
            stored = StoredOffer(offer, path.read_bytes(), path)
            if read_offer(path) != offer:
                raise WeightFileError(f"{path}: it was replaced while it was opened.")
        except (OSError, WeightFileError) as error:
            self._report(PieceRefused(message.version, writer, error_text(error), own=True))
            raise PassedOver from error
        self._store.add(stored)
        return stored

    def _check(self, offer: Offer, fetch: Fetch, message: Publish) -> None:
        """Raise `WeightFileError` for the manifest of anything but what was asked for."""
        if (offer.version, offer.writer) != (fetch.version, fetch.writer) or offer.base > message.base:
            found, asked = f"version {offer.version} of {offer.writer}", f"version {fetch.version} of {fetch.writer}"
            raise WeightFileError(f"A manifest of {found} on {offer.base} came for {asked} on {message.base}.")

    def _manifest(self, message: Publish, fetch: Fetch, peers: list[Peer]) -> tuple[bytes, Offer]:
        """The manifest and its content, from the first node that has it; raises `PassedOver`."""
        route = self._route(message, fetch.writer, peers)
        while True:
            try:
                manifest = self._caller.manifest(route.peer, fetch)
                offer = decode_offer(manifest, fetch.writer)
                self._check(offer, fetch, message)
                return manifest, offer
            except (WeightFileError, DamagedError) as error:
                self._report(PieceRefused(message.version, fetch.writer, f"of rank {route.peer.rank}: {error}"))
                route.failed(WireError(str(error)))
            except (OSError, WireError, Absent) as error:
                route.failed(error)

    def _route(self, message: Publish, writer: str, peers: list[Peer], stored: StoredOffer | None = None) -> Route:
        def exhausted(route: Route) -> None:
            """Give up a version that no node has, or that another one replaces."""
            if not route.nowhere and writer != IMAGE:
                # An offer that no node has any more comes as a part of an image, which reports itself.
                self._report(Stalled(message.version, writer, stored.received if stored else 0, route.reason))
            if route.nowhere or writer == IMAGE or self._replaced(message):
                raise PassedOver
            self._wait(min(RETRY_S * 2 ** (route.failures // 2), RETRY_MAX_S))

        return Route(peers, self._known, exhausted)

    def _replaced(self, message: Publish) -> bool:
        """Whether a version was published that needs nothing of this one."""
        with self._published:
            return any(
                (later.version, -later.base) > (message.version, -message.base) and later.base <= self.have
                for later in self._queue
            )

    def _wait(self, seconds: float) -> None:
        with self._published:
            self._published.wait(seconds)
