"""Measured stage times recover hidden speeds."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from libra_hpc.policies.control.stage_times import (
    Correction,
    Estimate,
    Scatter,
    Split,
    Times,
    measure,
    predict,
    times_with_work_of,
)
from libra_hpc.protocol.plan import PlanSnapshot

from .plant import Plant, exact, ideal


def _measure(snapshot: PlanSnapshot) -> Estimate:
    return measure(snapshot, Split(1, 2), since=0.0)


def _measured(plant: Plant, batches: int = 60) -> Estimate:
    return _measure(plant.batches(batches).snapshot(100))


def test_measured_times_are_the_hidden_ones() -> None:
    measured = _measured(Plant(ideal(1.0, 4.0), noise=0.05))
    assert (measured.times.train, measured.times.rollout) == pytest.approx((1.0, 2.0), rel=0.1)
    assert measured.times.batch == measured.times.rollout
    assert predict(measured, Split(2, 1), Correction()).rollout == pytest.approx(2 * measured.times.rollout)


def test_waiting_does_not_enter_own_work() -> None:
    """The same rollout beside a three times slower trainer idles two thirds of the time and measures the same."""
    alone, throttled = (_measured(Plant(ideal(train, 2.0), noise=0.05)).times.rollout for train in (0.1, 3.0))
    assert throttled == pytest.approx(alone, rel=0.1)


SNAPSHOT = Plant(ideal(3.0, 2.0), noise=0.05).batches(60).snapshot(100)


def test_replaced_groups_are_work_of_the_rollout_alone() -> None:
    plain, refilled = _measure(SNAPSHOT), _measure(replace(SNAPSHOT, sampled_groups=1.5))
    assert refilled.times.rollout == pytest.approx(1.5 * plain.times.rollout)
    assert refilled.rollout_tokens == pytest.approx(1.5 * plain.rollout_tokens)
    assert refilled.times.train == plain.times.train


def test_new_weights_are_written_as_slowly_by_more_nodes() -> None:
    slow = tuple(replace(s, seconds=s.seconds + 4.0, diff_s=4.0) for s in SNAPSHOT.steps)
    plain, measured = _measure(SNAPSHOT), _measure(replace(SNAPSHOT, steps=slow))
    assert measured.fixed == 4.0
    more = [predict(estimate, Split(2, 1), Correction()).train for estimate in (plain, measured)]
    assert more[1] == pytest.approx(more[0] + 4.0)


def test_the_fixed_part_of_a_step_is_found_and_does_not_shrink() -> None:
    # 0.5 s fixed + 0.5 s in proportion to the tokens of the batch, which vary by the lengths of 8 prompts.
    measured = _measured(Plant(lambda n, m, mean: (0.5 + 0.5 * mean / 50.0 / n, 0.1), noise=0.01))
    assert measured.fixed == pytest.approx(0.5, abs=0.1)
    assert predict(measured, Split(2, 1), Correction()).train == pytest.approx(0.75, abs=0.1)


def test_the_loop_bounds_what_an_idle_rollout_seems_to_need() -> None:
    plant = Plant(ideal(1.0, 0.5), noise=0.01).batches(20)
    # Small batches while idling: a tenth of the true rate per busy second.
    plant.windows = [replace(w, generated_tokens=w.generated_tokens // 10, prefilled_tokens=0) for w in plant.windows]
    measured = _measure(plant.snapshot(100))
    assert measured.times.rollout == pytest.approx(1.0, rel=0.1)


def test_the_straggler_bound_is_not_shortened_by_nodes() -> None:
    plant = Plant(ideal(0.1, 20.0), noise=0.01).batches(8)
    plant.windows = [replace(w, prefilled_tokens=0, decode_s=0.02) for w in plant.windows]
    measured = _measure(plant.snapshot(100))
    longest = sorted(t.generated for t in plant.done)[int(8 * 64 * (1 - 1 / 64))]
    assert measured.straggler == pytest.approx(longest * 0.02 / 2)
    assert predict(measured, Split(1, 50), Correction()).rollout == pytest.approx(measured.straggler)


def test_where_trainers_wait_the_time_between_commits_is_what_rollout_takes() -> None:
    """Engines that decode a few stragglers seem twice as fast by their tokens; commits show what a batch takes."""
    plant = Plant(ideal(0.2, 2.0), noise=0.05).batches(20)
    plant.windows = [replace(w, generated_tokens=2 * w.generated_tokens, prefilled_tokens=0) for w in plant.windows]
    measured = _measure(plant.snapshot(100))
    assert measured.starved
    assert measured.times.rollout == pytest.approx(sum(plant.batch_times[-7:]) / 7)
    idle = _measure(replace(plant.snapshot(100), steps=tuple(replace(s, seconds=1.0) for s in plant.steps)))
    assert not idle.starved
    assert idle.times.rollout < 0.8 * measured.times.rollout


def test_only_the_newest_steps_count() -> None:
    plant = Plant(ideal(1.0, 4.0), noise=0.02).batches(20)
    plant.length *= 2.0
    measured = _measured(plant, 9)
    assert (measured.times.train, measured.times.rollout) == pytest.approx((2.0, 4.0), rel=0.25)


def test_steps_much_shorter_than_the_windows_are_measured_all_the_same() -> None:
    plant = Plant(ideal(0.25, 0.04), noise=0.05).batches(120)
    # One window a second: two of them fall into the time of the newest eight steps.
    plant.windows = [
        replace(w, seconds=1.0, generated_tokens=4 * w.generated_tokens, prefilled_tokens=0, busy=w.busy / 4)
        for w in plant.windows[3::4]
    ]
    measured = _measure(plant.snapshot(100))
    assert measured.times.train == pytest.approx(0.25, rel=0.1)


@pytest.mark.parametrize(("train", "rollout"), [(1.0, 1.0), (1.0, 1.2), (1.5, 1.0), (3.0, 1.0)])
def test_a_batch_takes_its_slower_stage_which_is_not_always_the_same(train: float, rollout: float) -> None:
    rng = random.Random(0)
    scatter = Scatter(0.2, 0.3)
    drawn = [max(train * rng.gauss(1.0, 0.2), rollout * rng.gauss(1.0, 0.3)) for _ in range(40_000)]
    times = Times(train, rollout, 1)
    assert times.expected(scatter) == pytest.approx(sum(drawn) / len(drawn), rel=0.01)
    assert times.expected(Scatter()) == times.batch
    # Stages that take turns do not wait for each other.
    assert Times(1.0, 1.0, 0).expected(Scatter(0.3, 0.3)) == 2.0


def test_standing_still_is_judged_at_the_work_of_now() -> None:
    before = exact(Split(1, 2), 1.2, 3.0, fixed=0.2, tokens=(1000.0, 400.0))
    after = exact(Split(1, 2), 9.0, 9.0, tokens=(1500.0, 800.0))
    assert times_with_work_of(before, after)[:3] == pytest.approx((0.2 + 1.5, 6.0, 1))


def test_too_little_evidence_is_named() -> None:
    why = "1 of 4 steps, 1 of 4 rollout windows and 64 of 128 trajectories measured with 1 training and 2 rollout nodes"
    found = measure(Plant(ideal(1.0, 1.0)).batches(1).snapshot(10), Split(1, 2), 0.0)
    assert found == f"{why} since the last change"
