"""The player in a process of its own: it answers late, and a process that is lost or slow is a hold."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from libra_hpc.planning.live_child import PlayerProcess
from libra_hpc.protocol.engine_state import StepCosts
from libra_hpc.protocol.plan import NodeFact, PlanDecision, PlanSnapshot, TrainStepFact, TrajectoryFact
from tests.policies.control.plant import NOTHING

from .test_live import _config

WAIT_S = 60.0


@pytest.fixture
def player() -> Iterator[PlayerProcess]:
    made = PlayerProcess(_config(planner={"min_dwell_s": 0.0, "switch_cost_s": 1.0}))
    yield made
    made.close()


def slow_training(steps: int) -> PlanSnapshot:
    """Two nodes train for 100 s a batch that four roll out in a second or so."""
    done = tuple(
        TrajectoryFact(i, 100.0 * (i // 32), 64, 128, 1, 0.0, group=i // 4, prompt=64) for i in range(32 * steps)
    )
    trained = tuple(TrainStepFact(100.0 * (i + 1), 4096, nodes=2, seconds=99.0) for i in range(steps))
    kinds = (("train", "train"),) * 2 + (("hybrid", "rollout"),) * 2 + (("rollout", "rollout"),) * 2
    return replace(
        NOTHING,
        nodes=tuple(NodeFact(rank, component, role, 0.0) for rank, (component, role) in enumerate(kinds, 1)),
        steps=trained,
        trajectories=done,
        prompts_per_step=8,
        group_size=4,
        steps_left=500 - steps,
        step_costs=(StepCosts(4, 100_000, 0.01, 1e-8, 1e-6),),
    )


async def answered(player: PlayerProcess, snapshot: PlanSnapshot) -> PlanDecision:
    """The first decision that is not the one from before the question."""
    before, until = player.decide(snapshot, 0.0), time.monotonic() + WAIT_S
    while (decision := player.decide(snapshot, 0.0)) is before and time.monotonic() < until:
        await asyncio.sleep(0.05)
    return decision


async def test_plays_in_another_process_move_both_nodes_where_training_is_slow(player: PlayerProcess) -> None:
    decision = await answered(player, slow_training(4))
    assert (decision.action, set(decision.nodes)) == ("to_train", {3, 4})
    assert "a batch from 9" in decision.reason or "a batch from 10" in decision.reason


async def test_an_answer_about_nodes_that_changed_since_is_dropped(player: PlayerProcess) -> None:
    asked = slow_training(4)
    held = player.decide(asked, 0.0)
    lost = replace(asked, nodes=tuple(replace(node, role="lost") if node.rank == 4 else node for node in asked.nodes))
    until = time.monotonic() + WAIT_S
    while player._asked is not None and time.monotonic() < until:
        assert player.decide(lost, 0.0) is held
        await asyncio.sleep(0.05)


async def test_a_process_that_was_killed_or_answers_too_late_is_a_hold_and_the_next_one_answers(
    player: PlayerProcess,
) -> None:
    await answered(player, slow_training(4))
    assert player._child is not None
    player._child.kill()
    lost = await answered(player, slow_training(5))
    assert "the process that plays the coming work ended" in lost.reason
    player.decide(slow_training(5), 0.0)
    late = player.decide(slow_training(5), 61.0)
    if "was not played within 60 s" not in late.reason:
        assert late.action == "to_train", "it was there already"
    assert (await answered(player, slow_training(6))).action == "to_train"
