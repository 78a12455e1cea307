"""Steps of a real engine as a calibration file: every kind of step, true to what was run, and fit to be fitted."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from libra_hpc.annexes.calibrate.measure_steps import (
    CHUNK,
    DECODE_STEPS,
    FILL,
    REPEATS,
    calibrate,
    earlier,
    merged,
    plans,
    reach,
)
from libra_hpc.errors import OperationError, UserError
from libra_hpc.models.step_times.measured import Calibration, StepPoint, measured_times, save

from .engine_harness import Model, engine_config

LENGTH, SEQUENCES = 320, 4


@pytest.mark.parametrize(
    ("length", "sequences", "capacity"), [(1024, 8, 2048), (4096, 64, 16384), (320, 1, 100_000), (32768, 256, 400_000)]
)
def test_plans_are_within_the_limits_of_the_engine(length: int, sequences: int, capacity: int) -> None:
    found = list(plans(length, sequences, capacity))
    kinds = {(plan.decodes > 0, plan.prefill > 0) for plan in found}
    assert {(True, False), (False, True)} <= kinds
    for plan in found:
        grown = plan.length + reach(plan.decodes, plan.length) if plan.decodes else 0
        assert plan.decodes + (plan.prefill > 0) <= sequences
        assert plan.decodes * grown + plan.prefill + plan.context <= FILL * capacity
        assert max(grown, plan.prefill + plan.context + 1) <= length
    assert reach(64, 4096) == 64 * 4096 // CHUNK + DECODE_STEPS + 2


def assert_measured(found: Calibration, length: int, most: int) -> None:
    """The points of degree 1 are of every kind of step, and fit to be fitted."""
    points = [point for point in found.points if point.tp == 1]
    decode = [point for point in points if not point.prefill]
    assert {point.decodes for point in decode} == {1 << power for power in range(most.bit_length())}
    assert len(decode) >= 3 * 3 * (DECODE_STEPS - 4)
    assert all(8 * point.decodes < point.kv_tokens <= length * point.decodes for point in decode)
    alone = [point for point in points if not point.decodes]
    assert len(alone) >= 4 * REPEATS
    assert {point.context > 0 for point in alone} == {True, False}
    assert measured_times(found, 1).step_s(2, 200, 0, 0) > 0.0


def test_the_steps_of_one_degree_join_those_of_another(tmp_path: Path) -> None:
    other, stale, fresh = (StepPoint(tp=tp, decodes=1, kv_tokens=10, seconds=0.5) for tp in (2, 1, 1))
    old = Calibration(device="this cpu", model="tiny", kv_capacity={1: 5, 2: 7}, points=[other, stale])
    new = Calibration(device="this cpu", model="tiny", kv_capacity={1: 6}, points=[fresh])
    found = merged(old, new)
    assert found.kv_capacity == {1: 6, 2: 7}
    assert [point is one for point, one in zip(found.points, (other, fresh), strict=True)] == [True, True]
    assert earlier(tmp_path / "none", "this cpu", "tiny").points == []
    save(old, tmp_path / "steps.json")
    assert earlier(tmp_path / "steps.json", "this cpu", "tiny").points == old.points
    with pytest.raises(UserError, match="device = 'another'"):
        earlier(tmp_path / "steps.json", "another", "tiny")


@pytest.mark.nightly
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_an_engine_is_measured_in_a_process_of_its_own(old: Model) -> None:
    settings = engine_config(old, max_num_seqs=SEQUENCES, max_model_len=LENGTH, kv_cache_mb=4)
    found = calibrate(settings, "this cpu", "tiny")
    assert found.kv_capacity == {1: 4 * 2**20 // (2 * 2 * 64 * 4)}
    assert_measured(found, LENGTH, SEQUENCES)


def test_a_folder_without_a_model_is_refused_before_an_engine_starts(old: Model, tmp_path: Path) -> None:
    settings = engine_config(old)
    empty = settings.run.changed(model={"path": str(tmp_path)})
    with pytest.raises(UserError, match=r"no config\.json there"):
        calibrate(msgspec.structs.replace(settings, run=empty), "cpu", "tiny")


@pytest.mark.nightly
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_the_error_of_an_engine_that_cannot_start_is_shown(old: Model, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    settings = engine_config(old)
    broken = settings.run.changed(model={"path": str(tmp_path)})
    with pytest.raises(OperationError, match="before it was measured"):
        calibrate(msgspec.structs.replace(settings, run=broken), "cpu", "tiny")
