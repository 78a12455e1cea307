"""A trajectory of several samples: what its engines, its environment, the trainer and the metrics get of it."""

from __future__ import annotations

import random
from array import array

import pytest
import torch

from libra_hpc.policies.learning.advantages import LengthRules, Refill, advantage_named
from libra_hpc.protocol.codec import pack_f32, pack_i32, unpack_i32
from libra_hpc.protocol.env import StepEpisode
from libra_hpc.rollout.group_state import GroupState
from libra_hpc.rollout.trajectory import Trajectory
from libra_hpc.trainer.model.packing import decode, pack

from .plant import STOP, Plant, generated, sampling

MEAN = advantage_named("group_mean")

SAID = [7, 8, STOP]


@pytest.mark.parametrize("kept", [3, 2])
async def test_a_trajectory_of_three_samples_is_one_reward_three_sequences_and_one_trajectory_of_the_batch(
    kept: int,
) -> None:
    """Also where the environment does not keep the end of a turn."""
    said, plant = SAID[:kept], Plant(turns=5, fresh=2, kept=kept).start()
    batch = await plant.batch()
    assert batch.stats["samples_per_trajectory"] == 3.0
    assert (batch.stats["trajectories"], batch.stats["turns_p50"], batch.stats["gen_tokens"]) == (
        4.0,
        5.0,
        4 * 5 * kept,
    )
    assert (batch.stats["reward"], batch.stats["context_p50"]) == (0.5, 5.0 + 2 * kept)
    for group in batch.groups:
        first, later, last = [1, 2, group.index, *said, 5, *said], [1, 2, group.index, 6, *said, 5, *said], 4 + kept
        for number, sample in enumerate(group.samples):
            which, part = divmod(number, 3)
            assert sample.uid == f"{group.index}.{which}.{part}"
            assert sample.trajectory == f"{group.index}.{which}"
            tokens = unpack_i32(sample.tokens)
            assert tokens == (first, later, later[:last])[part]
            assert sample.loss_mask == bytes(token in said for token in tokens)
            logprobs = array("f", sample.logprobs).tolist()
            assert [value for value in logprobs if value] == [-1.0, -2.0, -3.0][:kept] * (2 if part < 2 else 1)
            assert sample.trajectory_tokens == 5 * kept
        advantages = [sample.advantage for sample in group.samples]
        assert advantages == [advantages[0]] * 3 + [-advantages[0]] * 3
        assert advantages[0] > 0.9
    record = plant.lines[0]
    assert (record.context, record.all_tokens) == (5 + 2 * kept, 13 + 5 * kept)
    assert [turn.new_sample for turn in plant.lines[0].turns] == [False, False, True, False, True]


async def test_the_turn_after_sees_the_new_context_alone_and_its_room() -> None:
    plant = await sampling(4, turns=3, fresh=1, max_model_len=100)
    rooms: list[int] = []
    for _ in range(3):
        prompts = [unpack_i32(request.prompt) for _, request in plant.inbox]
        plant.serve()
        rooms += [message.room for message in plant.host if isinstance(message, StepEpisode)]
        await plant.settle()
    assert rooms == [100 - 6] * 4 + [100 - 7] * 8
    assert all(prompt in ([1, 2, 0, 6], [1, 2, 1, 6]) for prompt in prompts)


@pytest.mark.parametrize(("shared", "engine", "computed"), [(40, "e1", 40), (29, "e1", 29), (10, "", 10), (0, "", 0)])
def test_a_sample_that_shares_little_with_the_one_before_is_bound_to_no_engine(
    shared: int, engine: str, computed: int
) -> None:
    trajectory = Trajectory(index=0, sample=0)
    trajectory.add_environment(pack_i32(range(60)))
    trajectory.add_generated(generated("", [7] * 3, finish="stop"), "e1")
    trajectory.engine = "e1"
    trajectory.add_environment(pack_i32([*range(shared), *[999] * (50 - shared)]), new_sample=True)
    assert (trajectory.engine, trajectory.computed, trajectory.context_tokens) == (engine, computed, 50)
    # What is not shared was never computed: it counts as no repetition.
    trajectory.add_generated(generated("", [7], finish="stop"), "e1")
    assert trajectory.turns[-1].recomputed == shared


