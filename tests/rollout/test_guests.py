"""Engines of guests under the rollout leader: nobody waits for them, and what they do is counted apart."""

from __future__ import annotations

import pytest

from libra_hpc.policies.scheduling.availability import Availability
from libra_hpc.policies.scheduling.board import EngineView
from libra_hpc.protocol.agents import Committed
from libra_hpc.protocol.codec import unpack_i32
from libra_hpc.protocol.engine_state import EngineStats
from libra_hpc.protocol.joining import FIRST_GUEST

from .plant import STOP, Plant, engine_stats

OWN, GUEST = "e0", "r10000.0"


async def with_guest(**options: int) -> Plant:
    """One own engine, and one of a guest; both have turns."""
    plant = Plant(engines=1, **options).start()
    plant.up(GUEST, FIRST_GUEST)
    await plant.run(lambda: at(plant, OWN) and at(plant, GUEST))
    return plant


def at(plant: Plant, engine: str) -> int:
    return sum(name == engine for name, _ in plant.inbox)


async def test_a_guest_that_is_behind_gets_no_turns_and_nobody_waits_for_it() -> None:
    plant = await with_guest(eta=0, steps=3)
    first = await plant.batch()
    plant.leader.on_committed(Committed(1, tuple(group.index for group in first.groups)))
    plant.observed(OWN, version=1)
    await plant.run(lambda: len(plant.inbox) >= 4)
    assert {name for name, _ in plant.inbox} == {OWN}, "the next batch began without the guest"
    plant.observed(GUEST, version=1)
    await plant.run(lambda: at(plant, GUEST))
    second = await plant.batch(2)
    assert second.stats["staleness_max"] == 0


async def test_a_guest_that_is_behind_stays_closed_without_an_own_engine() -> None:
    plant = Plant(engines=1, eta=0).start(step=3)
    plant.down(OWN)
    plant.version = 2
    plant.up(GUEST, FIRST_GUEST)
    await plant.settle()
    assert not plant.inbox
    plant.observed(GUEST, version=3)
    await plant.run(lambda: at(plant, GUEST))


async def test_turns_of_a_guest_that_leaves_go_on_elsewhere_with_what_they_have() -> None:
    plant = await with_guest(eta=0, turns=1)
    running = [request for name, request in plant.inbox if name == GUEST]
    plant.leader.on_drain(FIRST_GUEST, 1, abort=True)
    assert [(name, abort.rid) for name, abort in plant.aborts] == [(GUEST, request.rid) for request in running]
    assert not plant.leader.drained
    for request in running:
        plant.answer(GUEST, request, [7], "abort")
    assert plant.leader.drained == {FIRST_GUEST: 1}
    await plant.run(lambda: plant.batches)
    assert at(plant, GUEST) == 0
    again = {t.episode: t for t in plant.ended}
    for request in running:
        assert unpack_i32(again[request.rid.partition(":")[0]].tokens)[3:] == [7, 7, 8, STOP]


async def test_tokens_and_engines_of_guests_are_counted_apart() -> None:
    plant = await with_guest(eta=0, turns=1)
    for engine, tokens in ((OWN, 10), (GUEST, 1000)):
        for total in (0, tokens):
            plant.leader.on_engine_load(engine, engine_stats(generated=total, prefilled=total, steps=total))
    report = plant.leader.report()
    assert (report.generated_tokens, report.prefilled_tokens, report.guest_tokens) == (10, 10, 1000)
    assert [(tp, engines) for tp, engines, *_ in report.buckets] == [(1, 1)]
    board = plant.leader._turns.engines._board
    assert {name: view.borrowed for name, view in board.engines.items()} == {OWN: False, GUEST: True}
    batch = await plant.batch()
    of_guests = sum(turn.gen_tokens for t in plant.ended for turn in t.turns if turn.engine == GUEST)
    assert batch.stats["guest_tokens"] == of_guests > 0


def paused(seconds: float, still: bool, steps: int = 1, why: str = "served") -> EngineStats:
    return EngineStats(running=1, generated_tokens=steps, steps=steps, paused_s=seconds, stands_still=still, pause=why)


async def test_turns_of_an_engine_that_stands_still_go_on_elsewhere_until_it_steps_again() -> None:
    plant = await with_guest(eta=0, turns=1)
    plant.leader.on_engine_load(GUEST, paused(1.5, still=False))
    assert not plant.aborts
    running = [request for name, request in plant.inbox if name == GUEST]
    for seconds in (2.0, 2.5):
        plant.leader.on_engine_load(GUEST, paused(seconds, still=True))
    assert [(name, abort.rid) for name, abort in plant.aborts] == [(GUEST, request.rid) for request in running]
    for request in running:
        plant.answer(GUEST, request, [7], "abort")
    # A new version does not open it.
    plant.observed(GUEST, version=0)
    first = await plant.batch()
    ended = {t.episode: t for t in plant.ended}
    for request in running:
        one = ended[request.rid.partition(":")[0]]
        assert unpack_i32(one.tokens)[3:] == [7, 7, 8, STOP]
        assert one.turns[-1].engine == OWN
    assert plant.leader.resubmitted == 0, "nothing went wrong"
    plant.leader.on_engine_load(GUEST, paused(3.0, still=False, steps=2))
    plant.leader.on_committed(Committed(1, tuple(group.index for group in first.groups)))
    for name in (OWN, GUEST):
        plant.observed(name, version=1)
    await plant.run(lambda: at(plant, GUEST))


