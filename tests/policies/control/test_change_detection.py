"""Drift of other quantities than lengths; learned scaling."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import cast

import pytest

from libra_hpc.policies.control.change_detection import NOT_MEASURED, DriftDetector, critical_distance
from libra_hpc.policies.control.node_scaling import NodeScaling
from libra_hpc.policies.control.rollout_by_nodes import RolloutByNodes
from libra_hpc.policies.control.stage_times import Split, predict

from .plant import exact


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
