"""The search for a training layout: what large models reach, the optimum, and what does not fit."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_hpc.models.memory import memory_limit
from libra_hpc.models.shapes import model_shape
from libra_hpc.models.train_seconds import TrainCost
from libra_hpc.policies.search.train_layout import ROUNDING, TrainSearch
from tests.policies.control.plant_costs import A800, QWEN, agentic


def cost() -> TrainCost:
    return TrainCost(QWEN, A800, 8, agentic().training)


def test_plain_mfu_is_what_large_models_reach() -> None:
    assert 0.3 < TrainSearch(cost(), 8).best(32).time.mfu < 0.55


@settings(max_examples=8)
@given(st.sampled_from([8, 16, 24, 40]), st.sampled_from([32, 512]), st.sampled_from(["qwen3-14b", "qwen3-30b-a3b"]))
def test_the_training_search_equals_enumeration(devices: int, trajectories: int, model: str) -> None:
    """Bounds and order must not cost the optimum."""
    batch = agentic(trajectories, longest=8192, generated=1000).training
    tried = TrainCost(model_shape(model), A800, 8, batch)
    search = TrainSearch(tried, 8)
    able = [tried.time(one).total for one in search.candidates(devices) if tried.limit(one) is None]
    best = search.best(devices)
    assert (math.inf if best is None else best.time.total) == pytest.approx(min(able, default=math.inf), rel=ROUNDING)


def test_excluded_layouts_do_not_fit_and_the_best_one_does() -> None:
    search = TrainSearch(cost(), 8)
    best = search.best(16)
    assert memory_limit(best.memory, A800) is None
    assert best.layout.devices == 16
    excluded = search.excluded(16)
    assert [e.limit.over for e in excluded] == sorted(e.limit.over for e in excluded)
    assert any(e.what.startswith("training TP1·PP1·DP16") and "GB over" in e.limit.reason for e in excluded)
