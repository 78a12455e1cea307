"""Portions go ahead of a batch that is not complete, and every sample is trained once whatever comes when."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_hpc.models.train_seconds import PORTION_PACKS
from libra_hpc.protocol.agents import Batch, Committed, Group, GroupDone, StepReport
from libra_hpc.protocol.trainer import PortionDone, TrainPortion, TrainStep
from libra_hpc.state.state_folders import DataOrder
from libra_hpc.train_leader import generations
from libra_hpc.train_leader.step_requests import PACKS, PortionRanges, range_length
from tests.protocol.step_reports import batch_stats
from tests.stage.waiting import until
from tests.train_leader.world import World, sample

GROUPS = 6


def group(index: int) -> Group:
    return Group(index, (sample(f"{index}.0.0", 64), sample(f"{index}.1.0", 64)))


def batch(step: int, given_up: tuple[int, ...] = ()) -> Batch:
    """Its prompts follow those of the step before; two packs of 64 tokens each are a portion of one replica."""
    first = GROUPS * (step - 1)
    indices = [i for i in range(first, first + GROUPS + len(given_up)) if i not in given_up]
    return Batch(step, tuple(map(group, indices)), batch_stats(), given_up)


def end(world: World, step: int, *indices: int, given_up: bool = False) -> None:
    for index in indices:
        world.leader.on_group(GroupDone(step, Group(index, ()) if given_up else group(index)))


def uids(*indices: int) -> list[str]:
    return [f"{index}.{i}.0" for index in indices for i in (0, 1)]


async def after_one_step(*ranks: int, **options: Any) -> World:
    """The first step has no batch before it, from which to tell what a portion is."""
    world = World(**{"eta": 0, **options}).start(*ranks)
    await world.joined(len(ranks))
    end(world, 1, *range(GROUPS))
    assert not world.ahead
    world.leader.on_batch(batch(1))
    await until(lambda: len(world.of(Committed)) == 1)
    return world


async def test_groups_are_trained_as_they_are_complete_and_the_step_has_the_others() -> None:
    world = await after_one_step(1)
    end(world, 2, 9, 7)
    await until(lambda: len(world.ahead) == 2)
    end(world, 2, 6)
    await until(lambda: len(world.ahead) == 3)
    assert world.ahead == [(1, 0, uids(9)), (1, 1, uids(7)), (1, 2, uids(6))]
    world.leader.on_batch(batch(2))
    await until(lambda: len(world.of(Committed)) == 2)
    (_, order) = world.asked(TrainStep)[-1]
    assert [sorted(s.uid for s in part) for part in order.minibatches] == [uids(8), uids(10), uids(11)]
    assert (order.divisors, order.portions) == ((None, None, GROUPS * 2 * 63), 3)
    # The next step begins from zero.
    end(world, 3, 12)
    await until(lambda: len(world.ahead) == 4)
    assert world.ahead[-1] == (1, 0, uids(12))


async def test_a_portion_waits_for_the_one_before_and_for_prompts_that_are_neither_complete_nor_given_up() -> None:
    world = await after_one_step(1, 2)
    world.replicas[2].answers_portions = False
    # Two replicas: a portion is two prompts.
    end(world, 2, 8, 6)
    await asyncio.sleep(0.01)
    assert not world.ahead
    end(world, 2, 9)
    end(world, 2, 7, given_up=True)
    await asyncio.sleep(0.01)
    assert {entry[1] for entry in world.ahead} == {0}, "one at a time"
    world.leader.on_reply(2, PortionDone(2, 1, 0))
    await until(lambda: len(world.ahead) == 4)
    portions = [sorted(uid for _, number, own in world.ahead if number == n for uid in own) for n in (0, 1)]
    assert portions == [uids(8, 9), uids(6)]
    world.leader.on_batch(batch(2, given_up=(7,)))
    await until(lambda: len(world.of(Committed)) == 2)
    last = [order for _, order in world.asked(TrainStep)][-2:]
    rest = sorted(s.uid for order in last for part in order.minibatches for s in part)
    assert rest == sorted(uids(10, 11, 12))
    assert {(order.divisors[-1], order.portions) for order in last} == {(GROUPS * 2 * 63, 2)}


async def test_members_that_join_get_all_portions_in_the_same_order() -> None:
    world = await after_one_step(1, 2)
    end(world, 2, 8, 9)
    end(world, 2, 6, 7)
    await until(lambda: len(world.ahead) == 4)
    world.leader.on_replica_down(2, "killed")
    world.leader.on_generation(2, (1,))
    await until(lambda: len(world.ahead) == 6)
    assert world.ahead[4:] == [(1, 0, uids(8, 9)), (1, 1, uids(6, 7))]
    # A step that failed is done again in one message, with the same parts.
    world.replicas[1].silent = True
    world.leader.on_batch(batch(2))
    await until(lambda: len(world.asked(TrainStep)) == 3)
    world.leader.on_replica_down(1, "killed")
    world.add(1, step=1)
    world.leader.on_generation(3, (1,))
    await until(lambda: len(world.of(Committed)) == 2)
    (_, order) = world.asked(TrainStep)[-1]
    assert [sorted(s.uid for s in part) for part in order.minibatches] == [uids(8, 9), uids(6, 7), uids(10, 11)]
    assert order.portions == 0
    # So is a committed one that a rebuilt core has to replay.
    world.leader.on_replica_down(1, "killed")
    world.add(1, step=1)
    world.leader.on_generation(4, (1,))
    await until(lambda: len(world.asked(TrainStep)) == 5)
    assert world.asked(TrainStep)[-1][1].minibatches == order.minibatches


async def test_a_portion_that_is_refused_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generations, "RETRY_S", 0.01)
    world = await after_one_step(1)
    world.replicas[1].answers_portions = False
    end(world, 2, 6)
    world.replicas[1].answers_portions = True
    world.leader.on_reply(1, PortionDone(2, 1, 0, "out of the generation"))
    await until(lambda: len(world.ahead) == 2)
    assert world.ahead == [(1, 0, uids(6))] * 2
    assert len(world.joins()) == 2


@pytest.mark.parametrize("algorithm", [{"eta": 1}, {"minibatches": 2}])
async def test_what_needs_the_whole_batch_waits_for_it(algorithm: dict[str, Any]) -> None:
    world = await after_one_step(1, **algorithm)
    end(world, 2, *range(GROUPS, 2 * GROUPS))
    await asyncio.sleep(0.01)
    assert not world.asked(TrainPortion)
    world.leader.on_batch(batch(2))
    await until(lambda: len(world.of(StepReport)) == 2)
    assert None not in world.asked(TrainStep)[-1][1].divisors


def test_the_cost_model_counts_portions_of_as_many_packs() -> None:
    assert PORTION_PACKS == PACKS


@given(st.permutations(range(20, 32)), st.integers(1, 5), st.sets(st.integers(20, 31), max_size=4), st.data())
def test_portions_are_ranges_of_the_data_order_whatever_comes_first(
    arrival: list[int], length: int, given_up: set[int], data: st.DataObject
) -> None:
    order, cut = DataOrder(20, {22}), PortionRanges(20, length)
    ended: dict[int, Group] = {}
    ahead: list[list[int]] = []
    for index in arrival[: data.draw(st.integers(0, 12))]:
        if index != 22:
            ended[index] = Group(index, ()) if index in given_up else group(index)
        while portion := cut.next(len(ahead), ended, order.has):
            ahead.append([one.index for one in portion])
    groups = [group(index) for index in range(20, 33) if index != 22 and index not in given_up]
    portions = [[one.index for one in portion] for portion in cut.portions(groups)]
    assert portions[: len(ahead)] == ahead
    assert sorted(index for portion in portions for index in portion) == [one.index for one in groups]
    assert portions[len(ahead) :] == sorted(portions[len(ahead) :])
    assert sorted(portions) == sorted(
        [one.index for one in portion] for portion in PortionRanges(20, length).portions(groups)
    )


def test_a_portion_has_two_full_packs_for_each_rank_or_is_the_batch() -> None:
    assert [range_length(batch(1), replicas, 64, lambda one: True) for replicas in (1, 2, 3, 4)] == [1, 2, 3, 0]
    assert range_length(batch(1), 1, 128, lambda one: True) == 2, "two samples fill a pack"
    assert range_length(batch(1), 1, 64, lambda one: one.uid.endswith("0.0")) == 2, "half of the samples count"
    assert range_length(batch(1, given_up=(1, 3, 5, 7)), 1, 64, lambda one: True) == 2, "prompts that others replace"
    assert range_length(None, 1, 64, lambda one: True) == 0
