"""In-flight work: prompts show changes early, short trajectories do not bias it, and a steady stream has no drift."""

from __future__ import annotations

import random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from libra_hpc.policies.control.in_flight import SIMILAR, InFlightEstimator
from libra_hpc.protocol.plan import GroupFact, PlanSnapshot, TrajectoryFact

from .plant import NOTHING, trajectory

GROUP, PROMPTS, ETA = 4, 8, 1
LONG, SHORT = (100, 4000), (12_000, 200)
"""(prompt, mean length) of two kinds of tasks."""


def _snapshot(done: list[TrajectoryFact], groups: list[GroupFact]) -> PlanSnapshot:
    options = {"prompts_per_step": PROMPTS, "group_size": GROUP, "eta": ETA}
    return replace(NOTHING, trajectories=tuple(done), groups=tuple(groups), **options)


def _finished(kinds: list[tuple[int, int]], seed: int = 0, first: int = 0, start: int = 0) -> list[TrajectoryFact]:
    """Whole groups, lengths uniform around the mean."""
    rng = random.Random(seed)
    members = [(place, prompt, mean) for place, (prompt, mean) in enumerate(kinds) for _ in range(GROUP)]
    return [
        trajectory(first + i, (prompt, round(mean * rng.uniform(0.5, 1.5))), start + place)
        for i, (place, prompt, mean) in enumerate(members)
    ]


def _waiting(first: int, prompt: int = LONG[0], count: int = 16) -> list[GroupFact]:
    return [GroupFact(first + i, prompt, GROUP, 0, 0) for i in range(count)]


@pytest.fixture
def in_flight() -> InFlightEstimator:
    return InFlightEstimator(GROUP, PROMPTS)


def test_a_prompt_predicts_lengths_from_similar_finished_ones(in_flight: InFlightEstimator) -> None:
    done = _finished([LONG, SHORT] * 32)
    snapshot = _snapshot(done, _waiting(64))
    assert in_flight.observe(snapshot) is None
    work = in_flight.work(snapshot)
    assert len(work.done) == 16 * GROUP
    assert fmean(t.generated for t in work.done) == pytest.approx(LONG[1], rel=0.1)
    assert fmean(t.context for t in work.done) == pytest.approx(LONG[0] + LONG[1], rel=0.1)
    assert 0.0 < work.generated_error < 0.3


def test_the_ones_that_finish_first_do_not_make_the_rest_short(in_flight: InFlightEstimator) -> None:
    """Of every group the shortest is done; the others count as trajectories longer than they are."""
    past = _finished([LONG] * 32)
    now = _finished([LONG] * 16, seed=1, first=len(past), start=32)
    early = [min((t for t in now if t.group == g), key=lambda t: t.generated) for g in range(32, 48)]
    running = [GroupFact(t.group, LONG[0], 0, GROUP - 1, (GROUP - 1) * t.generated) for t in early]
    snapshot = _snapshot(past + early, running)
    in_flight.observe(snapshot)
    work = in_flight.work(snapshot)
    truth = fmean(t.generated for t in now)
    assert fmean(t.generated for t in early) < 0.85 * truth
    assert fmean(t.generated for t in work.done) == pytest.approx(truth, rel=0.1)


def test_unknown_prompts_are_detected_at_admission_and_count_by_their_age(in_flight: InFlightEstimator) -> None:
    done = _finished([SHORT] * 96)
    assert in_flight.observe(_snapshot(done, [])) is None
    new = _waiting(96)
    drift = in_flight.observe(_snapshot(done, new))
    assert (drift.before, drift.after) == (SHORT[0], LONG[0])
    assert in_flight.work(_snapshot(done, new)) is None, "neither known nor begun"
    begun = [GroupFact(96 + i, LONG[0], 0, GROUP, GROUP * 1500) for i in range(4)]
    work = in_flight.work(_snapshot(done, begun + new[4:]))
    assert {t.generated for t in work.done} == {3000}
    assert len(work.done) == 16 * GROUP


def test_a_kind_of_prompt_from_long_ago_is_still_estimated(in_flight: InFlightEstimator) -> None:
    in_flight.observe(_snapshot(_finished([LONG] * 32), []))
    in_flight.observe(_snapshot(_finished([SHORT] * 256, first=32 * GROUP, start=32), []))
    work = in_flight.work(_snapshot([], _waiting(288)))
    assert fmean(t.generated for t in work.done) == pytest.approx(LONG[1], rel=0.15)


def test_the_newest_trajectories_of_a_kind_count(in_flight: InFlightEstimator) -> None:
    longer = (SHORT[0], 3 * SHORT[1])
    in_flight.observe(_snapshot(_finished([SHORT] * 64 + [longer] * (SIMILAR // GROUP)), []))
    work = in_flight.work(_snapshot([], _waiting(999, SHORT[0], 1)))
    assert fmean(t.generated for t in work.done) == pytest.approx(longer[1], rel=0.15)


def test_without_group_facts_there_is_no_estimate(in_flight: InFlightEstimator) -> None:
    plain = [TrajectoryFact(index=i, at=0.0, generated=50, context=150, turns=1) for i in range(256)]
    assert in_flight.observe(_snapshot(plain, [])) is None
    assert in_flight.work(_snapshot(plain, [])) is None


def test_false_positives_without_a_change_of_prompts_are_rare() -> None:
    """Some 800 blocks of groups at a rate of at most 0.001: five detections have probability 0.001."""
    rng = random.Random(2)
    detections = 0
    for _ in range(40):
        in_flight = InFlightEstimator(GROUP, PROMPTS)
        for block in range(24):
            groups = [_waiting(16 * block + i, round(rng.lognormvariate(7.0, 1.0)) + 1, 1)[0] for i in range(16)]
            detections += in_flight.observe(_snapshot([], groups)) is not None
    assert detections < 5


@given(
    st.lists(
        st.tuples(st.integers(1, 30_000), st.integers(0, GROUP), st.integers(0, GROUP), st.integers(0, 40_000)).filter(
            lambda g: g[1] + g[2] > 0
        ),
        max_size=24,
    )
)
def test_every_trajectory_counts_at_most_once_and_as_something_possible(rows: list[tuple[int, int, int, int]]) -> None:
    in_flight = InFlightEstimator(GROUP, PROMPTS)
    done = _finished([LONG, SHORT] * 4)
    groups = [
        GroupFact(8 + i, prompt, waiting, running, generated if running else 0)
        for i, (prompt, waiting, running, generated) in enumerate(rows)
    ]
    in_flight.observe(_snapshot(done, groups))
    work = in_flight.work(_snapshot(done, groups))
    if work is None:
        return
    assert len(work.done) <= len(done) + sum(g.waiting + g.running for g in groups)
    assert all(t.generated >= 1 and t.context >= t.prompt + t.generated for t in work.done)
    assert min(work.tokens_error, work.generated_error) >= 0.0
