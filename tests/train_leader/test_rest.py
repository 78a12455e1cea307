"""The core in standby while its nodes roll out: when it goes there, and what brings it back."""

from __future__ import annotations

import asyncio

import pytest

from libra_hpc.protocol.agents import Committed, GroupDone
from libra_hpc.protocol.layout import Layout
from libra_hpc.protocol.trainer import Join, OfferFailed, OfferWeights, Standby, TrainPortion
from tests.stage.waiting import until

from .world import World, batch


async def resting(steps: int = 3, **algorithm: int) -> World:
    """The first step is committed, and the core rests."""
    world = World(steps=steps, **algorithm).start(1)
    await world.step(1)
    world.leader.on_layout(Layout(rest=True))
    await until(lambda: world.asked(Standby))
    return world


async def test_the_core_rests_after_its_offer_and_is_back_for_the_next_generation() -> None:
    world = World(steps=2).start(1)
    await world.joined(1)
    world.replicas[1].bad_offers = 1
    world.leader.on_batch(batch(1))
    world.leader.on_layout(Layout(rest=True))
    await until(lambda: len(world.of(Committed)) == 1)
    await asyncio.sleep(0.02)
    assert not world.asked(Standby) or len(world.asked(OfferWeights)) > 1, "engines wait for the new weights"
    world.now += 60.0
    world.leader.on_reply(1, object())  # type: ignore[arg-type]
    await until(lambda: world.asked(Standby))
    assert world.asked(Standby) == [(1, Standby())]
    await asyncio.sleep(0.02)
    assert not world.core_wanted, "nothing is to be done"
    world.leader.on_generation(2, (1,))
    world.leader.on_batch(batch(2))
    await world.finish()
    assert [step for _, step, *_ in world.trained] == [1, 2]
    world.leader.on_layout(Layout(rest=True))
    await until(lambda: len(world.asked(Standby)) == 2)  # its nodes roll out the evaluation of the last step


async def test_a_batch_or_a_stop_asks_for_the_core_that_rests() -> None:
    world = await resting()
    world.leader.on_batch(batch(2))
    await until(lambda: world.core_wanted)
    assert len(world.of(Committed)) == 1
    world.leader.on_generation(2, (1,))
    await until(lambda: len(world.of(Committed)) == 2)
    world.leader.on_layout(Layout(rest=True))
    await until(lambda: len(world.asked(Standby)) == 2)
    asked = len(world.core_wanted)
    world.leader.on_stop("enough")
    await until(lambda: len(world.core_wanted) > asked)
    world.leader.on_generation(3, (1,))
    await world.finish()
    assert world.saved[-1][0] == 2


async def test_without_a_coordinator_the_core_that_rests_wakes_and_is_saved() -> None:
    world = await resting()
    world.leader.on_generation(5, (2,))
    world.leader.on_coordinator_lost()
    assert world.leader.unsaved
    assert not World(step=1).leader.unsaved, "what it starts with is no reason to stay"
    await world.finish()
    assert (world.saved[-1][0], world.leader.unsaved) == (1, False)
    assert world.asked(Join)[-1][1].generation == 6


async def test_lost_offers_ask_for_the_core_that_rests() -> None:
    world = await resting()
    world.leader.on_reply(1, OfferFailed(1, "the carrier was lost"))
    world.now += 60.0
    world.leader.on_reply(1, object())  # type: ignore[arg-type]
    await until(lambda: world.core_wanted)
    offers = len(world.asked(OfferWeights))
    world.leader.on_generation(2, (1,))
    await until(lambda: len(world.asked(OfferWeights)) > offers)


async def test_no_portion_goes_to_a_core_that_rests() -> None:
    world = await resting(eta=0, minibatches=1)
    for group in batch(2).groups:
        world.leader.on_group(GroupDone(2, group))
    await asyncio.sleep(0.02)
    assert not world.asked(TrainPortion)
    assert not world.core_wanted, "the coordinator decides when it is back"


@pytest.mark.parametrize("when", ["before", "after"])
async def test_trainers_that_end_meanwhile_begin_again(when: str) -> None:
    world = World(steps=2).start(1)
    await world.step(1)
    if when == "before":
        world.replicas[1].silent = True
    world.leader.on_layout(Layout(rest=True))
    if when == "after":
        await until(lambda: world.asked(Standby))
    world.leader.on_replica_down(1, "killed")
    world.replicas[1].silent = False
    rests = len(world.asked(Standby))
    world.leader.on_generation(2, (1,))
    world.leader.on_batch(batch(2))
    await world.finish()
    assert len(world.asked(Standby)) == rests, "the order to rest is forgotten"
