"""The operator tables against real steps: vLLM 0.32, Qwen3-8B in bfloat16, one H200 (``h200_qwen3-8b.json``).

The file has medians of 4,982 steps. The engine schedules synchronously (`libra_hpc.engine.settings`), so the
host's work comes on top of the device's.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np
import pytest

from libra_hpc.models.devices import device
from libra_hpc.models.step_times.lookup import lookup
from libra_hpc.models.step_times.measured import load

from .support import bare

MEASURED = load(Path(__file__).with_name("h200_qwen3-8b.json"))


def test_decode_steps_are_the_tables_plus_the_hosts_work() -> None:
    tables = lookup(bare("h200"), "qwen3-8b", 1, source="tables")
    points = [p for p in MEASURED.points if not p.prefill]
    assert len(points) == 30
    rest = np.array([p.seconds - tables.step_s(p.decodes, p.kv_tokens) for p in points])
    weight = np.array([1.0 / p.seconds for p in points])
    terms = np.array([[1.0, p.decodes] for p in points])
    (step_s, sequence_s), *_ = np.linalg.lstsq(terms * weight[:, None], rest * weight, rcond=None)
    assert step_s == pytest.approx(device("h200").host_s, rel=0.1)
    assert sequence_s == pytest.approx(device("h200").host_sequence_s, rel=0.15)
    whole = lookup("h200", "qwen3-8b", 1, source="tables")
    errors = [abs(whole.step_s(p.decodes, p.kv_tokens) / p.seconds - 1.0) for p in points]
    assert statistics.median(errors) < 0.03
    assert max(errors) < 0.12


def test_long_prompts_take_the_time_of_the_tables() -> None:
    tables = lookup("h200", "qwen3-8b", 1, source="tables")
    points = [p for p in MEASURED.points if p.prefill >= 1024]
    assert points
    for p in points:
        assert tables.step_s(p.decodes, p.kv_tokens, p.prefill, p.context) == pytest.approx(p.seconds, rel=0.2)


def test_the_kv_cache_is_as_large_as_planned() -> None:
    assert lookup("h200", "qwen3-8b", 1).kv_capacity == pytest.approx(MEASURED.kv_capacity[1], rel=0.05)
