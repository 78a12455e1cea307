"""Outages, bad prompts and accidents, played against the book of failures in simulated time."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

import pytest

from libra_hpc.rollout.attempts import Attempts
from libra_hpc.rollout.failures import Failure, FailureBook
from libra_hpc.rollout.trajectory import Trajectory

SLOTS, GROUP, MEAN_S, FAIL_S = 32, 8, 20.0, 0.2
"""Open prompts, samples of each, and seconds of an attempt that goes well or fails."""
Fails = Callable[[int, random.Random], bool]
"""Whether an attempt of a prompt fails."""


class Rollout:
    """Prompts in their order, with a pass per event and per second, as in the rollout leader."""

    def __init__(
        self, fails: Fails, group: int = GROUP, slots: int = SLOTS, outage: tuple[float, float] = (0.0, 0.0)
    ) -> None:
        self.draw, self._fails, self._group, self._slots = random.Random(1), fails, group, slots
        self._outage = outage
        self.events: list[tuple[str, dict[str, str]]] = []
        self.ended: list[str] = []
        self.book = FailureBook(0.2, 600.0)
        self._attempts = Attempts(self.book, self._log, self.ended.append)
        self._running: list[tuple[float, int, Trajectory, bool]] = []
        self._open: dict[int, int] = {}
        self._lost: dict[int, int] = {}
        self._next = self._count = 0
        self.finished = 0
        self.given_up: list[int] = []

    def _log(self, kind: str, **fields: str) -> None:
        self.events.append((kind, fields))

    def _begin(self, trajectory: Trajectory, now: float) -> None:
        self._count += 1
        failing = self._down(now) or self._fails(trajectory.index, self.draw)
        end = now + (FAIL_S if failing else self.draw.expovariate(1.0 / MEAN_S))
        heapq.heappush(self._running, (end, self._count, trajectory, not failing and not self._down(end)))

    def _down(self, now: float) -> bool:
        return self._outage[0] <= now < self._outage[1]

    def _step(self, now: float) -> None:
        most = self._attempts.evaluate(len(self._running), now)
        room = self._slots - len(self._open)
        for _ in range(room if most is None else min(most, room)):
            index, self._next = self._next, self._next + 1
            self._open[index], self._lost[index] = self._group, 0
            for sample in range(self._group):
                trajectory = Trajectory(index, sample, 0)
                if most is None:
                    self._begin(trajectory, now)
                else:
                    self._attempts.hold(trajectory, now)
        for trajectory in self._attempts.begin(now):
            self._begin(trajectory, now)

    def _end(self, trajectory: Trajectory, well: bool, now: float) -> None:
        index = trajectory.index
        if well:
            self.book.succeeded((index, trajectory.sample), now)
        elif self._attempts.failed(trajectory, Failure("raised", "toy", str(index), "boom"), now):
            return
        self._open[index] -= 1
        self._lost[index] += not well
        if not self._open[index]:
            del self._open[index]
            if self._lost[index] == self._group:
                self.given_up.append(index)
            else:
                self.finished += 1

    def play(self, seconds: float) -> Rollout:
        tick = 0.0
        while tick < seconds and not self.ended:
            while self._running and self._running[0][0] <= tick:
                at, _, trajectory, well = heapq.heappop(self._running)
                self._end(trajectory, well, at)
                self._step(at)
            self._step(tick)
            tick += 1.0
        return self

    @property
    def pauses(self) -> int:
        return sum(kind == "admission_paused" for kind, _ in self.events)


def never(index: int, draw: random.Random) -> bool:
    return False


def usual(seconds: float, **settings: int) -> int:
    """Groups that end well where nothing fails."""
    return Rollout(never, **settings).play(seconds).finished


def test_five_bad_prompts_among_the_first_cost_nothing() -> None:
    run = Rollout(lambda index, draw: index in (1, 2, 5, 8, 13)).play(600.0)
    assert run.pauses == 0
    assert sorted(run.given_up) == [1, 2, 5, 8, 13]
    assert run.finished >= 0.97 * usual(600.0)


@pytest.mark.parametrize("bad", [{2, 3, 4}, {0, 1, 2}, {9, 10, 11}])
def test_neighbouring_bad_prompts_of_a_small_run_are_given_up(bad: set[int]) -> None:
    run = Rollout(lambda index, draw: index in bad, slots=8).play(900.0)
    assert not run.ended
    assert set(run.given_up) == bad
    assert run.pauses <= 1
    assert run.finished >= 0.9 * usual(900.0, slots=8)


def test_data_with_many_bad_prompts_loses_those_alone() -> None:
    run = Rollout(lambda index, draw: index % 5 == 0).play(900.0)
    assert all(index % 5 == 0 for index in run.given_up)
    assert run.pauses <= 2
    assert run.finished >= 0.9 * usual(900.0)


@pytest.mark.parametrize(("slots", "group"), [(32, 8), (8, 8), (8, 4), (16, 2)])
def test_accidents_cost_their_retries_alone(slots: int, group: int) -> None:
    run = Rollout(lambda index, draw: draw.random() < 0.3, slots=slots, group=group).play(900.0)
    assert run.pauses <= 2
    assert run.finished >= 0.9 * usual(900.0, slots=slots, group=group)


@pytest.mark.parametrize(("seconds", "most_given_up"), [(30.0, 0), (550.0, 2)])
def test_an_outage_pauses_and_ends_with_its_first_success(seconds: float, most_given_up: int) -> None:
    run = Rollout(never, outage=(100.0, 100.0 + seconds)).play(1500.0)
    assert not run.ended
    assert 1 <= run.pauses <= 3
    assert len(run.given_up) <= most_given_up
    lost_s = seconds + 2.0 * 60.0 + 3.0 * MEAN_S
    assert run.finished >= 0.97 * usual(1500.0 - lost_s)
    attempts = sum(kind == "trajectory_failed" for kind, _ in run.events)
    assert attempts < 2 * SLOTS * GROUP
