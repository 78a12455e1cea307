"""Which weight version the core was asked to offer, what its nodes have answered, and on which version it builds.

- All nodes of the core have answered -> the version is published.
- An answer is lost, a node failed, or the core was rebuilt -> the next offer has whole tensors: what the trainers
  offered last is then not what all nodes have.

Pure: times are seconds of any monotonic clock.
"""

from __future__ import annotations

from typing import NamedTuple

from libra_hpc.process.retry import Retry
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
