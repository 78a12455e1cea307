"""Publishes weight versions to the carriers of all nodes, in the order in which they pass them on.

- The chain: the nodes of the core, then those that get new weights: own before guests, neighbours of the network side
  by side, slow ones last. So each node sends to one, and a link between switches carries a version once.
- No own node gets anything from a guest.
- A node takes longer than the one before it -> it is slow; those behind it wait for it and are not.
- The carriers of the core are not all there yet -> the version is published once they are.
- A carrier started -> it gets the newest versions again; one of the core has another port, so all others learn it.
- A node lacks a version -> the newest one is published to it again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from libra_hpc.protocol.agents import MeshMessage, WeightsCurrent, WeightsHere, WeightsWanted
from libra_hpc.protocol.carriers import Peer, Publish
from libra_hpc.protocol.joining import is_guest

from .requested_offers import Published

SLOW = 2.0
"""Times the seconds per byte of the quickest node, and of the one before; half of it is the noise of busy nodes."""

AGAIN = 4
"""Newest versions that a carrier gets when it starts: what the one before it had not yet received or written into the
image. Half: too few when updates are quick; double: nothing, as an image of another node is then as near."""


class WeightPublisher:
    def __init__(
        self, core: tuple[int, ...], receivers: Callable[[], Sequence[int]], send: Callable[[int, MeshMessage], None]
    ) -> None:
        """``receivers``: ranks that get new weights."""
        self._core, self._receivers, self._send = core, receivers, send
        self._carriers: dict[int, Peer] = {}
        self._seconds: dict[int, tuple[float, float]] = {}
        """Per byte, of the last version that came to a node and to the one before it."""
        self._before: dict[int, int] = {}
        self._versions: deque[Published] = deque(maxlen=AGAIN)
        self._waits = False

    def publish(self, newest: Published) -> None:
        if newest.base < 0:
            self._versions.clear()
        self._versions.append(newest)
        self._waits = not all(rank in self._carriers for rank in self._core)
        if not self._waits:
            self._to_all([newest])

    def on_here(self, message: WeightsHere) -> None:
        """A node has a version, or a carrier that serves."""
        if message.carrier is not None:
            self._on_carrier(message.rank, message.carrier)
        elif message.bytes and message.wire_s:
            before = self._seconds.get(self._before.get(message.rank, -1), (0.0, 0.0))[0]
            self._seconds[message.rank] = message.wire_s / message.bytes, before

    def _on_carrier(self, rank: int, peer: Peer) -> None:
        versions = list(self._versions)
        self._carriers[rank] = peer
        self._seconds.pop(rank, None)
        if self._waits:
            self._waits = not all(rank in self._carriers for rank in self._core)
            if not self._waits:
                self._to_all(versions)
        elif rank in self._core:
            self._to_all(versions[-1:], but=rank)
            self._send_to(rank, versions, self._chain())
        elif rank in self._receivers():
            self._send_to(rank, versions, self._chain())

    def on_wanted(self, message: WeightsWanted) -> None:
        newest = list(self._versions)[-1:]
        if not newest or newest[0].version <= message.have:
            self._send(message.rank, WeightsCurrent(message.have))
        elif not self._waits:
            self._send_to(message.rank, newest, self._chain(message.rank))

    def lost(self, rank: int) -> None:
        """A node was lost, and its carrier with it."""
        self._carriers.pop(rank, None)
        self._seconds.pop(rank, None)

    def _chain(self, joins: int = -1) -> tuple[Peer, ...]:
        others = [rank for rank in self._receivers() if rank not in self._core]
        if joins >= 0 and joins not in (*self._core, *others):
            others.append(joins)
        others = [rank for rank in others if rank in self._carriers]
        others.sort(key=lambda rank: (self._slow(rank), is_guest(rank), self._carriers[rank].place))
        return tuple(self._carriers[rank] for rank in (*self._core, *others) if rank in self._carriers)

    def _slow(self, rank: int) -> float:
        """Seconds per byte of a node that is slow itself; 0.0: it is not."""
        own, before = self._seconds.get(rank, (0.0, 0.0))
        return own if own > SLOW * max(before, min(self._seconds.values(), default=(0.0, 0.0))[0]) else 0.0

    def _to_all(self, versions: Sequence[Published], but: int = -1) -> None:
        chain = self._chain()
        for peer in chain:
            if peer.rank != but:
                self._send_to(peer.rank, versions, chain)

    def _send_to(self, rank: int, versions: Sequence[Published], chain: tuple[Peer, ...]) -> None:
        passed = tuple(peer for peer in chain if is_guest(rank) or not is_guest(peer.rank))
        ranks = [peer.rank for peer in passed]
        self._before[rank] = dict(zip(ranks[1:], ranks, strict=False)).get(rank, -1)
        for version, base, writers in versions:
            self._send(rank, Publish(version, base, writers, passed))
