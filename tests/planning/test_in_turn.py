"""Nodes that serve both stages in turn, and groups that are trained as they are complete: chosen where they pay, as
simulated, and with the keys that they need."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from libra_hpc.config.load import validate
from libra_hpc.models.step_times.lookup import lookup
from libra_hpc.planning import in_turn
from libra_hpc.planning.in_turn import ASSUMED_S, asked_in_turn, in_turn_of
from libra_hpc.planning.initial import InitialPlan, initial_plan
from libra_hpc.planning.request import PlanRequest, request
from libra_hpc.planning.simulated_plan import engines_of, simulated_plans
from libra_hpc.planning.work import Assumed
from libra_hpc.policies.scheduling.registry import make_policy
from libra_hpc.policies.search.run_plan import RunPlan
from libra_hpc.preflight.checks import problems
from libra_hpc.simulator.settings import Colocation, SimulationSettings
from libra_hpc.simulator.simulate import simulate

from .conftest import Call, run_file

pytestmark = pytest.mark.slow

BATCHES = 4
LONG = Assumed(generated=6_000, turns=6)


def asked(eta: int = 0, prompts: int = 16, switch_s: float = 5.0) -> PlanRequest:
    config = validate(run_file((2, 0, 2), algorithm={"prompts_per_step": prompts, "eta": eta}))
    return asked_in_turn(request(config, assumed=LONG), config, switch_s)


def with_core(made: PlanRequest) -> PlanRequest:
    """As if this version ran every way."""
    return msgspec.structs.replace(made, in_turn=tuple(msgspec.structs.replace(w, runs=True) for w in made.in_turn))


def seconds_a_batch(made: PlanRequest, plan: RunPlan, portion: int) -> float:
    """Of ``BATCHES`` batches in steady state."""
    settings = SimulationSettings(
        max_inflight=made.max_inflight,
        max_num_seqs=made.options.max_num_seqs,
        max_model_len=made.options.max_model_len,
        batch_groups=made.batch.trajectories // made.options.group,
        eta=made.batch.eta,
        train_s=plan.train.time.total,
        portion_groups=portion,
        colocation=Colocation(plan.in_turn.switch_s) if plan.in_turn else None,
    )
    size, group = made.batch.trajectories, made.options.group
    work = [
        msgspec.structs.replace(one, prompt_id=f"{seed}/{one.prompt_id}")
        for seed in range(BATCHES)
        for one in made.work.batch(size, group, seed)
    ]
    engines = engines_of(plan.rollout, [pool.device for pool in made.pools], made.shape, lookup)
    steps = simulate(work, engines, make_policy(made.policy), settings).steps
    return (steps[-1].end_at - steps[0].end_at) / (len(steps) - 1)


@pytest.mark.parametrize("eta", [0, 1])
def test_a_batch_in_turn_takes_both_stages_and_a_pair_of_switches(eta: int) -> None:
    made = asked(eta)
    search = made.search()
    for plan in search.in_turn([4], 0):
        rolls = 4 if plan.in_turn.core_rolls else 4 - plan.nodes
        assert (plan.trains, plan.rolls(4)) == (3, rolls)
        assert 8 * rolls == plan.rollout.devices(0)
        whole = plan.train.time.total + plan.update.diff_s + plan.rollout_s + 5.0
        assert plan.seconds == pytest.approx(whole + plan.update.pause_s / plan.rollout.least_tp)
        alone = search.build([4], 0, plan.nodes)
        assert plan.train.time.total < alone.train.time.total or plan.nodes == 3
        assert plan.rollout_s < alone.rollout_s or not plan.in_turn.core_rolls


def test_cheap_switches_choose_nodes_in_turn_and_dear_ones_today_s_split() -> None:
    chosen = [with_core(asked(switch_s=s)).search().run().plans[0] for s in (1.0, 1_000.0)]
    assert [plan.in_turn is not None for plan in chosen] == [True, False]


def test_what_this_version_does_not_run_is_shown_for_study_alone() -> None:
    assert [way.runs for way in asked().in_turn] == [True, False], "no core rolls out on GPUs"
    made = asked(eta=1, switch_s=0.0)
    search = made.search()
    for result in (search.run(), simulated_plans(made, search, search.run())):
        assert all(plan.in_turn is None for plan in result.plans)
        ((plan, even_s),) = in_turn_of(result)
        assert plan is result.study
        assert even_s == pytest.approx(min(p.seconds for p in result.plans) - plan.seconds)


@pytest.mark.parametrize("core_rolls", [False, True])
def test_the_planned_seconds_are_those_of_simulated_batches_in_turn(core_rolls: bool) -> None:
    made = with_core(asked())
    made = msgspec.structs.replace(made, in_turn=tuple(w for w in made.in_turn if w.core_rolls is core_rolls))
    search = made.search()
    plan = next(p for p in simulated_plans(made, search, search.run()).plans if p.in_turn)
    assert plan.seconds == pytest.approx(seconds_a_batch(made, plan, 0), rel=0.1)


@pytest.mark.parametrize("prompts", [16, 32])
def test_the_planned_seconds_of_streamed_training_are_those_of_simulated_batches(prompts: int) -> None:
    made = asked(prompts=prompts, switch_s=1_000.0)
    search = made.search()
    plan = simulated_plans(made, search, search.run()).plans[0]
    portion = search.portion(plan)
    assert 0 < portion <= prompts / 2
    assert 0.2 * plan.train.time.total < plan.hidden_s < plan.train.time.total
    assert plan.seconds == pytest.approx(seconds_a_batch(made, plan, portion), rel=0.1)
    assert plan.model_s == pytest.approx(plan.seconds, rel=0.2)


@pytest.mark.parametrize("changes", [{"minibatches": 2}, {"reference_kl_coef": 0.1}, {"eta": 1}])
def test_nothing_is_hidden_where_batches_are_trained_whole(changes: dict[str, Any]) -> None:
    algorithm = {"prompts_per_step": 16, "eta": 0, **changes}
    made = request(validate(run_file((2, 0, 2), algorithm=algorithm)), assumed=LONG)
    assert made.search().run().plans[0].hidden_s == 0.0


def filled(switch_s: float, monkeypatch: pytest.MonkeyPatch) -> InitialPlan:
    monkeypatch.setattr(in_turn, "ASSUMED_S", switch_s)
    planner = {"time_sharing": "auto"}
    data = run_file((2, 0, 3), algorithm={"prompts_per_step": 64, "eta": 0, "minibatches": 2}, planner=planner)
    return initial_plan(validate({**data, "components": {"split": "auto", **data["components"]}}), simulated=False)


def test_a_split_that_is_filled_in_has_the_hybrid_nodes_of_a_plan_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    made = filled(0.0, monkeypatch)
    config, parts = made.config, made.config.components
    assert made.plan.in_turn is not None
    assert list(problems(config)) == []
    assert (parts.hybrid.nodes, parts.hybrid.gpu_type, parts.rollout.nodes) == (4 - parts.train.nodes, "a800", 1)
    assert config.planner.time_sharing == "auto"
    assert filled(100 * ASSUMED_S, monkeypatch).plan.in_turn is None


def test_the_command_says_what_it_takes_and_needs(call: Call) -> None:
    many = ("-o", "algorithm.eta=0", "-o", "algorithm.minibatches=2")
    out = " ".join(call.shown(*many, "--switch-s", "0", "--write", "chosen.toml", "--force").split())
    assert "nodes serve both stages" in out
    assert "0 ms of switches (given); the best split is as fast at" in out
    assert 'needs planner.time_sharing = "auto"' in out
    assert "(assumed: --switch-s); the best split is as fast" in " ".join(call.shown(*many).split())
    assert call.json(*many, "--switch-s", "0")["plans"][0]["in_turn"]["switch_s"] == 0.0
    assert "not run by libra-hpc yet" in " ".join(call.shown().split())
