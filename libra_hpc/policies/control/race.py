"""`Race`: which candidate takes the fewest seconds, by plays of the same trajectories.

- Differences to the best one are paired, round by round. Clearly slower: by more than `ERRORS` standard errors.
- A candidate enters -> one round; it is not clearly slower -> `LEAST` rounds.
- `decide`: clearly slower -> out; others play twice the rounds, until they have ``most``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from math import sqrt
from statistics import fmean, pvariance, stdev
from typing import Generic, Protocol, TypeVar

LEAST = 2
"""Rounds."""
ERRORS = 2.0
"""Half: noise decides one choice in six; double: four times the rounds."""
SPREAD, TRUST = 0.1, 2
"""Standard deviation of a round's difference, as a share of its seconds, before any was seen, and the rounds that this
is worth. Half: the first candidates are out by chance; double: more of them are played twice."""


class Contender(Protocol):
    """A play that can be continued."""

    def rounds(self, count: int) -> Sequence[float]:
        """Seconds of a batch in each of so many first rounds, or more where they were played."""

    @property
    def rollout_share(self) -> float:
        """Share of these seconds in which a batch is rolled out."""


K = TypeVar("K", bound=Hashable)
C = TypeVar("C", bound=Contender)


class Race(Generic[K, C]):
    """Candidates by key, each of which plays ``most`` rounds at most."""

    def __init__(self, most: int) -> None:
        self._most = max(LEAST, most)
        self.left: dict[K, C] = {}
        """Candidates that are not out."""
        self._rounds: dict[K, list[float]] = {}

    def enter(self, key: K, play: C) -> None:
        """Play a new candidate as far as needed."""
        self._rounds[key] = list(play.rounds(1))
        if not self.left or not self._slower(key):
            self.left[key], self._rounds[key] = play, list(play.rounds(LEAST))

    @property
    def best(self) -> K:
        return min(self.left, key=lambda key: fmean(self._rounds[key]))

    def seconds(self, key: K) -> float:
        """Seconds of a batch: those of the best one, times the ratio in the rounds that both have."""
        best, pairs = self._rounds[self.best], self._pairs(key)
        return fmean(best) * fmean(own for own, _ in pairs) / fmean(other for _, other in pairs)

    def error(self, key: K) -> float:
        """Standard error of a candidate's seconds alone; of one that is out, as if it were the best one's."""
        own = self._rounds[key if len(self._rounds[key]) > 1 else self.best]
        return stdev(own) / sqrt(len(own))

    def rounds(self, key: K) -> int:
        return len(self._rounds[key])

    def decide(self) -> K:
        """The best one, once others are clearly slower or all have played enough."""
        count = LEAST
        while True:
            best = self.best
            self.left = {key: play for key, play in self.left.items() if key == best or not self._slower(key)}
            if count >= self._most:
                return best
            count = min(2 * count, self._most)
            self._rounds |= {key: list(play.rounds(count)) for key, play in self.left.items()}

    def _slower(self, key: K) -> bool:
        differences = self._differences(key)
        return fmean(differences) > ERRORS * self._spread() / sqrt(len(differences))

    def _spread(self) -> float:
        """Standard deviation of a round's difference: one number for all pairs, so that one round has an error too."""
        found = [self._differences(key) for key in self._rounds if key != self.best]
        squares = SPREAD**2 * TRUST + sum(len(one) * pvariance(one) for one in found)
        return sqrt(squares / (TRUST + sum(len(one) - 1 for one in found)))

    def _differences(self, key: K) -> list[float]:
        """Seconds of each round more than the best one's, as shares of both means."""
        pairs = self._pairs(key)
        mean = fmean(map(sum, pairs)) / 2
        return [(own - best) / mean for own, best in pairs]

    def _pairs(self, key: K) -> list[tuple[float, float]]:
        """Its rounds that the best one has, too, and those."""
        return list(zip(self._rounds[key], self._rounds[self.best], strict=False))


def downhill(count: int, start: int, seconds: Callable[[int], float], stride: int = 1) -> None:
    """Ask for the seconds of so many places, from ``start`` on to where both neighbours take longer.

    ``stride``: places to a first neighbour; it is halved where none takes less.
    """
    at = start
    while stride:
        near = [n for n in (at - stride, at + stride) if 0 <= n < count]
        better = min(near, key=seconds, default=at)
        if seconds(better) < seconds(at):
            at = better
        else:
            stride //= 2
