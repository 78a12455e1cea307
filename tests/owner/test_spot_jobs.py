"""When a run queues another job to roll out on."""

from __future__ import annotations

from libra_hpc.owner.spot_jobs import LIVES_S, LONGEST_S, PAUSE_S, SpotQueue


def queued(spot: SpotQueue, *jobs: str) -> None:
    for job in jobs:
        spot.jobs[job] = None


def test_as_many_jobs_are_queued_as_there_may_be_nodes() -> None:
    spot = SpotQueue(3)
    assert spot.due(0.0) == 3
    queued(spot, "1", "2")
    assert spot.due(0.0) == 1
    assert spot.seen({"1": True, "2": False, "9": True}, 1.0) == []
    assert SpotQueue(0).due(0.0) == 0


def test_a_job_that_was_preempted_after_it_worked_is_queued_again_at_the_next_chance() -> None:
    spot = SpotQueue(1)
    queued(spot, "1")
    spot.seen({"1": False}, 0.0)
    spot.seen({"1": True}, 5.0)
    assert spot.seen({}, 5.0 + LIVES_S) == ["1"]
    assert spot.due(5.0 + LIVES_S) == 1


def test_jobs_that_bring_nothing_are_queued_ever_later_until_one_works() -> None:
    spot, now, pauses = SpotQueue(1), 0.0, []
    for number in range(8):
        assert spot.due(now) == 1
        queued(spot, str(number))
        spot.seen({str(number): True}, now)
        spot.seen({}, now + 1.0)
        began = now + 1.0
        now = began
        while not spot.due(now):
            now += 1.0
        pauses.append(now - began)
    assert pauses == [min(PAUSE_S * 2**number, LONGEST_S) for number in range(8)]
    queued(spot, "works")
    spot.seen({"works": True}, now)
    spot.seen({}, now + LIVES_S)
    assert spot.due(now + LIVES_S) == 1
    spot.retry.failed(now + LIVES_S)
    assert spot.due(now + LIVES_S + PAUSE_S) == 1


def test_jobs_beyond_those_wanted_are_cancelled_the_waiting_ones_first() -> None:
    spot = SpotQueue(4)
    queued(spot, "1", "2", "3", "4")
    spot.seen({"1": True, "2": True, "3": False, "4": False}, 1.0)
    spot.jobs["2"] = 5.0
    assert spot.surplus() == []
    spot.wanted = 2
    assert set(spot.surplus()) == {"3", "4"}
    spot.wanted = 1
    assert spot.surplus()[2:] == ["2"]
    spot.wanted = 0
    assert spot.surplus()[2:] == ["2", "1"]
    assert spot.due(1.0) == 0
