"""Search, then simulate: candidates, successive halving, and when a mix of TP degrees is chosen."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from libra_hpc.config.load import validate
from libra_hpc.planning import simulated_plan
from libra_hpc.planning.request import PlanRequest, request
from libra_hpc.planning.simulated_plan import MIX_GAIN, candidates, effort, halving, ranked, simulated_plans
from libra_hpc.planning.work import Assumed, Work
from libra_hpc.policies.search.best_plan import PlanSearch
from libra_hpc.policies.search.run_plan import PlanResult
from libra_hpc.protocol.trace import TrajectoryRecord, TurnRecord

from .conftest import run_file


class Option(msgspec.Struct, frozen=True):
    name: str
    mixed: bool = False
    seconds: float = 0.0
    simulated: int = 0


def played(option: Option, found: Sequence[float]) -> Option:
    return msgspec.structs.replace(option, seconds=statistics.fmean(found), simulated=len(found))


def question(eta: int = 1, prompts: int = 8) -> tuple[PlanRequest, PlanSearch, PlanResult]:
    batch = {"prompts_per_step": prompts, "eta": eta}
    asked = request(validate(run_file((2, 0, 2), algorithm=batch)), assumed=Assumed(generated=800, turns=4))
    search = PlanSearch(
        asked.shape, asked.pools, asked.batch, space=asked.space, options=asked.options, whole_nodes=True
    )
    return asked, search, search.run(5)


@pytest.mark.parametrize(
    ("mix", "first"), [(100.0 * (1 - MIX_GAIN) + 1.0, "plain"), (100.0 * (1 - MIX_GAIN) - 1.0, "mix")]
)
def test_a_mix_is_chosen_only_when_it_is_clearly_faster(mix: float, first: str) -> None:
    plans = [Option("mix", True, mix, 3), Option("plain", False, 100.0, 3), Option("other", False, 101.0, 3)]
    assert ranked(plans)[0].name == first
    assert ranked([*plans, Option("lucky", False, 50.0, 1)])[0].name == first, "one batch is not three"


def test_finalists_are_simulated_on_every_seed_and_all_on_the_same_ones() -> None:
    asked: list[tuple[str, int]] = []
    told: list[tuple[int, int]] = []

    def play(option: Option, seed: int) -> float:
        asked.append((option.name, seed))
        return float(option.name) + (5.0 if seed and option.name == "1" else 0.0)

    found = halving(
        [Option(str(n)) for n in (4, 1, 3, 2, 5)], play, played, seeds=3, progress=lambda *at: told.append(at)
    )
    assert [name for name, seed in asked if seed == 0] == ["4", "1", "3", "2", "5"]
    assert {name for name, seed in asked if seed == 1} == {name for name, seed in asked if seed == 2} == {"1", "2", "3"}
    assert [(o.name, o.simulated) for o in found] == [("2", 3), ("3", 3), ("1", 3), ("4", 1), ("5", 1)]
    assert told[0] == (0, 11)
    assert told[-1] == (10, 11)


def test_homogeneous_fleets_of_every_degree_are_candidates() -> None:
    asked, search, result = question()
    found = candidates(asked, search, result)
    for nodes in {p.nodes for p in result.plans}:
        fleets = [p.rollout.segments for p in found if p.nodes == nodes and not p.mixed]
        assert {s[0].tp for s in fleets if len(s) == 1} == {1, 2, 4, 8}
    assert [p.model_s for p in found] == sorted(p.model_s for p in found)


@pytest.mark.parametrize("eta", [0, 1])
def test_simulated_plans_have_both_times_and_are_the_same_again(eta: int) -> None:
    asked, search, result = question(eta)
    found = simulated_plans(asked, search, result)
    best = found.plans[0]
    assert best.simulated == simulated_plan.SEEDS
    assert best.seconds != best.model_s
    train = best.train.time.total
    assert best.seconds == (max(train, best.rollout_s) if eta else train - best.hidden_s + best.rollout_s)
    assert found == simulated_plans(asked, search, result)


def test_the_cost_models_are_near_the_simulator() -> None:
    asked, search, result = question(0, prompts=32)
    finalists = [p for p in simulated_plans(asked, search, result).plans if p.simulated == simulated_plan.SEEDS]
    plain = [plan for plan in finalists if not plan.mixed]
    assert plain
    for plan in plain:
        assert plan.rollout.seconds == pytest.approx(plan.rollout_s, rel=0.1)


@pytest.mark.parametrize("prompts", [1, 2])
def test_a_batch_of_a_few_trajectories_is_planned_too(prompts: int) -> None:
    """Its lengths have fewer bins than those of the whole workload."""
    asked, search, result = question(0, prompts=prompts)
    assert simulated_plans(asked, search, result).plans[0].simulated == simulated_plan.SEEDS


def test_batches_beyond_the_limit_are_left_to_the_cost_models(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, search, result = question()
    monkeypatch.setattr(simulated_plan, "LARGEST", 10)
    assert simulated_plans(asked, search, result) == result
    few, seeds = effort(50_000)
    assert (few, seeds) == (simulated_plan.FINALISTS, 1)


def test_batches_of_a_trace_are_whole_groups_of_one_prompt() -> None:
    recorded = tuple(TrajectoryRecord(f"p{n % 5}", n // 5, 100 + n % 5, (TurnRecord(0, 10 + n),)) for n in range(30))
    work = Work(recorded, Assumed(), 4096)
    batch = work.batch(32, 4, seed=1)
    assert batch == work.batch(32, 4, seed=1) != work.batch(32, 4, seed=2)
    assert len(batch) == 32
    groups: dict[str, list[TrajectoryRecord]] = {}
    for one in batch:
        groups.setdefault(one.prompt_id, []).append(one)
    assert len(groups) == 8
    for group in groups.values():
        assert len({one.prompt_tokens for one in group}) == 1
        assert sorted(one.sample for one in group) == [0, 1, 2, 3]
        assert len({one.generated for one in group}) == 4, "six were recorded: no sample twice"


def test_assumed_lengths_have_the_stated_means() -> None:
    batch = Work((), Assumed(generated=800, sigma=0.5, prompt=300, turns=4, new_tokens=50, tool_s=2.0), 32768).batch(
        4096, 8, seed=0
    )
    turns = [turn for one in batch for turn in one.turns]
    calls = len(turns) - 4096
    totals = [
        sum(one.generated for one in batch) / 4096,
        sum(one.prompt_tokens for one in batch) / 4096,
        len(turns) / 4096,
        sum(turn.tool_s for turn in turns) / calls,
        sum(turn.new_tokens for turn in turns) / calls,
    ]
    assert totals == pytest.approx([800, 300, 4, 2.0, 50], rel=0.05)


def test_batches_that_were_simulated_are_remembered_to_the_last_digit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, search, result = question()
    first = simulated_plans(asked, search, result, cache=tmp_path)
    assert first == simulated_plans(asked, search, result)
    monkeypatch.setattr(simulated_plan, "simulate", lambda *a: pytest.fail("simulated again"))
    assert simulated_plans(asked, search, result, cache=tmp_path) == first
    other = msgspec.structs.replace(asked, max_inflight=1)
    with pytest.raises(pytest.fail.Exception):
        simulated_plans(other, search, result, cache=tmp_path)
