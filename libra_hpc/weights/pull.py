"""Pulls the offers of other nodes, one version after the other, from the nearest node of the chain that has them.

- A version was published -> each offer comes from the node before this one, while that still receives it.
- A connection broke, is silent for `SILENT_S`, or brings nothing for `IDLE_S` -> the node before that one, at the end
  the owner; what has come stays. A node that was given up is asked last for `AVOID_S`.
- No node sends more -> `Stalled`; they are asked again after a pause, `RETRY_S` and then longer.
- A piece has the wrong checksum -> `PieceRefused`; it comes again from its owner.
- An offer of this node is not whole -> `PieceRefused`; the trainers offer the version again, with whole tensors.
- The base is not here, or no node has the version any more -> the whole image of another node.
- A version was published that needs nothing of those before it -> those that have not begun to arrive are left out.
  One that has is finished, unless no node sends more of it.
"""

from __future__ import annotations

import bisect
import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from mmap import mmap
from pathlib import Path
from typing import Any

from libra_hpc.errors import error_text
from libra_hpc.files import write_atomic
from libra_hpc.protocol.carriers import NotStored, Peer, PieceRefused, Publish, Stalled, VersionHere

from .offers import HeldOffer, OfferStore
from .pieces import Offer, decode_offer, offer_path, payload_path, read_offer
from .server import IMAGE
from .weightfile import WeightFileError
from .wire import CRC32, DATA, MANIFEST, Absent, Fetch, WireError, call, frames, read, read_into, send_fetch

IDLE_S = 10.0
"""For a live node to bring another byte; it may itself be looking for another node."""
AVOID_S = 30.0
"""For which a node that was given up is asked last. Half: a hung node costs every other version a pause."""
RETRY_S, RETRY_MAX_S = 0.2, 5.0
"""Pauses after all nodes were asked in vain."""
STRIPES = 4
"""Streams side by side: one reaches 2.5 GB/s. Double: 400 Gb/s networks, but more threads for every node behind."""
STRIPE_BYTES = 16 << 20
"""Smallest stripe; below, a second stream gains nothing."""
READ_BYTES = 1 << 20
MOST_THREADS = 1024
"""Never reached: work that waits for other work must not wait for a thread. Threads begin when they are needed."""
REFUSALS = 2
"""Checksums of a piece that may be wrong: on the way, and at its owner; then the whole image is taken."""

Report = Callable[[Any], None]


class PassedOver(Exception):
    """The version will not be finished; another one replaces it."""


class Route:
    """Whom to ask for an offer, nearest first."""

    def __init__(self, peers: Sequence[Peer], avoided: dict[int, float], newest: dict[int, Peer]) -> None:
        """``newest``: by rank, where its carrier is now; one that ended has another port when it is there again."""
        self._avoided, self._newest = avoided, newest
        now = time.monotonic()
        self._peers = sorted(peers, key=lambda peer: avoided.get(peer.rank, 0.0) > now)
        self._at = self._absent = 0
        self.failures = 0
        """Since the last byte."""
        self.reason = "no node has it"

    @property
    def peer(self) -> Peer:
        peer = self._peers[self._at % len(self._peers)]
        return self._newest.get(peer.rank, peer)

    @property
    def exhausted(self) -> bool:
        """Whether all were asked in vain since the last byte."""
        return self.failures > 0 and self.failures % len(self._peers) == 0

    @property
    def nowhere(self) -> bool:
        """Whether no node will ever have it."""
        return self._absent >= len(self._peers)

    def came(self) -> None:
        """A byte came."""
        self.failures = self._absent = 0

    def failed(self, error: Exception) -> None:
        self.reason = f"rank {self.peer.rank}: {error_text(error) or type(error).__name__}"
        if isinstance(error, Absent):
            self._absent += 1
        else:
            self._absent = 0
            self._avoided[self.peer.rank] = time.monotonic() + AVOID_S
        self._at += 1
        self.failures += 1


