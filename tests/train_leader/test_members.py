"""Membership generations: who joins, what a death in a step costs, and failures without a death."""

from __future__ import annotations

import asyncio

import pytest

from libra_hpc.protocol import trainer as wire
from libra_hpc.protocol.agents import Committed, Fatal, Log, StepReport, ToReplica, WeightsHere
from libra_hpc.protocol.carriers import Peer
from libra_hpc.protocol.engine_state import Doing
from libra_hpc.protocol.layout import Layout
from libra_hpc.protocol.trainer import Join, StepFailed, WorkerFailed
from libra_hpc.train_leader import generations
from libra_hpc.train_leader.publisher import Published
from tests.stage.waiting import until
from tests.train_leader.world import World, batch


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members that failed try again at once."""
    monkeypatch.setattr(generations, "RETRY_S", 0.01)


async def pair_with_a_silent_second() -> World:
    """Replicas 1 and 2 are members of generation 1; 2 never answers again."""
    world = World(checkpoint_every=1).start(1, 2)
    await world.joined(2)
    world.replicas[2].silent = True
    return world


async def test_a_newcomer_joins_at_a_step_boundary_and_shares_the_next_batch() -> None:
    world = World().start(1)
    await world.step(1)
    world.add(2)
    world.leader.on_generation(2, (1, 2))
    await world.joined(3)
    world.leader.on_batch(batch(2))
    await until(lambda: len(world.trained) == 3)
    second = [entry for entry in world.trained if entry[1] == 2]
    assert {rank for rank, *_ in second} == {1, 2}
    assert sorted(uid for _, _, uids, _ in second for uid in uids) == ["2.0", "2.1", "3.0", "3.1"]
    assert {totals for *_, totals in second} == {(16,)}, "both divide by the tokens of the whole batch"
    assert world.replicas[2].history == ["step1", "step2"]


async def test_a_newcomer_gets_the_version_that_is_published_while_it_joins() -> None:
    world = World().start(1)
    await world.step(1)
    world.leader.weights.on_here(WeightsHere(2, carrier=Peer(2, ("127.0.0.1",), 7002)))
    assert not world.published(2)
    world.add(2).silent = True
    world.leader.on_generation(2, (1, 2))
    await until(lambda: world.joins()[-1].generation == 2)
    world.leader.weights.publish(Published(1, 0, (("t1.0", 1),)))
    assert world.published(2) == [(1, 0)]
    assert [join.step for join in world.joins()] == [-1, 1, 1], "nothing was on its way at the start"


async def test_hybrid_nodes_that_are_one_replica_are_one_member() -> None:
    world = World(steps=1, nodes_per_replica=2).start(1, 2, 3, 4, 5)
    world.leader.on_batch(batch(1))
    await world.finish()
    joins = [(rank, join.rank, join.size) for rank, join in world.asked(Join)]
    assert joins == [(1, 0, 3), (2, 1, 3), (3, 1, 3), (4, 2, 3), (5, 2, 3)]
    uids = {rank: found for rank, _, found, _ in world.trained}
    assert (uids[2], uids[4]) == (uids[3], uids[5])
    assert sorted(uids[1] + uids[2] + uids[4]) == ["0.0", "0.1", "1.0", "1.1"]
    (report,) = world.of(StepReport)
    assert (report.metrics["train_nodes"], report.metrics["replicas"]) == (5, 3)


async def test_all_nodes_of_the_core_are_one_member_and_get_the_same_samples() -> None:
    world = World(steps=2, core=(1, 2)).start(1, 2, 3)
    await world.step(1)
    world.leader.on_generation(2, (1, 3))
    world.leader.on_batch(batch(2))
    await asyncio.sleep(0.02)
    assert len(world.of(Committed)) == 2, "a part of the core forms no generation"
    world.leader.on_generation(3, (1, 2))
    await world.finish()
    joins = [(rank, join.generation, join.rank, join.size) for rank, join in world.asked(Join)]
    assert joins[:3] == [(1, 1, 0, 2), (2, 1, 0, 2), (3, 1, 1, 2)]
    uids = {rank: found for rank, step, found, _ in world.trained if step == 1}
    assert uids[1] == uids[2]
    assert uids[1] == ["0.1", "1.1"], "the shares of two of three data-parallel ranks"
    assert sorted(uids[1] + uids[3]) == ["0.0", "0.1", "1.0", "1.1"]
    (first, second) = world.of(StepReport)
    assert first.metrics["replicas"] == 3
    assert first.metrics["trained_tokens"] == 2 * 8, "the core answers once"
    assert [rank for rank, order in world.asked(wire.OfferWeights) if order.version == 1] == [1, 2]
    assert [rank for rank, order in world.asked(wire.SaveState) if order.tier == "checkpoint"] == [1, 2]
    assert len(world.saved) == 1
    assert world.manifests == [{"1": (1, 2), "2": (1, 2)}], "the files of all nodes"
    assert second.step == 2


async def test_the_death_of_a_member_that_leaves_stops_no_join_of_the_others() -> None:
    world = await pair_with_a_silent_second()
    world.replicas[1].instead = lambda join: (
        world.leader.on_replica_down(2, "killed") or wire.Joined(2, 0, 0, 0.0, join.attempt)
    )
    world.leader.on_generation(2, (1,))
    await world.joined(3)


async def test_a_death_in_a_step_redoes_that_step_with_the_survivor() -> None:
    world = await pair_with_a_silent_second()
    world.replicas[1].instead = lambda message: StepFailed(1, 1, "peer closed")
    world.leader.on_batch(batch(1))
    await asyncio.sleep(0.02)
    world.replicas[1].instead = None
    world.leader.on_replica_down(2, "killed")
    world.leader.on_generation(2, (1,))
    await until(lambda: world.of(Committed))
    assert [(rank, step, uids) for rank, step, uids, _ in world.trained] == [(1, 1, ["0.0", "0.1", "1.0", "1.1"])]


async def test_a_step_that_the_core_committed_is_saved_and_not_trained_again() -> None:
    world = await pair_with_a_silent_second()
    world.leader.on_batch(batch(1))
    await until(lambda: len(world.trained) == 1)
    world.leader.on_replica_down(2, "killed after the all-reduce")
    world.leader.on_generation(2, (1,))
    await until(lambda: world.saved and world.published()[1:])
    assert len(world.trained) == 1
    assert world.saved == [(1, 2, [])]
    assert [c.step for c in world.of(Committed)] == [1]
    assert world.replicas[1].history == ["step1"]


@pytest.mark.usefixtures("soon")
async def test_members_that_failed_without_a_death_try_again() -> None:
    world = World(steps=1)
    replica = world.add(1)
    replica.instead = lambda message: WorkerFailed("a connection broke", False, message.generation, message.attempt)
    world.start(1)
    await until(lambda: world.of(ToReplica))
    await asyncio.sleep(0)
    replica.instead = None
    world.leader.on_batch(batch(1))
    await world.finish()
    first, second = world.joins()
    assert (first.generation, second.generation) == (1, 1)
    assert first.rendezvous != second.rendezvous, "a meeting point serves once"


@pytest.mark.usefixtures("soon")
async def test_a_failure_that_stays_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(steps=1).start(1)
    replica = world.replicas[1]
    take = replica.take

    def failing(message: object) -> None:
        if isinstance(message, wire.TrainStep):
            world.reply(1, StepFailed(1, 1, "a sample has no tokens"))
        else:
            take(message)

    monkeypatch.setattr(replica, "take", failing)
    world.leader.on_batch(batch(1))
    await until(lambda: len(world.joins()) == 3)
    assert not world.of(Fatal)
    world.now = generations.NEW_GENERATION_S
    assert (await world.fatal()).reason == "training failed and no node died: replica 1: a sample has no tokens"


async def test_a_generation_that_forms_gives_way_to_a_newer_order_at_once() -> None:
    world = World(steps=1)
    world.add(2).silent = True
    world.start(1, 2)
    await until(lambda: len(world.of(ToReplica)) == 2)
    world.leader.on_generation(2, (1,))
    await until(lambda: len(world.of(ToReplica)) >= 3)
    # The answer to the order that was given up is not one to the newer order.
    world.reply(1, WorkerFailed("generation 1 did not form", False, 1))
    world.leader.on_batch(batch(1))
    await world.finish()
    assert [join.generation for join in world.joins()] == [1, 1, 2]


@pytest.mark.usefixtures("soon")
async def test_an_answer_to_an_earlier_attempt_does_not_fail_the_next_one() -> None:
    world = World(steps=1).start(1, 2)
    one, two = world.replicas[1], world.replicas[2]
    one.silent = True
    two.instead = lambda message: WorkerFailed("1 did not appear", False, 1, message.attempt)
    await until(lambda: len(world.joins()) == 2)
    two.silent, two.instead = True, None
    await until(lambda: len(world.joins()) == 4)
    world.leader.on_reply(1, WorkerFailed("a newer order came", False, 1, world.joins()[0].attempt))
    world.leader.on_reply(1, StepFailed(1, 1, "of a step that was given up"))
    for replica in (one, two):
        replica.silent = False
        replica.take([join for join in world.joins() if join.rank == replica.rank - 1][1])
    await world.joined(2)
    assert len(world.joins()) == 4, "two attempts of two members"


@pytest.mark.usefixtures("soon")
async def test_time_in_which_a_member_writes_its_state_is_no_failure() -> None:
    world = World(steps=1).start(1, 2)
    world.replicas[1].instead = lambda message: WorkerFailed("2 did not appear", False, 1, message.attempt)
    world.replicas[2].silent = True
    for _ in range(8):
        world.now += generations.NEW_GENERATION_S / 2
        world.leader.on_reply(2, Doing({"snapshot": 30.0}))
        tried = len(world.joins())
        await until(lambda tried=tried: len(world.joins()) > tried + 2)
    assert not world.of(Fatal)
    world.now += generations.NEW_GENERATION_S
    assert "2 did not appear" in (await world.fatal()).reason


async def test_a_step_waits_for_members_on_their_way_and_not_longer_than_the_limit() -> None:
    world = World(steps=3).start(1)
    world.add(2)
    await world.joined(1)
    world.leader.on_layout(Layout(awaited=(2,), await_s=60.0))
    world.leader.on_batch(batch(1))
    await asyncio.sleep(0.02)
    assert not world.trained
    world.leader.on_generation(2, (1, 2))
    await until(lambda: len(world.of(Committed)) == 1)
    assert {(rank, step) for rank, step, *_ in world.trained} == {(1, 1), (2, 1)}

    world.leader.on_generation(3, (1,))
    await world.joined(4)
    world.leader.on_batch(batch(2))
    await asyncio.sleep(0.02)
    assert len(world.of(Committed)) == 1
    world.now += 61.0
    world.leader.on_reply(1, Doing())
    await until(lambda: len(world.of(Committed)) == 2)
    (late,) = [log.fields for log in world.of(Log) if log.kind == "members_late"]
    assert (late["step"], late["ranks"]) == (2, [2])
    assert {rank for rank, step, *_ in world.trained if step == 2} == {1}

    world.leader.on_batch(batch(3))
    await asyncio.sleep(0.02)
    assert len(world.of(Committed)) == 2, "the next step waits as long"
    world.leader.on_layout(Layout(awaited=(), await_s=60.0))
    await world.finish()
    assert [step for rank, step, *_ in world.trained if rank == 1] == [1, 2, 3], "once each"


async def test_a_stop_does_not_wait_for_members_on_their_way() -> None:
    world = World(steps=3).start(1)
    await world.joined(1)
    world.leader.on_layout(Layout(awaited=(2,), await_s=60.0))
    world.leader.on_batch(batch(1))
    await asyncio.sleep(0.02)
    world.leader.on_stop("enough")
    await world.finish()
    assert not world.trained
