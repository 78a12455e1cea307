"""The best plan is that of all layouts played, is found again, and takes a few plays."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest
from msgspec.structs import replace

from libra_hpc.config.load import validate
from libra_hpc.errors import UserError
from libra_hpc.models.step_times.lookup import lookup
from libra_hpc.planning import best_plan
from libra_hpc.planning.best_plan import MOST, Bound, best_plans, scene
from libra_hpc.planning.layout_space import LayoutSpace
from libra_hpc.planning.request import PlanRequest, RunPlan, request
from libra_hpc.simulator.play import Play

from .conftest import run_file

SHORT = {"work": {"answer_tokens": 200, "turns": 4}}
TWO_KINDS = {
    "train": {"nodes": 2, "gpus": 8, "gpu_type": "a800"},
    "hybrid": {"nodes": 0},
    "rollout": {"nodes": 1, "gpus": 8, "gpu_type": "h100"},
}


def question(eta: int = 1, prompts: int = 8, nodes: int = 4, **sections: dict[str, object]) -> PlanRequest:
    batch = {"prompts_per_step": prompts, "eta": eta}
    return request(validate(run_file((nodes - 2, 0, 2), algorithm=batch, task=SHORT, **sections)))


def seconds(asked: PlanRequest, plan: RunPlan, *, rounds: int = MOST // 2) -> float:
    """A play of the plan, of batches that the search plays."""
    engines, settings = scene(asked, LayoutSpace(asked), plan)
    made = Play(lambda part, n: asked.work.batch(n * settings.batch_groups, part), engines, asked.policy, settings)
    return fmean(made.rounds(rounds))


@pytest.mark.parametrize("eta", [0, 1, 2])
def test_the_best_plan_is_that_of_all_layouts_played(eta: int) -> None:
    asked = question(eta)
    found = best_plans(asked).plans[0]
    own_s = seconds(asked, found)
    assert found.seconds == pytest.approx(own_s, abs=2 * found.error_s)
    assert own_s <= 1.02 * min(seconds(asked, plan) for plan in LayoutSpace(asked).plans([4], 0))


def test_two_kinds_of_nodes_have_a_degree_each_and_either_may_train() -> None:
    asked = question(components=TWO_KINDS)
    plans = best_plans(asked).plans
    assert {plan.pool for plan in plans} == {0, 1}
    assert {len(plan.engines) for plan in plans if plan.nodes == 1} == {1, 2}
    assert {plan.pool for plan in best_plans(asked, trainers=(0,)).plans} == {0}


def test_few_seats_on_environment_nodes_make_a_batch_longer() -> None:
    config = validate(run_file((2, 0, 2), algorithm={"prompts_per_step": 8}, task=SHORT))
    env = replace(config.components.env, nodes=2, seats=4)
    asked = request(config.changed(components={"env": env}))
    plan = next(iter(LayoutSpace(asked).plans([4], 0)))
    assert scene(asked, LayoutSpace(asked), plan, 0.5)[1].seats == 4
    without = replace(asked, settings=replace(asked.settings, seats=0))
    assert seconds(asked, plan, rounds=1) > 1.5 * seconds(without, plan, rounds=1)


@pytest.mark.parametrize("eta", [0, 1])
def test_no_play_is_faster_than_its_bound(eta: int) -> None:
    asked = question(eta)
    space = LayoutSpace(asked)
    limits = asked.settings
    bound = Bound(asked.work.batch(8 * limits.batch_groups, 0), asked.trajectories, limits.max_num_seqs)
    for plan in space.plans([4], 0):
        work_s, alone_s = bound.rollout_s([(space.steps_of(0, one.tp), one.replicas) for one in plan.engines])
        assert max(work_s, alone_s / (eta + 1)) < 1.05 * seconds(asked, plan)


def test_the_best_one_is_played_longest_and_each_plan_is_told() -> None:
    told = list[int]()
    plans = best_plans(question(), progress=told.append).plans
    assert told == list(range(1, len(plans) + 1))
    assert plans[0].played == max(plan.played for plan in plans) <= MOST


def test_a_part_stands_for_a_large_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = question(prompts=64, nodes=10)
    few = best_plan.PLAYED_GPUS
    monkeypatch.setattr(best_plan, "PLAYED_GROUPS", 1)
    whole = best_plans(asked).plans[0]
    assert whole.seconds == pytest.approx(seconds(asked, whole), rel=0.1)
    engines, settings = scene(asked, LayoutSpace(asked), whole, few / whole.engines[0].devices)
    assert sum(one.tp for one in engines) == few
    assert settings.batch_groups == pytest.approx(64 * few / whole.engines[0].devices, abs=1)


@pytest.mark.parametrize("prompts", [1, 2])
def test_a_batch_of_a_few_trajectories_is_planned_too(prompts: int) -> None:
    assert best_plans(question(0, prompts=prompts)).plans[0].seconds > 0.0


def test_answers_are_remembered_to_the_last_digit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = question()
    first = best_plans(asked, cache=tmp_path)
    monkeypatch.setattr(best_plan, "Play", lambda *a, **k: pytest.fail("played again"))
    assert not first.kept
    assert best_plans(asked, cache=tmp_path, trainers=(0,)) == replace(first, kept=True)
    with pytest.raises(pytest.fail.Exception):
        best_plans(asked, cache=tmp_path, again=True)
    others = [(replace(asked, policy="sticky"), lookup), (asked, lambda *a: lookup(*a))]
    for other, steps in others:
        with pytest.raises(pytest.fail.Exception):
            best_plans(other, steps, cache=tmp_path)


def test_each_stage_needs_a_node() -> None:
    with pytest.raises(UserError, match="nodes = 1: each stage needs a node of its own; valid: at least 2 nodes"):
        best_plans(question(), nodes=[1])
