"""A race plays as many rounds as the choice takes: few where one is clearly slower, all where none is."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import pytest

from libra_hpc.policies.control.race import Race


class Noisy(NamedTuple):
    """Rounds with one noise for all candidates, as of the same trajectories, and a little of its own."""

    mean: float
    rollout_share: float = 1.0

    def rounds(self, count: int) -> Sequence[float]:
        noises = [
            random.Random(n).gauss(0.0, 0.3) + random.Random(f"{self.mean}/{n}").gauss(0.0, 0.05) for n in range(count)
        ]
        return [self.mean * (1.0 + noise) for noise in noises]


@pytest.mark.parametrize(
    ("means", "left", "one_round"),
    [
        ([160.0, 100.0, 300.0, 115.0, 250.0], {1}, {2, 4}),
        ([100.0, 100.5, 130.0], {0, 1}, {2}),
        ([100.0, 140.0], {0}, {1}),
    ],
    ids=["the best of five", "two alike", "two"],
)
def test_the_slower_ones_are_found_under_a_noise_that_all_share(
    means: Sequence[float], left: set[int], one_round: set[int]
) -> None:
    race = Race[int, Noisy](16)
    for key, mean in enumerate(means):
        race.enter(key, Noisy(mean))
    assert race.decide() in race.left.keys() == left
    assert {key for key in range(len(means)) if race.rounds(key) == 1} == one_round
    for key, mean in enumerate(means):
        assert race.seconds(key) / race.seconds(race.best) == pytest.approx(mean / 100.0, rel=0.1)
    assert race.rounds(race.best) == 16
    assert abs(race.seconds(race.best) - 100.0) < 3 * race.error(race.best)
