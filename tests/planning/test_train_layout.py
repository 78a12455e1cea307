"""The search for a training layout: what large models reach, the optimum, and what does not fit."""

from __future__ import annotations

from libra_hpc.models.memory import memory_limit
from libra_hpc.models.train_seconds import TrainCost
from libra_hpc.planning.train_layout import TrainSearch
from tests.policies.control.plant_costs import A800, QWEN, agentic


def cost() -> TrainCost:
    return TrainCost(QWEN, A800, 8, agentic())


def test_plain_mfu_is_what_large_models_reach() -> None:
    assert 0.3 < TrainSearch(cost(), 8).best(32).time.mfu < 0.55


def test_excluded_layouts_do_not_fit_and_the_best_one_does() -> None:
    search = TrainSearch(cost(), 8)
    best = search.best(16)
    assert memory_limit(best.memory, A800) is None
    assert best.layout.devices == 16
    excluded = search.excluded(16)
    assert [e.limit.over for e in excluded] == sorted(e.limit.over for e in excluded)
    assert any(e.what.startswith("training TP1·PP1·DP16") and "GB over" in e.limit.reason for e in excluded)