@pytest.mark.parametrize("seed", range(8))
async def test_a_lost_host_is_replayed_through_all_samples(seed: int) -> None:
    kept = 2 + seed % 2
    want = (await Plant(turns=5, fresh=2, kept=kept).start().batch()).groups
    pick, plant = random.Random(seed), Plant(turns=5, fresh=2, kept=kept).start()
    for _ in range(40):
        await plant.settle()
        if pick.random() < 0.3:
            plant.kill_host()
        plant.serve(pick.randrange(3), pick)
    batch = await plant.batch()
    assert [sample for group in batch.groups for sample in group.samples] == [s for g in want for s in g.samples]


async def test_the_end_that_an_answer_drops_is_of_the_newest_weights_and_no_longer_than_the_turn() -> None:
    plant = await sampling(4)
    plant.serve(1)
    step = plant.take_step()
    trajectory = Trajectory(index=0, sample=0)
    trajectory.add_environment(pack_i32([1, 2]))
    trajectory.add_generated(generated("", [5] * 5, finish="stop", versions=((0, 2), (1, 2), (2, 1))), "e1")
    trajectory.drop(2)
    assert (trajectory.turns[-1].versions, trajectory.computed, trajectory.sound) == (((0, 2), (1, 1)), 5, True)
    plant.kept = -1
    plant.end_step(step)
    assert [one.error for one in plant.failed] == ["dropped is 4; its turn has fewer tokens."]


async def test_a_new_sample_without_room_for_a_turn_truncates_the_trajectory_and_is_not_trained_on() -> None:
    plant = await sampling(4, max_model_len=40)
    plant.truncated_reward = 3.0
    plant.serve(1)
    plant.end_step(plant.take_step(), [5] * 90, done=False, new_sample=True)
    batch = await plant.batch()
    (line,) = [line for line in plant.lines if line.clipped]
    assert (line.clipped, line.reward, line.info) == (50, 3.0, {"truncated": 1.0})
    assert batch.stats["samples_per_trajectory"] == 1.25
    assert sorted(sample.uid.rpartition(".")[2] for sample in plant.samples()) == ["0"] * 4


def test_the_longest_sample_counts_for_the_length_of_a_trajectory() -> None:
    done = []
    for sample in range(2):
        trajectory = Trajectory(index=0, sample=sample)
        for count in (10, 90 if sample else 10, 10):
            trajectory.add_environment(pack_i32([1] * count), new_sample=bool(trajectory.turns))
            trajectory.add_generated(generated("", [7], finish="stop"), "e0")
        trajectory.place, trajectory.reward = "done", 1.0
        done.append(trajectory)
    group = GroupState(0, 2, done).to_group(MEAN, LengthRules(soft=20, longest=100))
    assert [round(sample.advantage, 3) for sample in group.samples] == [0.275] * 3 + [-0.275] * 3
    assert sum(len(sample.logprobs) for sample in group.samples) == len(pack_f32([0.0] * (33 + 113)))


async def test_turns_have_rewards_and_advantages_of_their_own() -> None:
    plant = Plant(turns=5, fresh=2).start()
    await plant.batch()
    for trajectory in plant.ended:
        own = trajectory.reward
        assert [turn.reward for turn in trajectory.turns] == [own, 1.0, own, 1.0, 0.0], "the last has the trajectory's"
    one, two, three = trajectory.samples_for_training([1.0, -4.0, 0.0, 2.0, 0.0])
    assert (one.advantage, two.advantage, three.advantage) == (-4.0, -4.0, -4.0), "none is left out"
    assert array("f", one.advantages).tolist() == [0.0] * 3 + [1.0] * 3 + [0.0] + [-4.0] * 3
    assert array("f", two.advantages).tolist() == [0.0] * 8 + [2.0] * 3
    (packed,) = pack([decode(one), decode(two)], 64, torch.device("cpu"))
    assert packed.advantages.tolist() == [0.0] * 3 + [2.0] * 3 + [1.0] * 3 + [-4.0] * 3


def test_lengths_teach_nothing_where_refill_finds_equal_rewards() -> None:
    group = GroupState(0, 4)
    for sample, count in enumerate((20, 70, 90, 30)):
        trajectory = Trajectory(index=0, sample=sample)
        trajectory.add_environment(pack_i32([1] * count))
        trajectory.add_generated(generated("", [7], finish="stop"), "e0")
        # Wrong, and equal but for rounding.
        trajectory.place, trajectory.reward = "done", 0.1 + 0.2 if sample else 0.3
        group.done.append(trajectory)
    rules = LengthRules(soft=40, longest=100)
    assert group.equal
    assert Refill(1).replaces(group.rewards(rules), 0)
    assert [s.advantage for s in group.to_group(MEAN, rules, Refill(1)).samples] == [0.0] * 4, "past the bound"
