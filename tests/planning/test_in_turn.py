"""Nodes that serve both stages in turn, and groups that are trained as they are complete: chosen where they pay, as
simulated, and with the keys that they need."""

from __future__ import annotations

from statistics import fmean

import msgspec
import pytest

from libra_hpc.config.load import validate
from libra_hpc.planning import in_turn
from libra_hpc.planning.best_plan import best_plans, scene
from libra_hpc.planning.in_turn import ASSUMED_S, asked_in_turn, in_turn_of
from libra_hpc.planning.initial import InitialPlan, initial_plan
from libra_hpc.planning.layout_space import LayoutSpace
from libra_hpc.planning.live import live_player
from libra_hpc.planning.request import PlanRequest, request
from libra_hpc.preflight.checks import problems
from libra_hpc.simulator.play import Play

from .conftest import Call, run_file

pytestmark = pytest.mark.slow

LONG = {"work": {"answer_tokens": 1_000, "turns": 6}}


def asked(eta: int = 0, prompts: int = 16, switch_s: float = 5.0, host: bool = True) -> PlanRequest:
    algorithm = {"prompts_per_step": prompts, "eta": eta}
    config = validate(run_file((2, 0, 2), algorithm=algorithm, optimizer={"host": host}, task=LONG))
    return asked_in_turn(request(config), config, switch_s)


@pytest.mark.parametrize("eta", [0, 1])
def test_a_batch_in_turn_takes_both_stages_and_a_pair_of_switches(eta: int) -> None:
    made = asked(eta)
    space = LayoutSpace(made)
    for plan in (one for one in space.plans([4], 0) if one.in_turn and one.engines[0].tp == 8):
        assert (plan.trains, plan.rolls(4), plan.engines[0].devices) == (4, 4, 32), "every node does both"
        engines, settings = scene(made, space, plan)
        shown = Play(lambda part, n: made.work.batch(n * 16, part), engines, made.policy, settings)
        batch_s = fmean(shown.rounds(2))
        least = plan.train.time.total + plan.in_turn.switch_s
        assert batch_s > least
        if not eta:
            assert batch_s * (1.0 - shown.rollout_share) == pytest.approx(least + plan.update.diff_s, rel=0.05)


def test_cheap_switches_choose_nodes_in_turn_and_dear_ones_today_s_split() -> None:
    chosen = [best_plans(asked(switch_s=s)).plans[0] for s in (1.0, 1_000.0)]
    assert [plan.in_turn is not None for plan in chosen] == [True, False]


def test_a_core_rolls_out_on_gpus_where_its_state_is_in_host_memory() -> None:
    beside = [plan for plan in LayoutSpace(asked(host=False)).plans([4], 0) if plan.in_turn]
    assert {(plan.trains, plan.rolls(4)) for plan in beside} == {(4, 3), (4, 2), (4, 1)}
    result = best_plans(asked(eta=1, switch_s=0.0))
    ((plan, even_s),) = in_turn_of(result)
    assert in_turn_of(msgspec.structs.replace(result, plans=(plan,))) == [(plan, float("inf"))]
    assert (plan.rolls(4), even_s) == (
        4,
        pytest.approx(min(p.seconds for p in result.plans if not p.in_turn) - plan.seconds),
    )


def test_groups_that_are_complete_are_trained_beside_rollout() -> None:
    made = asked(switch_s=1_000.0)
    plan = best_plans(made).plans[0]
    assert 0 < LayoutSpace(made).portion(plan) <= 8
    assert plan.seconds < plan.rollout_s + 0.8 * plan.train.time.total


def filled(switch_s: float, monkeypatch: pytest.MonkeyPatch) -> InitialPlan:
    monkeypatch.setattr(in_turn, "ASSUMED_S", switch_s)
    planner = {"time_sharing": "auto"}
    data = run_file(
        (2, 0, 3),
        algorithm={"prompts_per_step": 64, "eta": 0, "minibatches": 2},
        planner=planner,
        optimizer={"host": True},
    )
    return initial_plan(validate({**data, "components": {"split": "auto", **data["components"]}}))


def test_a_split_that_is_filled_in_has_every_node_of_a_plan_in_turn_in_both_stages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = filled(0.0, monkeypatch)
    config, parts = made.config, made.config.components
    assert (
        list(problems(config)),
        parts.train.nodes,
        parts.hybrid.nodes,
        parts.rollout.nodes,
        parts.train.roll_out,
    ) == ([], 5, 0, 0, True)
    assert (config.planner.time_sharing, live_player(config) is not None) == ("auto", True)
    assert filled(100 * ASSUMED_S, monkeypatch).plan.in_turn is None


def test_the_command_says_what_it_takes_and_needs(call: Call) -> None:
    many = ("-o", "algorithm.eta=0", "-o", "algorithm.minibatches=2")
    out = " ".join(call.shown(*many, "--switch-s", "0", "--write", "chosen.toml", "--force").split())
    assert "nodes serve both stages" in out
    assert "0 ms of switches (given); the best split is as fast" in out
    assert 'needs planner.time_sharing = "auto"' in out
    plans = call.json(*many, "--switch-s", "0")["plans"]
    assert {plan["in_turn"]["switch_s"] for plan in plans if plan["in_turn"]} == {0.0}
