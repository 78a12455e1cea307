"""Steps of a real engine as a calibration file: every kind of step, true to what was run, and fit to be fitted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from libra_hpc.engine.measure_steps import CHUNK, DECODE_STEPS, FILL, REPEATS, plans, reach
from libra_hpc.models.step_times.measured import Calibration, StepPoint, load, measured_times, save

from .engine_harness import Model, engine_config

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

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


def run(folder: Path, model: Model, tp: int, out: Path, device: str = "this cpu") -> subprocess.CompletedProcess[str]:
    config = folder / f"tp{tp}.json"
    settings = msgspec.structs.replace(
        engine_config(model, tp=tp, max_num_seqs=SEQUENCES), max_model_len=LENGTH, kv_cache_mb=4
    )
    config.write_bytes(msgspec.json.encode(settings))
    options = ["--config", str(config), "--device", device, "--model", "tiny", "--out", str(out)]
    command = [sys.executable, "-m", "libra_hpc.engine.measure_steps", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_steps_of_one_degree_join_those_of_another(old: Model, folder: Path) -> None:
    out = folder / "steps.json"
    other = StepPoint(tp=2, decodes=1, kv_tokens=10, seconds=0.5)
    stale = StepPoint(tp=1, decodes=9, kv_tokens=10, seconds=0.5)
    save(Calibration(device="this cpu", model="tiny", kv_capacity={1: 5, 2: 7}, points=[other, stale]), out)
    done = run(folder, old, 1, out)
    assert done.returncode == 0, done.stderr
    found = load(out)
    assert found.kv_capacity == {1: 4 * 2**20 // (2 * 2 * 64 * 4), 2: 7}
    assert other in found.points
    points = [point for point in found.points if point.tp == 1]
    decode = [point for point in points if not point.prefill]
    assert {point.decodes for point in decode} == {1, 2, 4}, "the earlier measurement of this degree is replaced"
    assert len(decode) >= 3 * 3 * (DECODE_STEPS - 4)
    assert all(8 * point.decodes < point.kv_tokens <= LENGTH * point.decodes for point in decode)
    alone = [point for point in points if not point.decodes]
    assert len(alone) >= 4 * REPEATS
    assert {point.context > 0 for point in alone} == {True, False}
    assert measured_times(found, 1).step_s(2, 200, 0, 0) > 0.0
    refused = run(folder, old, 1, out, device="another")
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert "device = 'another'" in refused.stderr
