"""The planner against plants whose truth is known: one movable node, and larger pools."""

from __future__ import annotations

from statistics import fmean
from unittest.mock import Mock

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_hpc.config.rollout import PlannerSection
from libra_hpc.errors import OperationError, UserError
from libra_hpc.policies.control.coming_work import coming_work
from libra_hpc.policies.control.layout_choice import OtherLayout
from libra_hpc.policies.control.move_choice import HOUR
from libra_hpc.policies.control.plays import PlayWork, Seconds
from libra_hpc.protocol.plan import NodeFact

from .plant import NOTHING, SETTINGS, Plant, Shape, ideal

SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2, 3))]
"""Of the noise of a plant: one by commit."""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("train_s", "rollout_s", "hybrids", "noise"),
    # One node more or less makes the other stage the bottleneck: 1.0 / 1.0 becomes 0.5 / 2.0. Of twelve nodes eight
    # train: 8 / 8 and 4 / 4.
    [(1.0, 1.6, 1, 0.1), (1.0, 2.0, 1, 0.3), (8.0, 4.0, 10, 0.1)],
    ids=["a good split", "balanced stages", "a pool of twelve"],
)
def test_noise_alone_moves_nothing(train_s: float, rollout_s: float, hybrids: int, noise: float, seed: int) -> None:
    plant = Plant(ideal(train_s, rollout_s), hybrids=hybrids, train=7 if hybrids > 1 else 0, seed=seed, noise=noise)
    plant.run(500, plant.planner(), interval=2.0)
    assert plant.moves == []
    assert len(plant.decisions) > 150


@pytest.mark.parametrize("seed", SEEDS)
def test_a_training_bottleneck_takes_the_hybrid_node_once(seed: int) -> None:
    plant = Plant(ideal(2.0, 0.8), seed=seed)
    planner = plant.planner()
    plant.run(600, planner)
    assert plant.moves == ["to_train"]
    moved = next(d for d in plant.decisions if d.action == "to_train")
    assert moved.numbers["after_s"] == pytest.approx(plant.decisions[-1].numbers["batch_s"], abs=0.4)


def test_nodes_that_are_one_replica_move_together_or_not_at_all() -> None:
    plant = Plant(ideal(6.0, 0.4), hybrids=4)
    plant.nodes = [
        msgspec.structs.replace(node, unit=node.rank - (node.rank - 3) % 2) if node.component == "hybrid" else node
        for node in plant.nodes
    ]
    plant.run(100, plant.planner())
    moved = next(decision for decision in plant.decisions if decision.action != "hold")
    assert moved.nodes in ((3, 4), (5, 6), (3, 4, 5, 6))
    assert {candidate.train for candidate in moved.candidates} == {1, 3, 5}


@pytest.mark.parametrize("seed", SEEDS)
def test_longer_trajectories_half_way_bring_the_node_back_to_rollout_once(seed: int) -> None:
    """Lengths x3: rollout grows with them, training work by less (truncated, skipped groups), so the better split
    flips."""
    shape: Shape = lambda n, m, mean: (0.6 * (mean / 50.0) ** 0.3 / n, 0.4 * mean / 50.0 / m)  # noqa: E731
    plant, static = (Plant(shape, seed=seed, train=1) for _ in range(2))
    for one, planner in ((plant, plant.planner()), (static, static.planner(PlannerSection(enabled=False)))):
        one.run(300, planner)
        assert one.moves == []
        one.length *= 3.0
        one.run(600, planner)
    assert plant.moves == ["to_rollout"]
    assert next(d.node for d in plant.decisions if d.action != "hold") == 3
    assert any("drift" in d.triggers for d in plant.decisions)
    assert sum(plant.batch_times[-500:]) < 0.85 * sum(static.batch_times[-500:])


BACK = ["to_train", "to_rollout"]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("two_s", "moves"), [(1.5, (BACK, BACK * 2)), (1.0, (BACK[:1], BACK))], ids=["slows", "nothing"]
)
def test_a_move_that_slows_batches_or_changes_nothing_is_undone_and_not_repeated(
    two_s: float, moves: tuple[list[str], ...], seed: int
) -> None:
    """Ranks share cores: two replicas take longer than one, or as long."""
    plant = Plant(lambda n, m, mean: ((1.0 if n == 1 else two_s) * mean / 50.0, 0.3 * mean / 50.0 / m), seed=seed)
    plant.believed = ideal(1.0, 0.3)
    plant.run(1500, plant.planner())
    assert plant.moves in moves


def test_with_eta_0_the_sum_of_the_stages_counts() -> None:
    # Two trainers and one rollout node.  Overlapped, max(0.5, 1.5) -> max(1.0, 0.75) saves a third; taking turns, 2.0
    # -> 1.75 saves an eighth.
    for eta, moves in ((0, []), (1, ["to_rollout"])):
        plant = Plant(ideal(1.0, 1.5), train=1, eta=eta)
        plant.run(400, plant.planner(PlannerSection(switch_cost_s=5.0, min_dwell_s=10.0, min_gain=0.2)))
        assert plant.moves == moves