async def test_without_another_engine_turns_wait_for_the_one_that_stands_still() -> None:
    plant = Plant(engines=1, turns=1).start()
    await plant.run(lambda: plant.inbox)
    plant.leader.on_engine_load(OWN, paused(2.0, still=True))
    for name, request in plant.inbox:
        plant.answer(name, request, [], "abort")
    plant.inbox.clear()
    await plant.settle()
    assert not plant.inbox
    plant.leader.on_engine_load(OWN, paused(9.0, still=False))
    await plant.batch()


async def test_paused_seconds_neither_make_a_turn_overdue_nor_teach_the_deadlines() -> None:
    plant = Plant(engines=1, turns=1, prompts=1, group=2).start()
    await plant.run(lambda: len(plant.inbox) == 2)
    plant.leader.on_engine_load(OWN, paused(0.0, still=False))
    for total in (800.0, 1600.0, 2400.0):
        plant.now += 800.0
        plant.leader.on_engine_load(OWN, paused(total, still=False))
        plant.leader.watch()
    assert not plant.aborts
    assert not plant.kinds("slow")
    plant.now += 10.0
    plant.serve(1)
    await plant.settle()
    # Ten times the 10 s that it took, not of 2,410 s.
    plant.watch_after(51.0)
    (slow,) = plant.kinds("slow")
    assert slow["reason"] == "The turn has not ended after 61 s (limit 100 s)."


def of_guest(plant: Plant) -> EngineView:
    return plant.leader._turns.engines._board.engines[GUEST]


async def test_the_board_learns_how_much_there_is_of_a_guest() -> None:
    plant = await with_guest(eta=0, turns=1)
    same, paused_s = Availability(), 0.0
    plant.leader.on_engine_load(GUEST, paused(0.0, still=False))
    for step in range(2, 100):
        plant.now += 2.0
        paused_s += 0.5
        plant.leader.on_engine_load(GUEST, paused(paused_s, still=False, steps=step))
        same.passed(1.5, True)
        same.passed(0.5, False)
    assert of_guest(plant).share == pytest.approx(same.share)
    assert of_guest(plant).share < 0.9
    plant.leader.on_engine_load(GUEST, paused(paused_s, still=True, steps=100))
    share = of_guest(plant).share
    plant.now += 60.0
    plant.leader.on_engine_load(GUEST, paused(paused_s, still=True, steps=100))
    assert of_guest(plant).share < 0.8 * share, "it has no turns, and is closed"
    assert plant.leader._turns.engines._board.engines[OWN].share == 1.0


async def test_a_guest_without_a_step_between_two_reports_gets_no_turns() -> None:
    plant = await with_guest(eta=0, turns=1)
    for seconds, steps, is_open in ((0.0, 1, True), (0.5, 1, False), (0.7, 2, True)):
        plant.now += 0.5
        plant.leader.on_engine_load(GUEST, paused(seconds, still=False, steps=steps))
        assert of_guest(plant).open is is_open
    assert not plant.aborts


async def test_what_each_lender_gave_and_why_it_was_paused_is_reported_whoever_its_guest_is() -> None:
    plant = Plant(engines=1, eta=0, turns=1, prompts=4).start()
    plant.up(GUEST, FIRST_GUEST, lender=("gpu-7", "lender"))
    plant.up("spot", FIRST_GUEST + 1, lender=("t-9", "spot"))
    await plant.run(lambda: at(plant, GUEST) and at(plant, "spot"))
    plant.leader.on_engine_load(GUEST, paused(0.0, still=False))
    for step, seconds, why in ((2, 2.0, "served"), (3, 2.0, "served"), (4, 3.0, "silent"), (4, 5.0, "served")):
        plant.now += 4.0
        plant.leader.on_engine_load(GUEST, paused(seconds, still=False, steps=step, why=why))
    lender, spot = plant.leader.report().lenders
    assert (lender.name, lender.kind, lender.tokens, lender.turns) == ("gpu-7", "lender", 3, 0)
    assert 1.0 < plant.leader.report().lent_gpus < 2.0, "the spot engine, and a part of the other"
    assert (lender.mean_share, lender.paused, lender.now) == (11 / 16, {"served": 4.0, "silent": 1.0}, "served")
    assert (spot.name, spot.kind, spot.engines, spot.now, spot.paused) == ("t-9", "spot", 1, "", {})
    plant.down(GUEST)
    assert (plant.leader.report().lenders[0].engines, plant.leader.report().lenders[0].now) == (0, "")
    plant.up("r10002.0", FIRST_GUEST + 2, lender=("gpu-7", "lender"))
    batch = await plant.batch()
    lender, spot = plant.leader.report().lenders
    assert (lender.engines, lender.tokens) == (1, 3)
    assert batch.stats["guest_tokens"] == batch.stats["spot_tokens"] + batch.stats["lent_tokens"] > 0
    assert batch.stats["spot_tokens"] >= 3 * spot.turns > 0
