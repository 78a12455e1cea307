"""Trends are found when present and absent in noise; drift of other quantities than lengths; learned scaling."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import cast

import pytest

from libra_hpc.policies.control.change_detection import NOT_MEASURED, DriftDetector, critical_distance
from libra_hpc.policies.control.node_scaling import NodeScaling
from libra_hpc.policies.control.stage_times import Split, extrapolate, predict
from libra_hpc.policies.control.trend import MOST, Trend, trend
from libra_hpc.policies.costs.rollout_by_nodes import RolloutByNodes

from .plant import exact


def _points(rng: random.Random, rate: float, noise: float, count: int = 32) -> list[tuple[float, float]]:
    return [(100.0 * i, 1000.0 * math.exp(rate * 100.0 * i + rng.gauss(0.0, noise))) for i in range(count)]


def test_a_trend_is_found_with_its_rate_and_an_outlier_does_not_change_it() -> None:
    points = _points(random.Random(1), 2e-4, 0.1)
    points[20] = (points[20][0], 50 * points[20][1])
    found = trend(points)
    assert found.rate == pytest.approx(2e-4, rel=0.25)
    assert found.span == 3100.0


def test_noise_has_a_trend_once_in_a_thousand() -> None:
    rng = random.Random(2)
    assert sum(trend(_points(rng, 0.0, 0.3)).rate != 0.0 for _ in range(1000)) <= 5


def test_too_few_points_and_one_moment_have_none() -> None:
    assert trend(_points(random.Random(3), 1e-2, 0.0, 7)) == Trend()
    assert trend([(5.0, float(i + 1)) for i in range(20)]) == Trend()


def test_a_forecast_is_damped_and_bounded() -> None:
    seen = Trend(1e-4, 2000.0)
    assert seen.ahead(10.0) == pytest.approx(math.exp(1e-3), rel=1e-4)
    assert seen.ahead(1e9) == pytest.approx(math.exp(1e-4 * 1000.0))
    assert Trend(1e-2, 2000.0).ahead(1e9) == MOST
    assert Trend(-1e-2, 2000.0).ahead(1e9) == 1.0 / MOST
    assert Trend().ahead(500.0) == 1.0


def test_ahead_moves_what_work_moves_and_not_the_fixed_part() -> None:
    growing = Trend(1e-4, 2000.0)
    later = extrapolate(exact(Split(4, 4), 10.0, 8.0, fixed=2.0, straggler=4.0, train_trend=growing), 1e9)
    assert later.times.train == pytest.approx(2.0 + 8.0 * math.exp(0.1))
    assert later.times.rollout == 8.0


def _rows(rng: random.Random, groups: int, tool_s: float) -> list[tuple[float, float, float, float]]:
    return [
        (rng.lognormvariate(5.0, 1.0), rng.lognormvariate(7.0, 1.0), 3.0, tool_s * rng.lognormvariate(0.0, 0.5))
        for _ in range(8 * groups)
    ]


def test_slower_tools_alone_are_detected_and_named() -> None:
    rng = random.Random(4)
    detector = DriftDetector(8, prompts=16)
    assert detector.update(_rows(rng, 128, 1.0)) is None
    drift = detector.update(_rows(rng, 64, 4.0))
    assert drift is not None
    assert drift.quantity == 3
    assert drift.after > 2.0 * drift.before


def test_a_quantity_that_is_not_measured_is_left_out() -> None:
    rng = random.Random(5)
    detector = DriftDetector(8)
    blind = [(row[0], NOT_MEASURED) for row in _rows(rng, 400, 1.0)]
    assert detector.update(blind) is None


def test_short_ones_first_in_every_batch_is_no_drift() -> None:
    """A batch of 64 groups finishes in order of length; blocks of 32 groups would have short and long halves."""
    rng = random.Random(6)
    detector = DriftDetector(8, prompts=64)
    for _ in range(30):
        batch = sorted(rng.lognormvariate(5.0, 1.0) for _ in range(8 * 64))
        assert detector.update(batch) is None


def test_false_positives_on_four_quantities_stay_at_the_stated_rate() -> None:
    """Some 2,000 blocks at 0.001 or less: seven detections have probability 0.005 at that rate."""
    rng = random.Random(7)
    detections = 0
    for _ in range(100):
        detector = DriftDetector(2)
        rows = [
            (a, 2.0 * a, 3.0, b)
            for a, b in ((rng.lognormvariate(5.0, 1.0), rng.random()) for _ in range(2 * (64 + 20 * 32)))
        ]
        detections += sum(detector.update(rows[i : i + 64]) is not None for i in range(0, len(rows), 64))
    assert detections < 7


def test_a_small_change_is_found_by_the_long_block() -> None:
    """With 32 members a group the distance is known well: 0.36, under what 32 groups need and over what 128 do."""
    rng = random.Random(8)
    detector = DriftDetector(32)
    assert detector.update([rng.gauss(0.0, 1.0) for _ in range(32 * 64)]) is None
    drift = detector.update([rng.gauss(0.94, 1.0) for _ in range(32 * 128)])
    assert drift is not None
    assert drift.count == 32 * 128
    assert critical_distance(128, 64, 0.0005) < drift.distance < critical_distance(32, 64)


def test_scaling_learned_on_one_pair_is_carried_to_others_with_care() -> None:
    scaling = NodeScaling()
    before, after = exact(Split(4, 8), 10.0, 1 / 8), exact(Split(8, 4), 7.0, 1 / 4)  # ideal: 5.0
    scaling.learn(before, after)
    assert predict(before, after.split, scaling.correction(before.split, after.split)).train == pytest.approx(7.0)
    unseen = predict(before, Split(6, 6), scaling.correction(before.split, Split(6, 6)))
    assert 10.0 * 4 / 6 < unseen.train < 10.0
    scaling.clear_pairs()
    assert scaling.correction(before.split, after.split).train == pytest.approx(1.4, abs=0.06)


def test_no_lesson_says_that_fewer_nodes_are_faster() -> None:
    """The exponent corrects a cost model whose own ratio is already below even division."""
    model = cast(RolloutByNodes, SimpleNamespace(ratio=lambda now, to: (now / to) ** 0.3))
    scaling = NodeScaling(model)
    for rollout in (4, 5, 6):
        now, then = Split(12 - rollout, rollout), Split(11 - rollout, rollout + 1)
        scaling.learn(exact(now, 1 / now.train, 1.0, starved=True), exact(then, 1 / then.train, 1.3, starved=True))
    fewer = scaling.correction(Split(4, 8), Split(6, 6)).rollout * 8 / 6
    more = scaling.correction(Split(6, 6), Split(4, 8)).rollout * 6 / 8
    assert (fewer, more) == (pytest.approx(1.0), pytest.approx(1.0))
