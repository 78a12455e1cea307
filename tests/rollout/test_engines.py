"""Engines that die, come late, stand still, are drained or give a turn away: no trajectory is lost."""

from __future__ import annotations

import asyncio

import pytest

from libra_hpc.protocol.agents import Batch, Committed, Turns, WrongEngine
from libra_hpc.protocol.codec import unpack_i32
from libra_hpc.protocol.engine import Abort
from libra_hpc.protocol.env import HostLost, TurnUnwanted
from libra_hpc.protocol.trainer import ENGINES
from tests.rollout.plant import Plant, engine_stats, sampling

ALL_ONCE = ["0.0.0", "0.1.0", "1.0.0", "1.1.0"]
"""Every trajectory of the first batch, none of them sampled again."""


async def test_a_killed_engine_loses_no_trajectory() -> None:
    plant = await sampling()
    held = [request for engine, request in plant.inbox if engine == "e0"]
    assert held
    plant.down("e0")
    await plant.batch()
    assert plant.leader.resubmitted == len(held) == len(plant.kinds("resubmitted"))
    assert sorted(plant.finished) == ALL_ONCE, "finished once each, from where they were"


async def test_all_engines_gone_waits_and_goes_on() -> None:
    plant = await sampling(engines=1)
    plant.down("e0")
    for _ in range(5):
        await asyncio.sleep(0)
    assert not plant.inbox
    assert plant.leader.report().paused == "No engine accepts turns."
    plant.up("e9", rank=3)
    plant.leader.on_host(0, HostLost("killed"))
    assert plant.leader.report().paused == "Environment host 0 is not ready."
    plant.host_up()
    assert plant.leader.report().paused == ""
    await plant.batch()


async def test_an_engine_that_comes_up_again_unannounced_loses_no_turn() -> None:
    plant = await sampling(engines=1)
    held = len(plant.inbox)
    plant.inbox.clear()
    plant.up("e0", rank=3)
    await plant.batch()
    assert plant.leader.resubmitted == held


async def test_an_engine_behind_in_weights_gets_no_turns_until_it_caught_up() -> None:
    plant = Plant(steps=2).start()
    plant.commit(await plant.batch())
    plant.version = 0
    plant.up("late", rank=9)
    await plant.run(lambda: plant.inbox)
    await plant.settle()
    assert "late" not in {engine for engine, _ in plant.inbox}
    plant.serve(1)
    plant.observed("late", version=1)
    await plant.settle()
    assert "late" in {engine for engine, _ in plant.inbox}


async def test_a_version_counts_once_every_live_engine_has_it_and_who_fails_is_not_waited_for() -> None:
    plant = Plant(engines=3, eta=0, steps=3).start()
    first = await plant.batch()
    plant.leader.on_committed(Committed(1, tuple(group.index for group in first.groups)))
    for engine in ("e0", "e1"):
        plant.observed(engine, version=1)
    await plant.settle()
    assert (plant.inbox, plant.leader.report().joint_version) == ([], 0)
    plant.down("e2")  # its node ends it, as it cannot take the version
    assert plant.leader.report().joint_version == 1
    await plant.run(lambda: plant.inbox)
    assert {name for name, _ in plant.inbox} == {"e0", "e1"}


async def test_an_engine_that_computes_wrongly_is_ended_and_its_turns_go_on_elsewhere() -> None:
    plant = Plant(engines=3, eta=0, steps=3).start()
    batch = await plant.batch()
    numbers, (sent,) = plant.leader._turns.engines.numbers, plant.of(Batch)
    for line, sample in ((line, s) for group in sent.groups for line in plant.lines for s in group.samples):
        if sample.trajectory == f"{line.index}.{line.sample}":
            assert set(sample.loss_mask) - {0} == {numbers[turn.engine] for turn in line.turns}
    gaps = {number: (10.0 if name == "e1" else 0.0, 2000) for name, number in numbers.items()}
    gaps[numbers["e1"]] = 2000.0, 2000
    plant.version = 1
    await plant.run(lambda: plant.observed("e1", version=1) or True)
    plant.leader.on_committed(Committed(1, tuple(group.index for group in batch.groups), gaps))
    ((name, end),) = [item for turns in plant.of(Turns) for item in turns.items if isinstance(item[1], WrongEngine)]
    assert (name, end.closed) == ("e1", False)
    (event,) = plant.kinds("engine_off")
    assert (event["engine"], event["rank"], event["action"]) == ("e1", 4, "reload")
    assert "e1" not in plant.leader._turns.engines.engines


