"""Seconds per step and per prefilled token from an engine's counters."""

from __future__ import annotations

import pytest

from libra_hpc.protocol.rollout import EngineStats
from libra_hpc.sched.speed import SpeedEstimate


def stats(steps: int, prefill: int, busy: float) -> EngineStats:
    return EngineStats(
        version=0,
        running=1,
        waiting=0,
        kv_use=0.1,
        generated_tokens=steps * 8,
        prefill_tokens=prefill,
        cached_tokens=0,
        preemptions=0,
        steps=steps,
        busy_s=busy,
    )


def test_recovers_both_coefficients_from_mixed_windows() -> None:
    speed, steps, prefill = SpeedEstimate(), 0, 0
    for i in range(20):
        speed.update(stats(steps, prefill, 0.01 * steps + 0.0005 * prefill))
        steps += 10 + i % 3
        prefill += 100 * (i % 5)
    assert speed.decode_s == pytest.approx(0.01)
    assert speed.prefill_s == pytest.approx(0.0005)


def test_identical_windows_charge_everything_to_the_step() -> None:
    speed = SpeedEstimate()
    for i in range(5):
        speed.update(stats(10 * i, 50 * i, 0.2 * i))
    assert speed.decode_s == pytest.approx(0.02)
    assert speed.prefill_s == 0.0


def test_counters_of_a_rebuilt_engine_do_not_count_backwards() -> None:
    speed = SpeedEstimate()
    for i in range(5):
        speed.update(stats(10 * i, 0, 0.1 * i))
    before = speed.decode_s
    speed.update(stats(0, 0, 0.0))
    assert speed.decode_s == before > 0
