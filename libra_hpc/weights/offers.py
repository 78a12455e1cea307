"""The offers of weight versions that a node has, whole or arriving, and what is served of them.

An offer is a manifest and a payload file in the node's shared memory (`libra_hpc.weights.pieces`). It arrives in
*stripes*, ranges that are pulled side by side. What has arrived of a stripe is served on at once.

- Offers take more than the cap -> the oldest go that image and engines of this node have. A slower node that lacks
  them takes the image.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from .pieces import Offer, payload_path

KEEP_VERSIONS = 2
"""Newest versions that stay whatever the cap: a node behind this one may have begun with either."""


class HeldOffer:
    """One offer; threads that pull it call `arrived`, threads that serve it `available`."""

    def __init__(
        self, offer: Offer, manifest: bytes, path: Path, *, start: int = 0, stripes: Sequence[int] = ()
    ) -> None:
        """``manifest``: of the offer, as it is served; ``path``: that of the manifest, or of the image.

        ``start``: where the payload begins in its file.  ``stripes``: where each begins, for an offer that has yet to
        arrive; none: it is whole.
        """
        self.offer, self.manifest, self.path = offer, manifest, path
        self.version, self.owner, self.size = offer.version, offer.owner, offer.size
        self.payload = path if start else payload_path(path)
        self.start = start
        self.file = os.open(self.payload, os.O_RDWR)
        self.removed = False
        self._begins = list(stripes) or [0]
        self._ends = [*self._begins[1:], offer.size]
        self._have = list(self._begins) if stripes else [offer.size]
        self._grown = threading.Condition()

    def __del__(self) -> None:
        os.close(self.file)

    @property
    def stripes(self) -> list[tuple[int, int]]:
        return list(zip(self._begins, self._ends, strict=True))

    @property
    def received(self) -> int:
        return sum(have - begin for have, begin in zip(self._have, self._begins, strict=True))

    def arrived(self, stripe: int, end: int) -> None:
        """Bytes of a stripe up to ``end`` are in the file."""
        with self._grown:
            self._have[stripe] = end
            self._grown.notify_all()

    def available(self, begin: int, end: int, wait_s: float = 0.0) -> int:
        """End of what is there of [begin, end) without a hole; waits until that is more than nothing."""
        with self._grown:
            self._grown.wait_for(lambda: self._reach(begin, end) > begin or self.removed, wait_s)
            return self._reach(begin, end)

    def wait_for(self, begin: int, end: int, given_up: Callable[[], bool]) -> bool:
        """Wait until all of [begin, end) is there; False once ``given_up``."""
        with self._grown:
            while self._reach(begin, end) < end:
                if given_up():
                    return False
                self._grown.wait(0.2)
        return True

    def remove(self) -> None:
        """Its files go; what reads them now may end."""
        with self._grown:
            self.removed = True
            self._grown.notify_all()
        self.payload.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    def _reach(self, begin: int, end: int) -> int:
        at = begin
        for first, last, have in zip(self._begins, self._ends, self._have, strict=True):
            if first <= at < last:
                at = max(at, min(have, end))
                if at < last:
                    break
        return min(at, end)


class OfferStore:
    """All offers of a node, by version and owner."""

    def __init__(self, cap_bytes: int) -> None:
        self._cap = cap_bytes
        self._offers: dict[tuple[int, str], HeldOffer] = {}
        self._added = threading.Condition()
        self._expected = -1
        self._whole = -1

    def expect(self, version: int) -> None:
        """A version was published; its offers will be here."""
        with self._added:
            self._expected = max(self._expected, version)
            self._added.notify_all()

    def add(self, offer: HeldOffer) -> None:
        with self._added:
            self._offers[offer.version, offer.owner] = offer
            self._added.notify_all()

    def drop(self, offer: HeldOffer) -> None:
        with self._added:
            if self._offers.get((offer.version, offer.owner)) is offer:
                del self._offers[offer.version, offer.owner]
        offer.remove()

    def whole(self, version: int) -> None:
        """This node needs nothing more of versions up to this one."""
        with self._added:
            self._whole = max(self._whole, version)
            self._added.notify_all()

    def find(self, version: int, owner: str, wait_s: float, unknown_s: float) -> HeldOffer | str | None:
        """The offer, None while it may still come, or why it is not here.

        Waits at most ``wait_s`` for it. ``unknown_s``: for how long a version that was never published may come.
        """

        def settled() -> bool:
            return (version, owner) in self._offers or self._whole >= version

        deadline = time.monotonic() + wait_s
        with self._added:
            self._added.wait_for(settled, deadline - time.monotonic())
            if offer := self._offers.get((version, owner)):
                return offer
            if self._whole >= version:
                return f"version {version} is not held any more"
            if self._expected < version and unknown_s <= 0.0:
                return f"version {version} was not published here"
            return None

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
