"""Publishes weight versions to the carriers of all nodes, in the order in which they pass them on.

- The chain: the nodes of the core, then those that get new weights: own before guests, neighbours of the network side
  by side, slow ones last. So each node sends to one, and a link between switches carries a version once.
- A node knows its part of the chain: the core, or the `NEAR` nodes before it and the first `FIRST`.
- No own node gets anything from a guest.
- A node takes longer than the one before it -> it is slow; those behind it wait for it and are not.
- All nodes of the core have offered a version, and their carriers are there -> it is published.
- An answer is lost, a node failed, or the core was rebuilt -> the next offer has whole tensors: what the trainers
  offered last is then not what all nodes have.
- A carrier started -> it gets the newest versions again; one of the core has another port, so all others learn it.
- A node lacks a version -> the newest one is published to it again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from libra_hpc.process.retry import Retry
from libra_hpc.protocol.agents import MeshMessage, WeightsCurrent, WeightsHere, WeightsWanted
from libra_hpc.protocol.carriers import Peer, Publish
from libra_hpc.protocol.joining import is_guest
from libra_hpc.protocol.trainer import Offered


class Published(NamedTuple):
    """The newest version that was published."""

    version: int
    base: int
    writers: tuple[tuple[str, int], ...]
    """(name, node) of every offer."""


class RequestedOffers:
    FIRST_S, LONGEST_S = 2.0, 10.0
    """Pauses in seconds; short, because rollout with a staleness bound of 0 waits for the version."""
    FAILURES = 5
    """Failures in a row that end the run: after 24 s without room."""

    def __init__(self, core: tuple[int, ...], version: int) -> None:
        self._core = core
        self._asked = self._written = version
        self._answers: dict[int, tuple[Offered, ...]] = {}
        self._retry = Retry(self.FIRST_S, self.LONGEST_S)
        self.base = -1
        """The version on which the next offer builds; -1: none, it has whole tensors."""
        self.offers: tuple[Offered, ...] = ()
        """Offers of the version that was published last."""

    def asked(self, version: int) -> bool:
        """Whether the version is offered, or will be."""
        return version == self._asked

    def written(self, version: int) -> bool:
        """Whether all nodes of the core have offered the version."""
        return version == self._asked == self._written

    def due(self, version: int, now: float) -> bool:
        """Whether this version must be requested now."""
        return self._asked < version and self._retry.due(now)

    def ask(self, version: int, now: float) -> bool:
        """Return whether a request is due; the version then counts as requested."""
        if not self.due(version, now):
            return False
        self._asked, self._answers = version, {}
        return True

    def ask_again(self) -> None:
        """Drop a pending request: whoever got it may be gone."""
        if self._asked > self._written:
            self._asked, self.base = self._written, -1

    def core_lost(self) -> None:
        """The trainers of the core begin again, without knowing what was offered."""
        self.base = -1
        self.ask_again()

    def lost(self, version: int) -> None:
        """The offers of a version are not there, or no longer."""
        self._written, self.base = min(self._written, version - 1), -1

    def expects(self, version: int) -> bool:
        """Whether it is the version that was requested last; what becomes of any other is of no use."""
        if version != self._asked:
            self.base = -1
        return version == self._asked

    def answered(self, rank: int, offers: tuple[Offered, ...]) -> Published | None:
        """A node of the core has written its offers; returns the version that is published with the last of them."""
        if offers[0].version != self._asked or rank not in self._core:
            return None
        self._answers[rank] = offers
        if len(self._answers) < len(self._core):
            return None
        every = [(offer, node) for node in self._core for offer in self._answers[node]]
        if len({offer.base for offer, _ in every}) > 1:
            # A process began again meanwhile.
            self.base = -1
            self.ask_again()
            return None
        self._written = self.base = offers[0].version
        self._retry.succeeded()
        self.offers = tuple(offer for offer, _ in every)
        writers = tuple((offer.writer, node) for offer, node in every if offer.size or offer is every[0][0])
        return Published(self._written, offers[0].base, writers)

    def failed(self, now: float) -> bool:
        """An offer failed; True at the last permitted failure."""
        self._retry.failed(now)
        self.base = -1
        self.ask_again()
        return self._retry.failures >= self.FAILURES

    def wait_s(self, now: float) -> float:
        return self._retry.wait_s(now)


SLOW = 2.0
"""Times the seconds per byte of the quickest node, and of the one before; half of it is the noise of busy nodes."""

AGAIN = 4
"""Newest versions that a carrier gets when it starts: what the one before it had not yet received or written into the
image. Half: too few when updates are quick; double: nothing, as an image of another node is then as near."""
NEAR, FIRST = 8, 2
"""Nodes before it from which a node pulls, and nodes of the core, which have all offers, for when none of them is left.
Half: a lost rack sends more nodes to the core; double: twice the bytes of a version."""


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
        else:
            if rank in self._core:
                self._to_all(versions[-1:], but=rank)
            if rank in self._core or rank in self._receivers():
                self._send_to(rank, versions)

    def catch_up(self, rank: int) -> None:
        """A node gets new weights from now on, those that it may lack among them."""
        if rank in self._carriers and self._versions and not self._waits:
            self._send_to(rank, list(self._versions))

    def on_wanted(self, message: WeightsWanted) -> None:
        newest = list(self._versions)[-1:]
        if not newest or newest[0].version <= message.have:
            self._send(message.rank, WeightsCurrent(message.have))
        elif not self._waits:
            self._send_to(message.rank, newest)

    def lost(self, rank: int) -> None:
        """A node was lost, and its carrier with it."""
        self._carriers.pop(rank, None)
        self._seconds.pop(rank, None)

    def _chain(self, guests: bool, joins: int = -1) -> tuple[Peer, ...]:
        """The whole chain, as ``guests`` or own nodes see it; ``joins`` is in it in any case."""
        others = [rank for rank in {*self._receivers(), joins}.difference(self._core) if rank in self._carriers]
        quickest = min(self._seconds.values(), default=(0.0, 0.0))[0]

        def order(rank: int) -> tuple[float, bool, str, int]:
            own, before = self._seconds.get(rank, (0.0, 0.0))
            return own if own > SLOW * max(before, quickest) else 0.0, is_guest(rank), self._carriers[rank].place, rank

        others.sort(key=order)
        ranks = (rank for rank in (*self._core, *others) if guests or not is_guest(rank))
        return tuple(self._carriers[rank] for rank in ranks if rank in self._carriers)

    def _to_all(self, versions: Sequence[Published], but: int = -1) -> None:
        for guests in (False, True):
            chain = self._chain(guests)
            for place, peer in enumerate(chain):
                if peer.rank != but and is_guest(peer.rank) == guests:
                    self._send_part(peer.rank, versions, chain, place)

    def _send_to(self, rank: int, versions: Sequence[Published]) -> None:
        chain = self._chain(is_guest(rank), rank)
        place = next((place for place, peer in enumerate(chain) if peer.rank == rank), len(chain))
        self._send_part(rank, versions, chain, place)

    def _send_part(self, rank: int, versions: Sequence[Published], chain: tuple[Peer, ...], place: int) -> None:
        """Send versions to the node at this place of the chain, with its part of it."""
        first = max(len(self._core), NEAR) if rank in self._core else FIRST
        part = chain[:first] + chain[max(first, place - NEAR) : place + 1]
        self._before[rank] = chain[place - 1].rank if place else -1
        for version, base, writers in versions:
            self._send(rank, Publish(version, base, writers, part))
