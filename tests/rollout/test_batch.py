"""A batch's columns of `metrics.jsonl`, and the planner's facts on open groups."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from libra_hpc.config.run import RunConfig
from libra_hpc.facts.columns import COLUMNS, UPDATED
from libra_hpc.facts.rundir import read_lines
from libra_hpc.policies.learning.advantages import LengthRules, advantage_named
from libra_hpc.protocol.agents import Heartbeat, StepReport
from libra_hpc.protocol.codec import pack_i32
from libra_hpc.protocol.engine import Generated
from libra_hpc.protocol.engine_state import ObservedEngine, WeightUpdate
from libra_hpc.protocol.plan import GroupFact, TrajectoryFact
from libra_hpc.protocol.trace import TurnRecord
from libra_hpc.rollout.group_state import GroupState, batch_stats, length_of, open_groups
from libra_hpc.rollout.trajectory import Trajectory
from tests.coordinator.test_coordinator import Scene, trains
from tests.rollout.plant import generated
from tests.train_leader.world import World

MEAN = advantage_named("group_mean")


def finished(index: int, sample: int, info: dict[str, float]) -> Trajectory:
    trajectory = Trajectory(index=index, sample=sample)
    trajectory.add_environment(pack_i32([1, 2]))
    trajectory.add_generated(generated("", [7], finish="stop"), "e0")
    trajectory.place, trajectory.info = "done", info
    return trajectory


def test_a_number_is_a_mean_over_the_trajectories_that_have_it_and_truncation_over_all() -> None:
    group = GroupState(
        0, 4, [finished(0, 0, {"solved": 1.0}), *(finished(0, sample, {"truncated": 1.0}) for sample in (1, 2, 3))]
    )
    stats = batch_stats([group], 0)
    assert (stats["solved"], stats["truncated"]) == (1.0, 0.75)
    work = [batch_stats([group], 0, 0.5, 2, replaced=replaced)["rollout_s"] for replaced in (0, 2)]
    assert work[1] == 3 * work[0] > 0, "two more groups were generated for it"


def test_a_number_of_the_task_never_overwrites_a_column() -> None:
    names = [column.name for column in COLUMNS]
    info = dict.fromkeys(names, 7.0)
    stats = batch_stats([GroupState(0, 2, [finished(0, sample, info) for sample in (0, 1)])], 0)
    assert (stats["reward"], stats["trajectories"]) == (0.0, 2)
    assert {f"task_{name}": 7.0 for name in names}.items() <= stats.items()


def test_a_mixture_has_numbers_of_each_task_over_its_own_trajectories() -> None:
    groups = [GroupState(index, 2, [finished(index, sample, {}) for sample in (0, 1)]) for index in (0, 1)]
    for group, part in zip(groups, ("easy", "hard"), strict=True):
        for trajectory in group.done:
            trajectory.task, trajectory.info = part, {"solved": float(part == "easy")}
            trajectory.reward = 1.0 if part == "easy" else float(trajectory.sample)
    stats = batch_stats(groups, 0, parts=["easy", "hard", "absent"])
    assert stats["reward"] == 0.75
    assert {name: stats[name] for name in ("easy/reward", "hard/reward", "easy/solved", "hard/solved")} == {
        "easy/reward": 1.0,
        "hard/reward": 0.5,
        "easy/solved": 1.0,
        "hard/solved": 0.0,
    }
    assert (stats["hard/turns"], stats["hard/trajectories"]) == (1.0, 2.0)
    assert not any(name.startswith("absent/") or name == "solved" for name in stats)


def test_a_masked_trajectory_is_not_trained_on_and_not_in_the_mean() -> None:
    done = [finished(0, sample, {"truncated": float(sample == 1)}) for sample in range(3)]
    for trajectory, reward in zip(done, (1.0, 9.0, 0.0), strict=True):
        trajectory.reward = reward
    group = GroupState(0, 3, done).to_group(MEAN, LengthRules("mask"))
    assert [(sample.uid, sample.advantage) for sample in group.samples] == [("0.0.0", 0.5), ("0.2.0", -0.5)]
    nothing = GroupState(0, 1, [finished(0, 0, {"truncated": 1.0})]).to_group(MEAN, LengthRules("mask"))
    assert nothing.samples == ()


def answer(cached: int, version: int = 0) -> Generated:
    """Ten tokens, after ``cached`` tokens of the context were found in the KV cache."""
    return msgspec.structs.replace(
        generated("", [7] * 10, finish="stop", versions=((version, 10),)), cached_tokens=cached
    )


def test_staleness_counts_from_the_oldest_kv_that_a_turn_used() -> None:
    stats = []
    for kv_version in (-1, 2):
        trajectory = finished(0, 0, {})
        trajectory.add_environment(pack_i32([3]))
        for part in (kv_version, -1):
            done = generated("", [7], finish="stop", versions=((4, 1),))
            trajectory.add_generated(msgspec.structs.replace(done, kv_version=part), "e0")
        trajectory.turns = trajectory.turns[1:]
        stats.append(batch_stats([GroupState(0, 1, [trajectory])], 5))
    assert [(one["staleness_max"], one["old_kv_tokens"]) for one in stats] == [(1, 0), (3, 2)]


def test_tokens_computed_again_are_counted_and_evictions_apart_from_moves_and_new_weights() -> None:
    trajectory = Trajectory(index=0, sample=0)
    trajectory.add_environment(pack_i32([1] * 40))
    trajectory.add_generated(answer(0), "e0", 16)
    # 49 of the 50 tokens were computed: three whole blocks can be found again.
    steps = [("e0", 48, 0), ("e0", 32, 0), ("e1", 0, 0), ("e1", 16, 1)]
    counted = []
    for engine, cached, version in steps:
        trajectory.add_environment(pack_i32([2] * 6))
        trajectory.add_generated(answer(cached, version), engine, 16)
        counted.append((trajectory.turns[-1].recomputed, trajectory.turns[-1].evicted))
    assert counted == [(0, 0), (32, 32), (80, 0), (80, 0)]
    trajectory.place = "done"
    stats = batch_stats([GroupState(0, 1, [trajectory])], 0)
    assert (stats["recomputed_tokens"], stats["evicted_tokens"]) == (192, 32)


async def test_a_line_has_every_column(tmp_path: Path) -> None:
    """The rollout leader's, the train leader's and the coordinator's, as they write them, and what new weights cost.

    The second line has these: the weights of the first step reach an engine during the second one.
    """
    world = World(steps=2).start(1)
    await world.step(1, 2)
    await world.finish()
    first, report = world.of(StepReport)
    scene = Scene(tmp_path, config=RunConfig())
    applied = WeightUpdate(1, pause_s=0.001, stage_s=0.2, recomputed=40, wire_s=0.1, image_s=0.1)
    beat = Heartbeat(3, "rollout", {"r3.0": ObservedEngine("rollout", "ready", 1, update=applied)}, 1)
    scene.deliver((1, first), (3, beat), (1, report), (1, trains(done=2)))
    await asyncio.wait_for(scene.coordinator.run(), 30)
    without, line = read_lines(scene.run.metrics)
    # There is no reference policy.
    every = {column.name for column in COLUMNS} - {"reference_kl"}
    assert set(line) == every
    assert set(without) == every - {column.name for column in UPDATED}
    assert report.metrics.items() <= line.items()


def _trajectory(index: int, sample: int, prompt: int = 50, generated: int = 0) -> Trajectory:
    trajectory = Trajectory(index=index, sample=sample)
    trajectory.prompt_tokens, trajectory.max_tokens, trajectory.turns = prompt, 100, (TurnRecord(0, generated),)
    return trajectory


def test_groups_count_waiting_and_running_trajectories_and_tokens_so_far() -> None:
    tool, engine, waiting, unknown = (
        _trajectory(4, 0, generated=30),
        _trajectory(4, 1, generated=10),
        _trajectory(4, 2),
        _trajectory(7, 0, prompt=0),
    )
    tool.sent_at = 5.0
    engine.sent_at, engine.place = 8.0, "engine"
    assert open_groups([waiting, unknown, engine, tool], 10.0, 0.1) == (
        GroupFact(index=4, prompt=50, waiting=1, running=2, generated=30 + 10 + 20),
    )


def test_a_turn_never_counts_more_tokens_than_its_limit() -> None:
    engine = _trajectory(0, 0)
    engine.sent_at, engine.place = 1.0, "engine"
    assert open_groups([engine], 1000.0, 0.1)[0].generated == 100
    assert open_groups([engine], 1000.0, 0.0)[0].generated == 0, "the speed is unknown"


def test_the_length_of_a_trajectory_has_its_prompt_and_index() -> None:
    assert length_of(_trajectory(3, 1)) == TrajectoryFact(-1, 0.0, 0, 50, 1, 0.0, group=3, prompt=50)
