"""What fits is complete, uses every node, and is explained where nothing does."""

from __future__ import annotations

import msgspec
import pytest

from libra_hpc.models.devices import device
from libra_hpc.models.memory import memory_limit
from libra_hpc.models.shapes import model_shape
from libra_hpc.models.train_seconds import TrainCost
from libra_hpc.planning import train_layout
from libra_hpc.planning.layout_space import LayoutSpace
from libra_hpc.planning.request import DevicePool
from libra_hpc.planning.train_layout import ROUNDING, Hybrid, TrainSearch
from tests.policies.control.plant_costs import A800, QWEN, FakeSteps, agentic, fake, question


def test_of_layouts_as_fast_as_each_other_the_one_with_fewer_context_ranks_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(train_layout, "ROUNDING", 0.1)
    cost = TrainCost(model_shape("qwen3-30b-a3b"), A800, 8, agentic(256))
    search = TrainSearch(cost, 8)
    able = {one: cost.time(one).total for one in search.candidates(32) if cost.limit(one) is None}
    fastest, best = min(able, key=able.__getitem__), search.best(32)
    assert best.layout.cp < fastest.cp
    equal = {one: seconds for one, seconds in able.items() if seconds <= able[fastest] * 1.1}
    fewest = min(one.cp for one in equal)
    assert best.time.total == min(seconds for one, seconds in equal.items() if one.cp == fewest)


def test_plans_use_every_node_and_fit() -> None:
    pools = [DevicePool(A800, 3, 8), DevicePool(device("h100"), 2, 8)]
    space = LayoutSpace(question(QWEN, *pools), fake)
    for pool in (0, 1):
        plans = list(space.plans([3, 2], pool))
        # A pool may train with all of its nodes: the other one rolls out, at each of four degrees.
        whole = [p for p in plans if p.nodes == pools[pool].nodes]
        assert {len(p.engines) for p in whole} == {1}
        assert len(whole) == 4
        assert len([p for p in plans if p.nodes == 1]) == 16
        for p in plans:
            assert p.train.layout.devices == 8 * p.nodes
            assert sum(one.devices for one in p.engines) == 8 * (5 - p.nodes)
            assert memory_limit(p.train.memory, pools[pool].device) is None
        assert any("GB over" in one.limit.reason for one in space.excluded(plans[0]))


def test_nothing_fits() -> None:
    training = "No training layout fits beside a rollout node; nearest: training TP8·PP2·DP1, recomputed, "
    rollout = "tokens; nearest: rollout TP8 on a800, its KV cache holds 8,000 tokens, trajectories may have 32,76"
    for model, capacity, why in (("llama-3.1-70b", 60_000, training), ("qwen3-14b", 1000, rollout)):
        space = LayoutSpace(
            question(model_shape(model), DevicePool(A800, 3, 8)),
            lambda device, shape, tp, most=capacity: FakeSteps(tp, most * tp),
        )
        assert list(space.plans([3], 0)) == []
        assert why in str(space.impossible([3]))


@pytest.mark.parametrize(
    ("hybrid", "names"),
    [
        (Hybrid(), "qwen3-14b"),
        (Hybrid(), "qwen3-30b-a3b"),
        (Hybrid(2), "qwen3-14b"),
        (Hybrid(3, world=2), "qwen3-32b"),
        (Hybrid(rest=True), "qwen3-14b"),
        (Hybrid(2), "llama-3.1-70b"),
    ],
)
def test_hybrid_nodes_are_whole_replicas_that_fit_without_the_core(hybrid: Hybrid, names: str) -> None:
    shape = model_shape(names)
    trainer = TrainCost(shape, A800, 8, agentic(64))
    search, asked = TrainSearch(trainer, 8), question(shape, DevicePool(A800, 6, 8), trajectories=64, hybrid=hybrid)
    found = list(LayoutSpace(asked, fake).plans([6], 0))
    assert found
    for row in found:
        wanted = hybrid.nodes(6 - row.nodes)
        able = []
        for one in search.candidates(8 * row.nodes):
            own = msgspec.structs.replace(one, dp=8 * hybrid.world // one.replica, elastic=True)
            beside = search.runs_beside(one, hybrid.world) and trainer.limit(own) is None
            if trainer.limit(one) is None and (beside or not row.hybrid):
                able.append(trainer.time(one).total)
        assert row.train.time.total == pytest.approx(min(able), rel=ROUNDING)
        assert row.hybrid in (0, wanted)
        assert row.hybrid % hybrid.world == 0
    some = bool(hybrid.most or hybrid.rest) and names != "llama-3.1-70b"
    assert any(row.hybrid for row in found) is some


def test_excluded_layouts_do_not_fit_and_the_best_one_is_as_fast_as_large_models_are() -> None:
    search = TrainSearch(TrainCost(QWEN, A800, 8, agentic()), 8)
    best = search.best(16)
    assert memory_limit(best.memory, A800) is None
    assert best.layout.devices == 16
    assert 0.3 < best.time.mfu < 0.55
    excluded = search.excluded(16)
    assert [e.limit.over for e in excluded] == sorted(e.limit.over for e in excluded)
    assert any(e.what.startswith("training TP1·PP1·DP16") and "GB over" in e.limit.reason for e in excluded)
