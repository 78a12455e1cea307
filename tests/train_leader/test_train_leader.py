"""The train leader against nodes that only count: every batch is trained once, and a stop saves what is trained."""

from __future__ import annotations

import asyncio

from libra_hpc.protocol.agents import Batch, Committed, Group, StepReport
from libra_hpc.protocol.codec import pack_f32, pack_i32
from libra_hpc.protocol.layout import Layout, StopTraining
from libra_hpc.protocol.trainer import Sample
from tests.protocol.step_reports import batch_stats
from tests.stage.waiting import until
from tests.train_leader.world import World, batch


async def test_trains_every_batch_once_and_finishes_with_a_checkpoint() -> None:
    world = World(steps=3, checkpoint_every=2).start(1)
    for step in (1, 2, 3):
        world.leader.on_batch(batch(step))
        world.leader.on_batch(batch(step))
    await world.finish()
    assert [(rank, step) for rank, step, _, _ in world.trained] == [(1, 1), (1, 2), (1, 3)]
    assert [c.indices for c in world.of(Committed)] == [(0, 1), (2, 3), (4, 5)]
    assert world.published() == [(0, -1), (1, 0), (2, 1), (3, 2)]
    assert world.saved == [(2, 4, []), (3, 6, [])]
    assert [r.metrics["reward"] for r in world.of(StepReport)] == [0.5, 0.5, 0.5]


async def test_a_rebuilt_core_that_is_behind_replays_the_retained_batches() -> None:
    world = World().start(1)
    await world.step(1, 2)
    await until(lambda: len(world.published()) == 3)
    world.leader.on_replica_down(1, "killed while idle")
    world.add(1, step=1)
    world.leader.on_generation(2, (1,))
    await world.step(3)
    assert [(step, uids) for _, step, uids, _ in world.trained if step == 2] == [(2, ["2.0", "2.1", "3.0", "3.1"])] * 2
    assert [c.step for c in world.of(Committed)] == [1, 2, 3], "a replay commits nothing twice"


async def test_a_state_too_old_to_replay_ends_the_run_with_a_reason() -> None:
    world = World(step=5)
    world.add(1, step=2)
    fatal = await world.start(1).fatal()
    assert "step 2" in fatal.reason
    assert "step 5" in fatal.reason
    assert fatal.restart, "the attempt started from a checkpoint, from which it can go on"


async def test_a_stop_after_a_step_waits_for_its_batch() -> None:
    world = World().start(1)
    await world.step(1)
    world.leader.on_layout(Layout(stop=StopTraining("time limit", after=2)))
    await asyncio.sleep(0.01)
    assert not world.done
    for step in (2, 3):
        world.leader.on_batch(batch(step))
    await world.finish()
    assert [step for step, *_ in world.saved] == [2]


async def test_batches_stay_until_a_newer_state_is_complete_and_at_most_four_times_as_long() -> None:
    world = World(steps=99).start(1)
    world.replicas[1].slow = True
    retained: list[int] = []
    for number in range(1, 20):
        if number == 3:
            # Nothing comes of the snapshot of this step.
            world.leader._snapshots.on_answer = lambda rank, message: None  # type: ignore[method-assign]
        await world.step(number)
        retained.append(len(world.leader._batches))
    assert retained[:3] == [1, 2, 3]
    assert retained[6] > 4, "more than the steps between two snapshots"
    assert retained[-3:] == [12, 12, 12]


async def test_three_steps_in_a_row_without_an_update_end_the_run() -> None:
    world = World().start(1)
    for step, skipped in enumerate((1, 1, 0, 1, 1, 1), 1):
        world.replicas[1].skipped = skipped
        world.leader.on_batch(batch(step))
        await until(lambda step=step: len(world.of(StepReport)) == step)
    fatal = await world.fatal()
    assert [r.metrics["skipped"] for r in world.of(StepReport)] == [1, 1, 0, 1, 1, 1]
    assert [event["step"] for event in world.events("update_skipped")] == [1, 2, 4, 5, 6]
    assert fatal.reason == "gradients were not finite in 3 steps in a row"


async def test_a_batch_without_loss_tokens_is_never_trained() -> None:
    world = World().start(1)
    silent = Sample("0.0", pack_i32([1, 2]), b"\0\0", pack_f32([0.0, 0.0]), 1.0)
    world.leader.on_batch(Batch(1, (Group(0, (silent,)),), batch_stats()))
    assert (await world.fatal()).reason == "the batch of step 1 has no token to train on"
    assert not world.trained
    assert not world.of(Committed)


async def test_prompts_that_were_given_up_are_done_with_when_the_step_is_committed() -> None:
    world = World(steps=1).start(1)
    whole = batch(1)
    world.leader.on_batch(Batch(1, whole.groups, whole.stats, (2, 5)))
    await world.finish()
    assert [c.indices for c in world.of(Committed)] == [(0, 1, 2, 5)]
    assert world.saved == [(1, 3, [5])]
