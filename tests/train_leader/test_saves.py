"""What leaves the trainers at a step boundary: offers, snapshots and checkpoints, and storage that fails."""

from __future__ import annotations

import asyncio

import pytest

from libra_hpc.protocol.agents import Committed, Fatal, StepReport, ToReplica, TrainReport
from libra_hpc.protocol.layout import Layout
from libra_hpc.protocol.trainer import OfferFailed, OfferWeights, Saved, SaveState
from libra_hpc.train_leader import saves
from libra_hpc.train_leader import train_leader as leader
from tests.stage.waiting import until
from tests.train_leader.world import World, batch


def orders(world: World, rank: int = 1) -> list[str]:
    """What this rank was asked for."""
    found = [m.message for to, m in world.sent if to == rank and isinstance(m, ToReplica)]
    return [m.tier if isinstance(m, SaveState) else type(m).__name__ for m in found]


async def test_a_checkpoint_that_fails_is_tried_again_at_a_later_boundary() -> None:
    world = World(checkpoint_every=2).start(1)
    replica = world.replicas[1]
    # The clock before a step, what has no room then, and the steps of all checkpoints that were tried after it.
    for number, (now, full, no_position, tried) in enumerate(
        (
            (0.0, True, False, []),
            (0.0, True, False, [2]),
            (9.0, True, False, [2]),
            (10.0, True, False, [2, 4]),
            (30.0, False, True, [2, 4, 5]),
            (70.0, False, False, [2, 4, 5, 6]),
            (70.0, False, False, [2, 4, 5, 6]),
        ),
        1,
    ):
        world.now, replica.full, world.no_position = now, full, no_position
        await world.step(number)
        await asyncio.sleep(0.005)
        assert world.tried == tried, "after a pause"
    assert [step for step, *_ in world.saved] == [6]
    events = [(event["step"], event["reason"]) for event in world.events("checkpoint_failed")]
    assert events == [(2, "no room"), (4, "no room"), (5, "no room for the position")]
    assert not world.of(Fatal)