class Puller:
    """See the module docstring; `run` is the body of one thread, every other method may be called from any."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        secret: bytes,
        *,
        store: OfferStore,
        complete: Callable[[Publish, list[HeldOffer]], None],
        report: Report,
    ) -> None:
        """``complete`` gets every version, in order, with its offers."""
        self._folder, self._rank, self._secret = folder, rank, secret
        self._store, self._complete, self._report = store, complete, report
        self._queue: deque[Publish] = deque()
        self._published = threading.Condition()
        self._avoided: dict[int, float] = {}
        self._newest: dict[int, Peer] = {}
        self._pool = ThreadPoolExecutor(thread_name_prefix="pull", max_workers=MOST_THREADS)
        self.have = -1
        """The newest version that is whole on this node."""

    def publish(self, message: Publish) -> None:
        self._store.expect(message.version)
        for peer in message.chain:
            if self._newest.get(peer.rank) != peer:
                self._newest[peer.rank] = peer
                self._avoided.pop(peer.rank, None)
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
        """The oldest version that is needed, for the newest or for those that change it."""
        for place in reversed(range(1, len(self._queue))):
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
                    self._take(message, [(IMAGE, self._sources(message))])
                else:
                    self._take(message, [(owner, self._route_to(message, rank)) for owner, rank in message.owners])
                continue
            except PassedOver:
                if self._replaced(message):
                    return
            except OSError as error:
                self._report(NotStored(message.version, error_text(error)))
            if message.base <= self.have and self._image_instead(message):
                continue
            self._wait(pause_s)
            pause_s = min(2 * pause_s, RETRY_MAX_S)

    def _image_instead(self, message: Publish) -> bool:
        """Try for another node's image once; whether this node now has the version."""
        try:
            self._take(message, [(IMAGE, self._sources(message))])
        except (PassedOver, OSError):
            return False
        return message.version <= self.have

    def _take(self, message: Publish, offers: Sequence[tuple[str, list[Peer]]]) -> None:
        """Pull offers side by side; raises `PassedOver`, and `OSError` where there is no room."""
        began = time.monotonic()
        pulls = [self._pool.submit(self._offer, message, owner, peers) for owner, peers in offers]
        held, failure = [], None
        for pull in pulls:
            try:
                held.append(pull.result())
            except (PassedOver, OSError) as error:
                failure = error
        if failure is not None:
            raise failure
        remote = any(peers for _, peers in offers)
        version, base = held[0].version, message.base
        if offers[0][0] == IMAGE:
            base = -1
            if version <= self.have:
                self._store.drop(held[0])
                raise PassedOver
        self.have = version
        self._store.whole(version)
        found = Publish(version, base, message.owners, message.chain)
        self._report(
            VersionHere(
                version,
                base,
                tuple(str(offer.path) for offer in held),
                sum(offer.size for offer in held),
                time.monotonic() - began if remote else 0.0,
            )
        )
        self._complete(found, held)

    def _offer(self, message: Publish, owner: str, peers: list[Peer]) -> HeldOffer:
        """One offer, whole and intact."""
        version = -1 if owner == IMAGE else message.version
        if not peers:
            if owner == IMAGE:
                self._report(Stalled(message.version, owner, 0, "no other node has an image"))
                raise PassedOver
            return self._own(message, owner)
        route = Route(peers, self._avoided, self._newest)
        manifest, offer = self._manifest(message, Fetch(version, owner), route)
        path = offer_path(self._folder, offer.version, owner)
        held = _allocate(path, offer, manifest, max(1, STRIPES // len(message.owners)))
        try:
            self._store.add(held)
            self._fill(message, held, offer, peers)
            # Last: whoever sees the manifest finds an intact payload.
            write_atomic(path, manifest)
        except BaseException:
            self._store.drop(held)
            raise
        return held

    def _own(self, message: Publish, owner: str) -> HeldOffer:
        """An offer that a process of this node wrote."""
        path = offer_path(self._folder, message.version, owner)
        try:
            offer = read_offer(path)
            self._check(offer, Fetch(message.version, owner), message)
            held = HeldOffer(offer, path.read_bytes(), path)
        except (OSError, WeightFileError) as error:
            self._report(PieceRefused(message.version, owner, error_text(error), own=True))
            raise PassedOver from error
        self._store.add(held)
        return held

    def _check(self, offer: Offer, fetch: Fetch, message: Publish) -> None:
        """Raise `WeightFileError` for the manifest of anything but what was asked for."""
        base = -1 if fetch.owner == IMAGE else message.base
        version = fetch.version if fetch.version >= 0 else offer.version
        if (offer.version, offer.owner) != (version, fetch.owner) or offer.base > base:
            found = f"version {offer.version} of {offer.owner} on {offer.base}"
            raise WeightFileError(f"A manifest of {found} came for version {version} of {fetch.owner} on {base}.")

    def _manifest(self, message: Publish, fetch: Fetch, route: Route) -> tuple[bytes, Offer]:
        """The manifest and what it says, from the first node that has it; raises `PassedOver`."""
        while True:
            try:
                manifest = self._fetch_manifest(route.peer, fetch)
                offer = decode_offer(manifest, fetch.owner)
                self._check(offer, fetch, message)
                return manifest, offer
            except WeightFileError as error:
                self._report(PieceRefused(message.version, fetch.owner, f"of rank {route.peer.rank}: {error}"))
                route.failed(WireError(str(error)))
            except (OSError, WireError, Absent) as error:
                route.failed(error)
            self._pause_if_exhausted(message, fetch.owner, 0, route)

    def _fetch_manifest(self, peer: Peer, fetch: Fetch) -> bytes:
        asked = time.monotonic()
        with call(peer, self._rank, self._secret) as stream:
            send_fetch(stream, fetch)
            for kind, length in frames(stream):
                if kind == MANIFEST:
                    data = read(stream, length)
                    if CRC32.pack(zlib.crc32(data[CRC32.size :])) != data[: CRC32.size]:
                        raise WeightFileError("The manifest has another checksum.")
                    return data[CRC32.size :]
                if kind == DATA:
                    raise WireError("bytes came for a manifest")
                if time.monotonic() - asked > IDLE_S:
                    raise TimeoutError(f"nothing came for {IDLE_S:.0f} s")
        raise ConnectionError("the connection was closed")

    def _fill(self, message: Publish, held: HeldOffer, offer: Offer, peers: list[Peer]) -> None:
        """Receive and verify the payload of an offer."""
        if not offer.size:
            return
        stop = threading.Event()
        with mmap(held.file, 0) as memory:
            view = memoryview(memory)
            try:
                stripes = [
                    self._pool.submit(self._stripe, message, held, number, view, peers, stop)
                    for number in range(len(held.stripes))
                ]
                checks = [
                    self._pool.submit(self._verify, message, held, offer, part, view, stop)
                    for part in _dealt(offer, held.stripes)
                ]
                failure = None
                for work in (*stripes, *checks):
                    try:
                        work.result()
                    except BaseException as error:
                        stop.set()
                        failure = failure or error
                if failure is not None:
                    raise failure
            finally:
                view.release()

    def _stripe(
        self, message: Publish, held: HeldOffer, number: int, view: memoryview, peers: list[Peer], stop: threading.Event
    ) -> None:
        begin, end = held.stripes[number]
        route = Route(peers, self._avoided, self._newest)
        at = begin

        def grown(to: int) -> None:
            nonlocal at
            at = to
            route.came()
            held.arrived(number, to)

        while at < end:
            if stop.is_set():
                raise PassedOver
            try:
                self._range(route.peer, Fetch(held.version, held.owner, at, end), view, grown)
            except (OSError, WireError, Absent) as error:
                route.failed(error)
                if held.owner == IMAGE and isinstance(error, Absent):
                    raise PassedOver from error  # the image has a newer version
                self._pause_if_exhausted(message, held.owner, held.received, route)

    def _range(self, peer: Peer, fetch: Fetch, view: memoryview, grown: Callable[[int], None]) -> None:
        """Receive a range from one node; ``grown`` gets the end of what has come."""
        at, came = fetch.begin, time.monotonic()
        with call(peer, self._rank, self._secret) as stream:
            send_fetch(stream, fetch)
            for kind, length in frames(stream):
                if kind == MANIFEST or at + length > fetch.end:
                    raise WireError("more came than was asked for")
                if kind == DATA:
                    end = at + length
                    while at < end:
                        part = view[at : min(at + READ_BYTES, end)]
                        read_into(stream, part)
                        at += len(part)
                        grown(at)
                    came = time.monotonic()
                    if at == fetch.end:
                        return
                elif time.monotonic() - came > IDLE_S:
                    raise TimeoutError(f"nothing came for {IDLE_S:.0f} s")

    def _verify(
        self,
        message: Publish,
        held: HeldOffer,
        offer: Offer,
        numbers: Sequence[int],
        view: memoryview,
        stop: threading.Event,
    ) -> None:
        """Compare pieces with their checksums as they come; a wrong one comes again from the owner."""
        for number in numbers:
            piece = offer.pieces[number]
            begin, end = piece.at, piece.at + piece.size
            if not held.wait_for(begin, end, stop.is_set):
                raise PassedOver
            refusals = 0
            while zlib.crc32(view[begin:end]) != piece.crc32:
                refusals += 1
                self._report(PieceRefused(held.version, held.owner, f"{piece.block.tensor} has another checksum"))
                if refusals >= REFUSALS or held.owner == IMAGE:
                    raise PassedOver
                self._again(message, held, begin, end, view)

    def _again(self, message: Publish, held: HeldOffer, begin: int, end: int, view: memoryview) -> None:
        """Receive a piece from its owner alone."""
        rank = dict(message.owners)[held.owner]
        route = Route([peer for peer in message.chain if peer.rank == rank], self._avoided, self._newest)
        at = begin

        def grown(to: int) -> None:
            nonlocal at
            at = to
            route.came()

        while at < end:
            try:
                self._range(route.peer, Fetch(held.version, held.owner, at, end), view, grown)
            except (OSError, WireError, Absent) as error:
                route.failed(error)
                self._pause_if_exhausted(message, held.owner, held.received, route)

    def _pause_if_exhausted(self, message: Publish, owner: str, received: int, route: Route) -> None:
        """After all nodes were asked in vain: give up a version that no node has, or that another one replaces."""
        if not route.exhausted:
            return
        if not route.nowhere or owner == IMAGE:
            # An offer that no node has any more comes as a part of an image.
            self._report(Stalled(message.version, owner, received, route.reason))
        if route.nowhere or owner == IMAGE or self._replaced(message):
            raise PassedOver
        self._wait(min(RETRY_S * 2 ** (route.failures // 2), RETRY_MAX_S))

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

    def _sources(self, message: Publish) -> list[Peer]:
        """Nodes whose image may be taken: the nearest one before this, at the end the first one of the chain."""
        return self._before(message) or [peer for peer in message.chain if peer.rank != self._rank]

    def _route_to(self, message: Publish, owner_rank: int) -> list[Peer]:
        """Nobody for an offer of this node."""
        if owner_rank == self._rank:
            return []
        before = self._before(message)
        owner = [peer for peer in message.chain if peer.rank == owner_rank and peer not in before]
        return [*before, *owner]

    def _before(self, message: Publish) -> list[Peer]:
        ranks = [peer.rank for peer in message.chain]
        place = ranks.index(self._rank) if self._rank in ranks else len(ranks)
        return list(reversed(message.chain[:place]))


def _allocate(path: Path, offer: Offer, manifest: bytes, stripes: int) -> HeldOffer:
    """An offer that has yet to arrive, with room for all of it; raises `OSError`."""
    payload = payload_path(path)
    payload.unlink(missing_ok=True)
    try:
        with payload.open("wb") as file:
            # All pages now: a full file system is an error here, and the end of the process at a mapped page.
            if offer.size:
                os.posix_fallocate(file.fileno(), 0, offer.size)
    except OSError:
        payload.unlink(missing_ok=True)
        raise
    count = max(1, min(stripes, offer.size // STRIPE_BYTES))
    begins = [offer.size * number // count for number in range(count)]
    return HeldOffer(offer, manifest, path, stripes=begins)


def _dealt(offer: Offer, stripes: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Numbers of pieces in the order in which they will be there, dealt to as many threads as there are stripes."""
    begins = [begin for begin, _ in stripes]

    def there(number: int) -> int:
        end = offer.pieces[number].at + offer.pieces[number].size
        return end - begins[bisect.bisect_left(begins, end) - 1] if end else 0

    order = sorted(range(len(offer.pieces)), key=there)
    return [order[first :: len(stripes)] for first in range(len(stripes))]