def test_the_horizon_is_some_batches_at_least_and_never_beyond_the_end() -> None:
    plant = Plant(ideal(200.0, 80.0), noise=0.02)
    plant.batches(12)

    def share(steps_left: int) -> float:
        numbers = plant.planner(PlannerSection(horizon_s=300.0)).decide(plant.snapshot(steps_left), plant.now).numbers
        return numbers["pays_s"] / (numbers["batch_s"] - numbers["after_s"])

    assert (share(1000), share(3)) == pytest.approx((12.0, 3.0))


@pytest.mark.parametrize(
    ("train_s", "batches", "settings", "why"),
    [
        (2.0, 100, PlannerSection(switch_cost_s=5.0, min_dwell_s=1e6), "of at least 1000000 s"),
        # One of two rollout nodes would be away: half of the stage for 150 s.
        (1.0, 400, PlannerSection(switch_cost_s=150.0, min_dwell_s=0.0), "does not pay 1.5 x 75.0 s switch cost"),
        (2.0, 8, SETTINGS, "hold: "),
    ],
    ids=["it has just moved", "an expensive switch", "the end is near"],
)
def test_a_bottleneck_is_left_alone(train_s: float, batches: int, settings: PlannerSection, why: str) -> None:
    plant = Plant(ideal(train_s, 0.8))
    plant.run(batches, plant.planner(settings), interval=1.0 if batches < 10 else 5.0)
    assert plant.moves == []
    assert any(why in decision.reason for decision in plant.decisions)


CORE = (NodeFact(1, "train", "train", 0.0), NodeFact(2, "rollout", "rollout", 0.0))


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        ((*CORE, NodeFact(3, "hybrid", "rollout", 0.0)), "hold: 0 of 2 steps"),
        ((*CORE, NodeFact(3, "hybrid", "to_train", 0.0)), "hold: node 3 is in state to_train"),
        (CORE, "hold: there is no hybrid node to move"),
        ((CORE[0], NodeFact(3, "hybrid", "train", 0.0)), "hold: one of the stages has no node"),
    ],
)
def test_moving_unmeasured_and_empty_pools_hold_with_a_reason(nodes: tuple[NodeFact, ...], why: str) -> None:
    snapshot = msgspec.structs.replace(NOTHING, nodes=nodes)
    plant = Plant(ideal(1.0, 1.0))
    assert plant.planner().decide(snapshot, 0.0).reason.startswith(why)
    disabled = plant.planner(PlannerSection(enabled=False)).decide(snapshot, 0.0)
    assert disabled.reason == "hold: the planner is disabled"


def test_the_numbers_of_a_decision_are_what_batches_take() -> None:
    plant = Plant(ideal(1.0, 1.6))
    planner = plant.planner()
    assert "batch_s" not in planner.decide(plant.snapshot(500), 0.0).numbers
    plant.run(100, planner)
    numbers = plant.decisions[-1].numbers
    assert numbers["batch_s"] == pytest.approx(fmean(plant.batch_times[-50:]), rel=0.15)
    assert (numbers["train_nodes"], numbers["rollout_nodes"]) == (1, 2)


