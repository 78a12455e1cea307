"""The planner beside guests: what they do for the own nodes, and when the run queues nodes for itself."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from libra_hpc.protocol.plan import BorrowFact, PlanDecision

from .plant import Plant, ideal


@pytest.mark.parametrize("seed", range(3))
def test_a_hybrid_node_trains_while_lenders_serve_and_comes_back_when_they_leave(seed: int) -> None:
    plant = Plant(ideal(1.6, 2.0), seed=seed, noise=0.05)
    planner = plant.planner()
    plant.run(150, planner)
    assert plant.moves == [], "two nodes roll out, 1.0 s beside 1.6 s; one alone would take 2.0 s"
    plant.lent = 2.0
    plant.run(250, planner)
    assert plant.moves == ["to_train"]
    plant.lent = 0.0
    plant.run(250, planner)
    assert plant.moves == ["to_train", "to_rollout"]


def spot(train_s: float, rollout_s: float, noise: float = 0.02, wanted: int = 0) -> Plant:
    """40 batches of a run that may queue four nodes, whose start takes 60 s."""
    fact = BorrowFact(4, wanted, float("-inf"), 60.0)
    return Plant(ideal(train_s, rollout_s), hybrids=0, noise=noise, lent=wanted, spot=fact).batches(40)


def decided(plant: Plant, steps_left: int) -> PlanDecision:
    return plant.planner().decide(plant.snapshot(steps_left), plant.now)


def test_nodes_are_queued_if_they_pay_over_the_remaining_steps() -> None:
    plant = spot(0.7, 3.0)
    decision = decided(plant, 500)
    assert (decision.action, decision.node, decision.nodes, decision.spot_nodes) == ("borrow", -1, (), 3)
    assert decision.reason.startswith("borrow: over 500 steps spot node 1 saves 7"), "a fourth brings little"
    assert "must save 90 s" in decision.reason
    assert decision.numbers["after_s"] < decision.numbers["batch_s"]
    late = decided(plant, 20)
    assert (late.action, late.spot_nodes) == ("hold", 0)
    assert "over 20 steps" in late.reason
    assert late.reason.startswith("hold: ")


def test_fewer_nodes_are_queued_where_training_is_as_slow_then() -> None:
    assert decided(spot(2.0, 5.5, noise=0.01), 500).spot_nodes == 2
    assert decided(spot(2.0, 1.0), 500).action == "hold"


def test_queued_nodes_go_back_when_they_bring_nothing_any_more() -> None:
    plant = spot(0.8, 3.0, wanted=3)
    assert decided(plant, 500).action == "hold"
    plant.shape = ideal(0.8, 0.6)
    plant.batches(40)
    decision = decided(plant, 500)
    assert (decision.action, decision.spot_nodes) == ("give_back", 0)
    plant.spot = replace(plant.spot, since=plant.now - 59.0)
    assert decided(plant, 500).action == "hold", "a start has not passed since the last change"
