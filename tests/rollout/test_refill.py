"""Groups of equal rewards give their places to the next prompts: bound, staleness, columns and restarts."""

from __future__ import annotations

import random

import pytest

from libra_hpc.protocol.agents import Batch, Group, GroupDone
from tests.rollout.plant import Plant, plain_group
from tests.rollout.restarts import STEPS, restarted


def trained(batch: Batch) -> list[int]:
    return [group.index for group in batch.groups]


async def test_a_batch_has_only_groups_with_a_gradient_and_counts_the_others() -> None:
    plant = Plant(equal={0, 2, 3}, refill_batches=2, in_order=True).start()
    batch = await plant.batch()
    assert trained(batch) == [1, 4]
    assert batch.given_up == (0, 2, 3), "they count as trained with it"
    assert (batch.stats["replaced_groups"], batch.stats["equal_groups"]) == (3, 3 / 5)
    assert batch.stats["reward_std"] == 0.5
    assert not plant.kinds("prompt_given_up"), "nothing has failed"
    plant.commit(batch)
    second = await plant.batch(2)
    assert trained(second) == [5, 6]
    assert (second.given_up, second.stats["replaced_groups"]) == ((), 0)


async def test_past_the_bound_groups_of_equal_rewards_are_part_of_the_batch() -> None:
    plant = Plant(equal=range(100), refill_batches=2, in_order=True).start()
    batch = await plant.batch()
    assert batch.stats["replaced_groups"] == len(batch.given_up) == 4
    assert batch.stats["equal_groups"] == 1.0
    assert len(batch.groups) == 2


async def test_without_refill_they_are_part_of_it() -> None:
    batch = await Plant(equal={0}, in_order=True).start().batch()
    assert (trained(batch), batch.given_up, batch.stats["equal_groups"]) == ([0, 1], (), 0.5)


async def test_a_group_whose_last_trajectory_fails_is_replaced_and_not_given_up() -> None:
    plant = Plant(
        equal={0}, refill_batches=2, in_order=True, broken=lambda m: "no" if m.episode.startswith("0.1.") else None
    ).start()
    batch = await plant.batch_within(60.0)
    assert (trained(batch), batch.given_up) == ([1, 2], (0,))
    assert not plant.kinds("prompt_given_up")


@pytest.mark.parametrize("eta", [0, 1])
async def test_groups_come_ahead_of_a_synchronous_batch_once_they_or_their_prompts_have_ended(eta: int) -> None:
    plant = Plant(eta=eta, prompts=4, equal={1}, refill_batches=2, in_order=True).start()
    for step in (1, 2):
        batch = await plant.batch(step, random.Random(step))
        ahead = {one.group.index: plain_group(one.group) for one in plant.of(GroupDone) if one.step == step}
        assert bool(ahead) == (eta == 0)
        groups = {group.index: group for group in batch.groups} | {i: Group(i, ()) for i in batch.given_up}
        assert len(ahead) < len(groups), "the last ones come with the batch"
        assert ahead.items() <= groups.items()
        plant.commit(batch)
    if eta == 0:
        assert Group(1, ()) in [one.group for one in plant.sent if isinstance(one, GroupDone)]


@pytest.mark.parametrize("seed", range(6))
async def test_over_restarts_each_prompt_is_trained_or_replaced_once_within_the_bound(seed: int) -> None:
    pick, batches, again = random.Random(seed), dict[int, Batch](), 0
    equal = {index for index in range(200) if pick.random() < 0.4}
    options = {"in_order": seed % 2 == 1, "equal": equal, "refill_batches": 8}
    async for plant, recovered in restarted(pick, batches, seed % 3, **options):
        # A replaced group of an earlier start is replaced again, and not sampled again.
        refused = {event["index"] for event in plant.kinds("experience_refused")}
        known = [one.index for one in recovered]
        for one, (finished, _) in recovered.items():
            if one.index in equal and one.index not in refused and known.count(one.index) == 2:
                again += finished
                assert not (finished and one.episode in plant.steps_of)
    for batch in batches.values():
        assert equal.isdisjoint(trained(batch))
        assert equal.issuperset(batch.given_up)
    counted = [index for batch in batches.values() for index in (*trained(batch), *batch.given_up)]
    assert len(counted) == len(set(counted)), "each row counts once"
    assert set(range(max(map(max, map(trained, batches.values()))))).issubset(counted), "and none is left out"
    assert sum(len(batch.groups) for batch in batches.values()) == 2 * STEPS
    assert again or seed % 3 == 0