async def test_a_checkpoint_carries_the_reports_that_are_not_recorded_yet() -> None:
    world = World(steps=4, checkpoint_every=2).start(1)
    for step in (1, 2, 3, 4):
        await world.step(step)
        await until(lambda step=step: len(world.carried) == step // 2)
        world.leader.on_layout(Layout(recorded=1))
    assert world.carried == [[(2, 0.5)], [(2, 0.5), (3, 0.5), (4, 0.5)]]
    assert all(report.t > 1e9 for report in world.of(StepReport))


@pytest.mark.parametrize("freed", [True, False])
async def test_a_stopped_run_tries_its_last_checkpoint_four_times(monkeypatch: pytest.MonkeyPatch, freed: bool) -> None:
    monkeypatch.setattr(leader, "LAST_PAUSE_S", 0.05)
    world = World(storage_s=1e9).start(1)
    world.replicas[1].full = True
    await world.step(1)
    world.leader.on_stop("SIGTERM")
    await until(lambda: len(world.tried) >= 2)
    world.replicas[1].full = not freed
    await until(lambda: world.done or world.of(Fatal))
    if freed:
        assert [step for step, *_ in world.saved] == [1]
    else:
        assert world.tried == [1] * 4
        assert [fatal.reason for fatal in world.of(Fatal)] == ["the last step could not be saved: no room"]


@pytest.mark.parametrize("freed", [True, False])
async def test_a_run_at_its_end_waits_for_room_as_long_as_the_run_directory_may_lack_it(
    monkeypatch: pytest.MonkeyPatch, freed: bool
) -> None:
    monkeypatch.setattr(saves, "SAVE_LONGEST_S", 0.001)
    world = World(steps=1, storage_s=900.0).start(1)
    world.replicas[1].full = True
    world.leader.on_batch(batch(1))
    await until(lambda: len(world.tried) >= 10)
    world.now = 899.0
    tried = len(world.tried)
    await until(lambda: len(world.tried) > tried + 1)
    assert not world.of(Fatal)
    # A save that was asked for before there was room fails, and is tried again while there is time.
    world.replicas[1].full, world.now = not freed, 899.0 if freed else 900.0
    await until(lambda: world.done or world.of(Fatal))
    assert [step for step, *_ in world.saved] == [1] * freed
    assert [fatal.reason for fatal in world.of(Fatal)] == ["the last step could not be saved: no room"] * (not freed)


async def test_a_file_system_that_never_answers_fails_the_checkpoint_and_training_goes_on() -> None:
    world = World(checkpoint_every=1, storage_s=0.01).start(1)
    world.hangs = True
    for step in (1, 2):
        world.leader.on_batch(batch(step))
    await until(lambda: len(world.of(Committed)) == 2 and world.events("checkpoint_failed"))
    (failed,) = world.events("checkpoint_failed")
    assert failed["reason"] == "the checkpoint was not completed within 0 s"


async def test_training_goes_on_while_a_checkpoint_is_written_and_the_next_one_waits_for_its_end() -> None:
    world = World(checkpoint_every=1).start(1)
    replica = world.replicas[1]
    replica.slow = True
    await world.step(1, 2, 3)
    assert world.tried == [1]
    assert [one.saving for one in world.of(TrainReport)] == [False, True], "the time limit counts with it"
    world.leader.on_layout(Layout(recorded=2))
    world.now += 3.0
    replica.saved()
    await until(lambda: world.tried == [1, 3])
    assert [(one.saving, one.save_s) for one in world.of(TrainReport)[2:]] == [(False, 3.0), (True, 3.0)]
    await world.step(4)
    world.leader.on_stop("SIGTERM")
    await asyncio.sleep(0.01)
    assert world.tried == [1, 3], "the last checkpoint waits too"
    replica.slow = False
    replica.saved()
    await world.finish()
    assert world.saved == [(1, 2, []), (3, 6, []), (4, 8, [])], "each with the position of its own step"
    assert [[step for step, _ in reports] for reports in world.carried] == [[1], [3], [3, 4]]


async def test_a_core_that_dies_while_it_writes_a_checkpoint_leaves_none_and_saves_again_at_once() -> None:
    world = World(checkpoint_every=2).start(1)
    dead = world.replicas[1]
    dead.slow = True
    await world.step(1, 2, 3)
    world.leader.on_replica_down(1, "killed")
    world.add(1, step=2)
    world.leader.on_generation(2, (1,))
    await until(lambda: world.saved)
    dead.saved()
    await asyncio.sleep(0.01)
    assert world.tried == [2, 3]
    assert world.saved == [(3, 6, [])]
    assert world.discarded == ["step-000002.1.partial"]


async def test_weights_that_had_no_room_are_offered_again_while_the_last_checkpoint_waits_for_them() -> None:
    world = World(steps=1).start(1)
    replica = world.replicas[1]
    replica.slow = True
    await until(lambda: world.asked(OfferWeights))
    replica.bad_offers = 1
    world.leader.on_batch(batch(1))
    await until(lambda: world.tried == [1] and world.events("offer_failed"))
    world.now = 10.0
    world.leader.on_layout(Layout(recorded=0))
    world.leader.on_stop("SIGTERM")
    await until(lambda: [order.version for _, order in world.asked(OfferWeights)] == [0, 1, 1])
    assert not world.saved
    replica.saved()
    await world.finish()
    assert [step for step, *_ in world.saved] == [1]


async def test_a_run_that_stops_where_it_started_keeps_its_checkpoint() -> None:
    world = World(step=5, from_checkpoint=True)
    world.add(1, step=5)
    await world.start(1).joined(1)
    world.leader.on_stop("SIGTERM")
    await world.finish()
    assert world.tried == []


async def test_only_the_core_answers_for_the_checkpoint() -> None:
    world = World(checkpoint_every=1).start(1, 2)
    await world.joined(2)
    world.replicas[1].slow = True
    world.leader.on_batch(batch(1))
    await until(lambda: world.asked(SaveState))
    world.leader.on_reply(2, Saved(world.replicas[1].saving.folder, 1, 0.0))
    world.leader.on_reply(1, Saved("of an earlier request", 1, 0.0))
    await asyncio.sleep(0.01)
    assert world.saved == []
    world.replicas[1].saved()
    await until(lambda: world.saved)
    assert world.saved == [(1, 2, [])]


async def test_a_snapshot_is_taken_at_the_boundary_of_its_step_after_the_offers() -> None:
    world = World().start(1, 2)
    for number in (1, 2):
        await world.step(number)
        await until(lambda number=number: world.snapshots.listed == [(s, 2 * s) for s in range(1, number + 1)])
    assert orders(world) == ["Join", "OfferWeights", *["TrainStep", "OfferWeights", "snapshot"] * 2]
    assert {rank for rank, _ in world.asked(SaveState)} == {1}, "the core alone has a state"


async def test_an_offer_is_asked_for_at_a_step_boundary_never_while_a_step_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leader.RequestedOffers, "FIRST_S", 0.01)
    world = World().start(1)
    replica = world.replicas[1]
    replica.bad_offers = 1
    await until(lambda: world.events("offer_failed"))
    replica.silent = True
    world.leader.on_batch(batch(1))
    await until(lambda: "TrainStep" in orders(world))
    world.now = 1.0
    await asyncio.sleep(0.05)
    assert orders(world) == ["Join", "OfferWeights", "TrainStep"]
    replica.silent = False
    replica.take(world.of(ToReplica)[-1].message)
    await until(lambda: world.published())
    assert world.published() == [(1, -1)]


async def test_an_offer_that_fails_is_asked_for_again_and_five_failures_end_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leader.RequestedOffers, "FIRST_S", 0.0)
    world = World().start(1)
    world.replicas[1].bad_offers = 2
    # Nothing else happens: with a staleness bound of 0 no batch comes before the version is out.
    await until(lambda: world.published())
    world.leader.on_reply(1, OfferFailed(0, "its folder was removed"))
    await until(lambda: len(world.published()) == 2)
    world.replicas[1].bad_offers = 9
    world.leader.on_batch(batch(1))
    fatal = await world.fatal()
    assert world.published() == [(0, -1)] * 2
    assert [event["step"] for event in world.events("offer_failed")] == [0] * 3 + [1] * 5
    assert fatal.reason == "the weights of step 1 could not be offered to the rollout engines: no room"


async def test_an_offer_that_a_newer_one_replaces_is_no_failure() -> None:
    world = World().start(1)
    await until(lambda: world.published())
    world.leader.on_batch(batch(1))
    await until(lambda: len(world.published()) == 2)
    for _ in range(9):
        world.leader.on_reply(1, OfferFailed(0, "its file was removed"))
    world.leader.on_batch(batch(2))
    await until(lambda: len(world.published()) == 3)
    assert world.published() == [(0, -1), (1, 0), (2, -1)]
    assert not world.events("offer_failed")