async def test_draining_answers_once_the_last_turn_is_back() -> None:
    plant = await sampling()
    before = len(plant.sent)
    plant.leader.on_drain(3, 1)
    assert not plant.leader.drained
    plant.serve()
    assert plant.leader.drained == {3: 1}
    await plant.batch()
    assert {engine for m in plant.sent[before:] if isinstance(m, Turns) for engine, _ in m.items} == {"e1"}


async def test_a_drained_node_whose_last_turns_are_dropped_is_reported_and_generates_for_nobody() -> None:
    plant = await sampling(4, turns=3, engines=1)
    plant.serve()
    await plant.settle()
    assert len(plant.inbox) == 4
    plant.leader.on_drain(3, 1)
    plant.tool = 6
    plant.kill_host()
    await plant.settle()
    assert plant.leader.drained == {3: 1}, "replays failed, and nothing of the node counts"
    assert {(engine, abort.rid) for engine, abort in plant.aborts} == {(e, request.rid) for e, request in plant.inbox}
    plant.serve()
    assert plant.leader.drained == {3: 1}


@pytest.mark.parametrize("partial", [None, [], [7]])
async def test_a_turn_that_its_engine_never_ends_is_sent_again_with_what_it_has(partial: list[int] | None) -> None:
    plant = await sampling(4, turns=1)
    stuck = [item for item in plant.inbox if item[0] == "e0"]
    plant.inbox = [item for item in plant.inbox if item[0] == "e1"]
    plant.serve()
    await plant.settle()
    plant.watch_after(59.0)
    assert not plant.aborts
    plant.watch_after(842.0)
    assert [(engine, abort.rid) for engine, abort in plant.aborts] == [(e, request.rid) for e, request in stuck]
    for engine, request in stuck if partial is not None else ():
        plant.answer(engine, request, partial or [], "abort")
    plant.leader.on_engine_load("e0", engine_stats(generated=8, prefilled=12, steps=2))
    plant.watch_after(61.0)
    await plant.settle()
    assert {tuple(unpack_i32(request.prompt)[3:]) for _, request in plant.inbox} == {tuple(partial or ())}
    assert [event["reason"] for event in plant.kinds("resubmitted")] == ["turn overdue"] * 2
    assert plant.leader.resubmitted == 2
    await plant.batch()
    assert plant.sizes() == [2, 2]
    assert not plant.kinds("trajectory_failed")


async def test_a_turn_that_is_overdue_three_times_with_nothing_generated_is_a_failed_attempt() -> None:
    plant = Plant(turns=1, engines=1, prompts=1, group=1).start()
    for count in range(3):
        await plant.settle()
        assert len(plant.inbox) == count + 1
        plant.watch_after(901.0)
        plant.leader.watch()
        assert (len(plant.aborts), len(plant.kinds("resubmitted"))) == (count + 1, count)
        plant.leader.discount(30.0)
        plant.watch_after(89.0)
        assert len(plant.kinds("resubmitted")) == count
        plant.watch_after(2.0)
    (failed,) = plant.kinds("trajectory_failed")
    assert (failed["failure"], failed["given_up"]) == ("timeout", False)
    plant.serve()
    assert not plant.finished, "late answers find nothing"
    await plant.batch_within(20)
    assert plant.sizes() == [1]


async def test_no_two_engines_that_are_here_have_one_number() -> None:
    engines = Plant(engines=3, eta=0, steps=3).start().leader._turns.engines
    here = {engines.numbers[name] for name in engines.engines}
    assert len(here) == 3
    for gone in range(2 * ENGINES):
        engines.numbers[f"gone-{gone}"] = number = engines._free_number()
        assert number in {*range(2, ENGINES)} - here


@pytest.mark.parametrize("partial", [[7, 8], []])
async def test_a_turn_that_nobody_waits_for_is_aborted_and_goes_to_its_environment(partial: list[int]) -> None:
    plant = await sampling(4, turns=2)
    engine, request = plant.inbox[0]
    episode = request.rid.split(":")[0]
    for _ in range(2):
        plant.from_host(TurnUnwanted(episode))
    assert plant.aborts == [(engine, Abort(request.rid))] * 2
    plant.answer(engine, request, partial, "abort")
    await asyncio.sleep(0)
    if not partial:
        ((again, short),) = [(e, r) for e, r in plant.inbox if r.rid.split(":")[0] == episode]
        assert short.max_tokens == 1
        plant.answer(again, short, [7], "length")
    step = plant.take_step()
    plant.from_host(TurnUnwanted(episode))
    assert (step.episode, unpack_i32(step.tokens)) == (episode, partial or [7])
    assert len(plant.aborts) == 2, "only a turn at an engine can be aborted"