@settings(max_examples=25, deadline=None)
@given(
    train=st.floats(0.05, 20.0),
    rollout=st.floats(0.05, 20.0),
    hybrids=st.integers(0, 3),
    first=st.booleans(),
    noise=st.floats(0.0, 0.5),
    eta=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_only_hybrid_nodes_move_and_no_stage_is_emptied(
    train: float, rollout: float, hybrids: int, first: bool, noise: float, eta: int, seed: int
) -> None:
    plant = Plant(ideal(train, rollout), hybrids=hybrids, train=first * hybrids, noise=noise, eta=eta, seed=seed)
    plant.run(60, plant.planner(PlannerSection(switch_cost_s=0.1, min_dwell_s=0.0, margin=1.0)), interval=0.0)
    roles = {n.component: n.role for n in plant.nodes if n.component != "hybrid"}
    assert roles == {"train": "train", "rollout": "rollout"}
    for decision in plant.decisions:
        assert (decision.node == -1) == (decision.action == "hold")
        assert decision.node == -1 or decision.node > 2
        assert decision.reason.startswith(f"{decision.action}: ")


class Layouts:
    """Finds one layout, with twice the trainers; ``asked``: mean lengths of the works that it was asked for."""

    def __init__(self, **more: object) -> None:
        self.asked: list[float] = []
        self.more = {"same_engines": True} | more

    def __call__(self, work: PlayWork, train: int, train_s: float) -> list[OtherLayout]:
        self.asked.append(fmean(record.generated for record in work.records))
        seconds = Seconds(train_s / 2, 0.1, train_s / 2)
        return [OtherLayout(2, 1, seconds, f"layout {len(self.asked)}", {"train.tp": 2}, **self.more)]


QUICK = msgspec.structs.replace(SETTINGS, period_s=20.0, repartition_cost_s=1.0)


def without_movable_nodes(layouts: Layouts, **more: float) -> Plant:
    """50 batches after trajectories became three times as long, of a run without hybrid nodes."""
    plant = Plant(ideal(1.0, 0.1), hybrids=0, noise=0.02)
    planner = plant.planner(QUICK, layouts=layouts, **more)
    plant.run(100, planner)
    plant.length *= 3.0
    for _ in range(50):
        plant.batch()
        plant.evaluate(planner)
    return plant


def test_a_layout_from_before_any_measurement_is_searched_again_once_and_then_for_other_work() -> None:
    layouts = Layouts()
    plant = without_movable_nodes(layouts)
    assert 2 <= len(layouts.asked) <= 4
    assert layouts.asked[1] > 1.25 * layouts.asked[0]
    proposed = [decision for decision in plant.decisions if decision.action == "repartition"]
    assert [one.layout for one in proposed][:2] == ["layout 1", "layout 2"]
    assert proposed[0].changes == {"train.tp": 2}
    assert "at the next step boundary, layout 1 instead of 1+1 nodes" in proposed[0].reason
    assert proposed[0].numbers["after_s"] == pytest.approx(proposed[0].numbers["batch_s"] / 2, rel=0.1)


@pytest.mark.parametrize("error", [UserError("nothing fits."), OperationError("it hangs.")])
def test_layouts_that_cannot_be_played_are_a_hold_that_names_the_cause(error: Exception) -> None:
    plant = without_movable_nodes(Mock(side_effect=error))
    assert plant.moves == []
    assert any(f"; other layouts cannot be played: {error}" in decision.reason for decision in plant.decisions)


def test_a_layout_that_a_repartition_chose_stays_until_the_work_changes() -> None:
    layouts = Layouts()
    without_movable_nodes(layouts, repartition_after=0.0)
    assert min(layouts.asked) > 50.0 * 1.25
    late = Layouts()
    without_movable_nodes(late, repartition_after=1e9)
    assert not late.asked


def test_other_engines_must_gain_more_and_a_restart_must_pay() -> None:
    dear = msgspec.structs.replace(QUICK, min_gain=0.45)
    for layouts, own in ((Layouts(same_engines=False), dear), (Layouts(), SETTINGS)):
        plant = Plant(ideal(1.0, 0.1), hybrids=0, noise=0.02)
        plant.run(40, plant.planner(msgspec.structs.replace(own, period_s=20.0), layouts=layouts), interval=1.0)
        assert layouts.asked
        assert plant.moves == []


@pytest.mark.parametrize("seed", SEEDS)
def test_a_large_imbalance_moves_several_nodes_at_once(seed: int) -> None:
    plant = Plant(ideal(24.0, 8.0), hybrids=10, seed=seed)
    planner = plant.planner()
    plant.run(300, planner)
    moved = [d for d in plant.decisions if d.action != "hold"]
    assert len(moved[0].nodes) >= 4
    assert moved[0].node == moved[0].nodes[0]
    assert moved[0].triggers == ("start",)
    best = moved[0].candidates[0]
    assert (len(moved[0].candidates), best.train) == (5, 1 + len(moved[0].nodes))
    assert best.batch_s == min(candidate.batch_s for candidate in moved[0].candidates)
    assert best.gain_s > best.needed_s
    assert len(moved) <= 3
    train = sum(n.role == "train" for n in plant.nodes)
    assert train in (8, 9, 10)  # the best is 9: 24 / 9 against 8 / 3


@pytest.mark.parametrize("limit", [3, pytest.param(6, marks=pytest.mark.nightly)])
def test_a_workload_that_swings_for_ever_cannot_buy_more_moves_than_the_bound(limit: int) -> None:
    swings: Shape = lambda n, m, mean: (8.0 * mean / 50.0 / n, 400.0 / mean / m)  # noqa: E731
    plant = Plant(swings, hybrids=4, noise=0.02, switch_s=1.0, prompts=16)
    cheap = PlannerSection(switch_cost_s=1.0, min_dwell_s=0.0, margin=1.0, moves_per_hour=limit, horizon_s=1e4)
    planner = plant.planner(cheap)
    for swing in range(20):
        plant.length = 25.0 if swing % 2 else 150.0
        plant.run(40, planner)
    assert HOUR < plant.now < 3 * HOUR
    assert len(plant.ordered) > limit
    times = [at for at, _ in plant.ordered]
    for start in times:
        assert sum(start <= at < start + HOUR for at in times) <= limit
    assert any("moves an hour are left" in d.reason for d in plant.decisions)


@pytest.mark.parametrize(("longer_for", "counted"), [(0, 12), (9, 9), (2, 2)])
def test_older_batches_count_where_they_are_like_the_newest_ones(longer_for: int, counted: int) -> None:
    plant = Plant(ideal(2.0, 0.8), prompts=16).batches(20 - longer_for)
    plant.length *= 3.0
    snapshot = plant.batches(longer_for).snapshot(9)
    assert len(coming_work(snapshot)) == counted * plant.prompts
