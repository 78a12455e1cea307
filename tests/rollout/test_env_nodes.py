"""Trajectories on environment nodes: seats, nodes that are lost and come back, and what waits meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from libra_hpc.config.job import EnvComponent
from libra_hpc.protocol.codec import unpack_i32
from libra_hpc.protocol.env import OpenEpisode
from tests.rollout.plant import Plant

FIRST, SECOND = 10, 11
"""Ranks of the environment nodes, and numbers of their only hosts."""


async def two_nodes(seats: int, **fields: int) -> Plant:
    plant = Plant(env=EnvComponent(nodes=2, seats=seats), **fields).start()
    await asyncio.sleep(0)
    assert not plant.host, "the first host would get the work of all"
    for host in (FIRST, SECOND):
        plant.host_up(host=host)
    await asyncio.sleep(0)
    return plant


def opened(plant: Plant) -> list[int]:
    return [plant.at[message.episode] for message in plant.host if isinstance(message, OpenEpisode)]


async def test_trajectories_go_to_environment_nodes_alone_and_wait_for_a_seat() -> None:
    plant = await two_nodes(seats=1)
    assert opened(plant) == [FIRST, SECOND]
    plant.now += 7.0
    assert plant.leader.report().environments == (
        "2 of 4 trajectories wait for a seat, the first for 7 s, because all 2 seats of environment nodes are taken;"
        " no turns run at engines, and none waits"
    )
    batch = await plant.batch()
    assert plant.sizes() == [2, 2]
    assert batch is None or batch.step == 1
    assert set(plant.at.values()) == {FIRST, SECOND}
    assert not plant.leader.report().environments


async def test_a_lost_node_has_its_trajectories_replayed_on_the_other_one() -> None:
    plain = Plant(turns=3).start()
    await plain.batch()
    plant = await two_nodes(seats=4, turns=3)
    assert opened(plant) == [FIRST, SECOND, FIRST, SECOND]
    plant.environment()
    await plant.settle()
    plant.serve(2)
    plant.host.clear()
    plant.leader.on_rank_lost(FIRST)
    assert opened(plant) == [SECOND, SECOND]
    await plant.batch()
    assert plant.batches[0].groups == plain.batches[0].groups
    assert len(plant.decisions) == 12, "no turn is generated twice"


async def test_without_environment_nodes_the_leaders_node_has_all_until_one_is_back() -> None:
    plant = await two_nodes(seats=1)
    plant.leader.on_rank_lost(FIRST)
    plant.host.clear()
    plant.leader.on_rank_lost(SECOND)
    assert opened(plant) == [0, 0, 0, 0]
    plant.host_up(host=SECOND)
    await plant.batch()
    await plant.run(lambda: SECOND in plant.at.values())
    assert plant.sizes() == [2, 2]


async def test_what_a_lost_node_still_sends_changes_nothing() -> None:
    plant = await two_nodes(seats=4)
    late = next(message for message in plant.host if plant.at[message.episode] == FIRST)
    await plant.settle()
    plant.leader.on_rank_lost(FIRST)
    assert plant.at[late.episode] == SECOND
    plant.at[late.episode] = FIRST
    plant.open_episode(late, [6, 6, 6])
    plant.at[late.episode] = SECOND
    await plant.batch()
    assert {unpack_i32(sample.tokens)[0] for sample in plant.samples()} == {1}


async def test_a_run_begins_without_a_node_that_was_never_ready() -> None:
    plant = Plant(env=EnvComponent(nodes=2, seats=4)).start()
    plant.host_up(host=FIRST)
    await asyncio.sleep(0)
    assert plant.leader.report().paused == "Environment host 0 of node 11 is not ready."
    plant.leader.on_rank_lost(SECOND)
    await plant.batch()
    assert set(plant.at.values()) == {FIRST}


@pytest.mark.parametrize(("given", "room"), [((0, 0), 1), ((0, 64), 64), ((9, 64), 9)])
def test_a_node_has_as_many_seats_as_cpus_unless_the_run_file_names_them(given: tuple[int, int], room: int) -> None:
    seats, cpus = given
    assert EnvComponent(seats=seats, cpus=cpus).room == room
