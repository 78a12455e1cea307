"""Drift of lengths and other quantities, at the stated rate of false positives."""

from __future__ import annotations

import math
import random

import pytest

from libra_hpc.policies.control.change_detection import (
    BLOCK_GROUPS,
    NOT_MEASURED,
    REFERENCE_GROUPS,
    DriftDetector,
    critical_distance,
    ks_distance,
)


def _lengths(rng: random.Random, groups: int, scale: float = 50.0) -> list[float]:
    """Eight siblings a group, whose lengths are alike."""
    prompts = (rng.gauss(0.0, 0.8) for _ in range(groups))
    return [scale * math.exp(prompt + rng.gauss(0.0, 0.3)) for prompt in prompts for _ in range(8)]


def _rows(rng: random.Random, groups: int, tool_s: float = 1.0) -> list[tuple[float, ...]]:
    """Lengths, twice that, a constant, and seconds in tools."""
    return [(one, 2.0 * one, 3.0, tool_s * rng.lognormvariate(0.0, 0.5)) for one in _lengths(rng, groups)]


def test_ks_distance_is_that_of_the_distribution_functions() -> None:
    assert ks_distance([1, 2, 3], [1, 2, 3]) == 0.0
    assert ks_distance([1, 1, 1], [2, 2]) == 1.0
    assert ks_distance([1, 2, 3, 4], [3, 4, 5, 6]) == 0.5
    assert critical_distance(100, 100, 0.05) == pytest.approx(0.192, abs=1e-3)


def test_a_threefold_length_is_noticed_in_two_blocks_and_only_once() -> None:
    for seed in range(10):
        rng = random.Random(seed)
        detector = DriftDetector(8)
        assert detector.update(_lengths(rng, REFERENCE_GROUPS + 2 * BLOCK_GROUPS)) is None
        drift = detector.update(_lengths(rng, 2 * BLOCK_GROUPS, 150.0))
        assert drift.distance > drift.critical
        assert drift.after > 1.5 * drift.before
        assert detector.update(_lengths(rng, 4 * BLOCK_GROUPS, 150.0)) is None


def test_slower_tools_alone_are_detected_and_named() -> None:
    rng = random.Random(4)
    detector = DriftDetector(8, prompts=16)
    assert detector.update(_rows(rng, 128)) is None
    drift = detector.update(_rows(rng, 64, tool_s=4.0))
    assert drift.quantity == 3
    assert drift.after > 2.0 * drift.before


def test_a_quantity_that_is_not_measured_is_left_out() -> None:
    rng = random.Random(5)
    detector = DriftDetector(8)
    blind = [(row[0], NOT_MEASURED) for row in _rows(rng, 400)]
    assert detector.update(blind) is None


def test_short_ones_first_in_every_batch_is_no_drift() -> None:
    """A batch of 64 groups finishes in order of length; blocks of 32 groups would have short and long halves."""
    rng = random.Random(6)
    detector = DriftDetector(8, prompts=64)
    for _ in range(30):
        batch = sorted(rng.lognormvariate(5.0, 1.0) for _ in range(8 * 64))
        assert detector.update(batch) is None


def test_false_positives_on_four_quantities_stay_at_the_stated_rate_although_siblings_are_alike() -> None:
    """Some 2,000 blocks at 0.001 or less: seven detections have probability 0.005 at that rate."""
    rng = random.Random(7)
    detections = 0
    for _ in range(100):
        detector = DriftDetector(8)
        detector.update(_rows(rng, REFERENCE_GROUPS))
        detections += sum(detector.update(_rows(rng, BLOCK_GROUPS)) is not None for _ in range(20))
    assert detections < 7


def test_a_small_change_is_found_by_the_long_block() -> None:
    """With 32 members a group the distance is known well: 0.36, under what 32 groups need and over what 128 do."""
    rng = random.Random(8)
    detector = DriftDetector(32)
    assert detector.update([rng.gauss(0.0, 1.0) for _ in range(32 * 64)]) is None
    drift = detector.update([rng.gauss(0.94, 1.0) for _ in range(32 * 128)])
    assert drift.count == 32 * 128
    assert critical_distance(128, 64, 0.0005) < drift.distance < critical_distance(32, 64)
