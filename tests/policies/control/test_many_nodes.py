"""Larger pools: several nodes at once, the limit on moves, noise, and the contents of a decision."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from libra_hpc.config.rollout import PlannerSection
from libra_hpc.policies.control.decide import Planner
from libra_hpc.policies.control.hysteresis import HOUR

from .plant import SETTINGS, Plant, Shape, ideal


def start_from(plant: Plant, rollout: range) -> None:
    """Hybrid nodes of these ranks roll out, the others train."""
    for i, node in enumerate(plant.nodes[2:], start=2):
        plant.nodes[i] = replace(node, role="rollout" if node.rank in rollout else "train")


@pytest.mark.parametrize("seed", range(3))
def test_a_large_imbalance_moves_several_nodes_at_once(seed: int) -> None:
    plant = Plant(ideal(24.0, 8.0), hybrids=10, seed=seed)
    planner = Planner(SETTINGS)
    plant.run(300, planner)
    moved = [d for d in plant.decisions if d.action != "hold"]
    assert len(moved[0].nodes) >= 4
    assert moved[0].node == moved[0].nodes[0]
    assert len(moved) <= 3
    train = sum(n.role == "train" for n in plant.nodes)
    assert train in (8, 9, 10)  # the best is 9: 24 / 9 against 8 / 3
    assert planner.outcomes[0].count == len(moved[0].nodes)
    assert planner.outcomes[0].realised > 0.0


@pytest.mark.parametrize("seed", range(3))
def test_noise_on_a_pool_of_twelve_moves_nothing_in_a_thousand_batches(seed: int) -> None:
    # 8 / 8 and 4 / 4: the best of twelve nodes.
    plant = Plant(ideal(8.0, 4.0), hybrids=10, seed=seed, noise=0.1)
    start_from(plant, rollout=range(10, 13))
    plant.run(1000, Planner(SETTINGS), interval=2.0)
    assert len(plant.decisions) > 300
    assert plant.ordered == []


@pytest.mark.parametrize("limit", [3, 6])
def test_a_workload_that_swings_for_ever_cannot_buy_more_moves_than_the_bound(limit: int) -> None:
    swings: Shape = lambda n, m, mean: (8.0 * mean / 50.0 / n, 400.0 / mean / m)  # noqa: E731
    plant = Plant(swings, hybrids=4, noise=0.02, switch_s=1.0, prompts=16)
    cheap = PlannerSection(switch_cost_s=1.0, min_dwell_s=0.0, margin=1.0, moves_per_hour=limit, horizon_s=1e4)
    planner = Planner(cheap)
    for swing in range(40):
        plant.length = 25.0 if swing % 2 else 150.0
        plant.run(40, planner)
    assert len(plant.ordered) >= limit
    times = [at for at, _ in plant.ordered]
    for start in times:
        assert sum(start <= at < start + HOUR for at in times) <= limit
    assert any("moves an hour are left" in d.reason for d in plant.decisions)


def test_a_decision_has_inputs_five_candidates_and_triggers() -> None:
    plant = Plant(ideal(24.0, 8.0), hybrids=10)
    planner = Planner(SETTINGS)
    plant.run(200, planner)
    moved = next(d for d in plant.decisions if d.action != "hold")
    numbers = "train_s rollout_s batch_s horizon_s trainer_wait_share moves_left pays_s needed_s"
    assert set(numbers.split()) <= set(moved.numbers)
    assert len(moved.candidates) == 5
    best = moved.candidates[0]
    assert best.train == 1 + len(moved.nodes)
    assert best.gain_s - best.needed_s == max(c.gain_s - c.needed_s for c in moved.candidates)
    assert best.gain_s > best.needed_s
    assert "imbalance" in moved.triggers
    assert any("period" in d.triggers for d in plant.decisions)
    assert any(not d.triggers and "hold" in d.reason for d in plant.decisions)


def test_growing_work_is_acted_on_with_its_forecast() -> None:
    """Rollout grows by 1 % a batch: the trend is an input of the decision, which takes more nodes than the present
    needs."""
    grows: Shape = lambda n, m, mean: (4.0 / n, 4.0 * mean / 50.0 / m)  # noqa: E731
    plant = Plant(grows, hybrids=10, start="train", noise=0.02, prompts=32)
    start_from(plant, rollout=range(7, 13))
    planner = Planner(PlannerSection(switch_cost_s=1.0, min_dwell_s=0.0))
    for _ in range(120):
        plant.length *= 1.01
        plant.run(1, planner, interval=0.0)
    # `run` ends after one batch: only the snapshot with many steps left may move.
    assert plant.ordered == []
    for _ in range(60):
        plant.length *= 1.01
        plant.batch()
        plant.evaluate(planner, 1000)
    moved = [d for d in plant.decisions if d.action == "to_rollout"]
    assert moved
    assert any(d.numbers.get("rollout_trend_per_h", 0.0) > 0.0 for d in moved)
