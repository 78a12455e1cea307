"""Evaluations inside a run: when they begin, what they cost training, and what is made of failures."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import msgspec
import pytest

from libra_hpc.config.learn import EvalPart
from libra_hpc.protocol.env import EVALUATIONS, OpenEpisode, evaluation_index
from libra_hpc.protocol.trace import TurnRecord
from libra_hpc.rollout.evaluation import ROOM, Evaluations, OpenEvaluation, pass_at, result_line
from libra_hpc.rollout.trajectory import Trajectory

from .plant import Plant

AIME = EvalPart(name="aime", every=2, prompts=3, samples=2)


async def trained(plant: Plant, steps: int) -> Plant:
    for step in range(len(plant.batches) + 1, steps + 1):
        plant.commit(await plant.batch(step))
    return plant


async def test_each_due_step_has_one_line_and_no_batch_has_its_trajectories() -> None:
    plant = await trained(Plant(steps=4, evals=[AIME]).start(), 4)
    await plant.run(lambda: len(plant.evaluated) >= 3)
    assert [(line["task"], line["step"]) for line in plant.evaluated] == [("aime", 0), ("aime", 2), ("aime", 4)]
    first = plant.evaluated[0]
    # Even samples have reward 1, odd ones 0.
    assert (first["mean"], first["stderr"], first["best_of"], first["failed"]) == (0.5, 0.0, 1.0, 0)
    assert first["pass_at"] == {"1": 0.5, "2": 1.0}
    assert (first["turns"], first["info"]) == (2.0, {"solved": 0.5})
    assert first["gen_tokens"] == 3 * 2 * 2 * 3
    assert plant.evaluated[1]["versions"][0] == 2
    trained_on = {sample.uid for batch in plant.batches for group in batch.groups for sample in group.samples}
    assert len(trained_on) == 4 * 2 * 2
    assert all(int(uid.split(".")[0]) < EVALUATIONS for uid in trained_on)
    assert all(trajectory.index < EVALUATIONS for trajectory in plant.ended)


async def test_a_failure_is_counted_and_training_goes_on() -> None:
    bad = evaluation_index(0, 1)

    def broken(message: Any) -> str | None:
        return "ValueError: no" if isinstance(message, OpenEpisode) and message.index == bad else None

    plant = await trained(Plant(steps=2, evals=[AIME], broken=broken).start(), 2)
    await plant.run(lambda: len(plant.evaluated) >= 2)
    assert [(line["failed"], line["mean"], line["prompts"]) for line in plant.evaluated] == [(2, 0.5, 3)] * 2
    assert [fields["error"] for fields in plant.kinds("evaluation_failed")] == ["ValueError: no"] * 4
    assert not plant.kinds("trajectory_failed")
    assert [t.error for t in plant.of_evaluations] == ["", "", "", "", "ValueError: no", "ValueError: no"] * 2


async def test_where_all_fail_a_line_says_so() -> None:
    def broken(message: Any) -> str | None:
        return "no" if isinstance(message, OpenEpisode) and message.index >= EVALUATIONS else None

    plant = Plant(evals=[AIME], broken=broken).start()
    await plant.run(lambda: plant.evaluated)
    assert plant.evaluated[0]["failed"] == 6
    assert "mean" not in plant.evaluated[0]


async def test_a_lost_host_costs_no_trajectory_of_an_evaluation() -> None:
    plant = Plant(evals=[AIME]).start()
    await plant.run(lambda: any(trajectory.evaluation for trajectory in plant.leader._environments.episodes.values()))
    plant.kill_host()
    await plant.run(lambda: plant.evaluated)
    assert (plant.evaluated[0]["failed"], plant.evaluated[0]["mean"]) == (0, 0.5)


def test_trajectories_begin_only_where_engines_have_room() -> None:
    lines: list[dict[str, Any]] = []
    evaluations = Evaluations([AIME], 9, lambda line, done: lines.append(line))
    assert evaluations.begin(0, 100) == []
    evaluations.on_version(0, 5.0)
    assert evaluations.begin(int(ROOM * 8), 8) == []
    first = evaluations.begin(int(ROOM * 8) - 2, 8)
    assert [(trajectory.index, trajectory.sample) for trajectory in first] == [
        (evaluation_index(0, 0), 0),
        (evaluation_index(0, 0), 1),
    ]
    assert len(evaluations.begin(0, 8)) == 4
    assert evaluations.begin(0, 100) == []


@pytest.mark.parametrize(("known", "steps"), [(-1, [0, 4, 5]), (0, [4, 5]), (2, [4, 5]), (4, [5]), (5, [])])
def test_a_restart_evaluates_what_has_no_line_and_the_last_step_is_always_due(known: int, steps: list[int]) -> None:
    lines: list[dict[str, Any]] = []
    evaluations = Evaluations([AIME], 5, lambda line, done: lines.append(line))
    evaluations.restore([{"task": "aime", "step": known}, {"task": "other", "step": 99}])
    for step in (0, 1, 4, 5):
        assert evaluations.unfinished == (known < 5)
        evaluations.on_version(step, 0.0)
        for trajectory in evaluations.begin(0, 100):
            evaluations.failed(trajectory, 1.0)
    assert [line["step"] for line in lines] == steps
    assert not evaluations.unfinished


def test_pass_at_k_is_the_mean_over_all_draws_of_k_samples() -> None:
    solved = [[True, False, False, True, False], [False] * 5, [True] * 5]
    found = pass_at(solved)
    assert list(found) == ["1", "2", "4"]
    for k, share in found.items():
        draws = [[any(draw) for draw in combinations(own, int(k))] for own in solved]
        assert share == pytest.approx(sum(sum(own) / len(own) for own in draws) / 3)
    assert pass_at([[True], [False, True, False]]) == {"1": pytest.approx(2 / 3), "2": pytest.approx(2 / 3)}


@pytest.mark.parametrize(
    ("part", "at_least", "shares"),
    [("", 0.5, [0.5, 1.0]), ("reward", 0.5, [0.5, 1.0]), ("solved", 1.5, [0.0, 0.0]), ("other", 0.0, [])],
)
async def test_what_is_solved_is_a_part_of_the_reward_that_the_user_names(
    part: str, at_least: float, shares: list[float]
) -> None:
    plant = Plant(evals=[msgspec.structs.replace(AIME, solved=part, solved_at=at_least)]).start()
    await plant.run(lambda: plant.evaluated)
    assert plant.evaluated[0]["solved"] == f"{part or 'reward'} >= {at_least:g}"
    assert plant.evaluated[0]["pass_at"] == dict(zip("12"[: len(shares)], shares, strict=True))


def test_rewards_beyond_0_and_1_have_no_pass_at_k_but_of_what_the_user_names() -> None:
    for name, found in (("", {}), ("reward", {"1": 1.0})):
        one = OpenEvaluation(0, msgspec.structs.replace(AIME, solved=name), 0, 0.0)
        trajectory = Trajectory(index=evaluation_index(0, 0), sample=0, reward=2.0)
        trajectory.turns = (TurnRecord(0, 1, versions=((0, 1),)),)
        one.done.append(trajectory)
        assert result_line(one, 1.0)["pass_at"] == found
