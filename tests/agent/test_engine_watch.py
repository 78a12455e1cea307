"""Deadlines of engines, with times as arguments."""

from __future__ import annotations

from libra_hpc.agent.engine_watch import START, WAKE, WEIGHTS, EngineWatch
from libra_hpc.process.deadlines import DeadlineSettings

FLOOR_S, FIRST_S = 60.0, 900.0


def watch() -> EngineWatch:
    return EngineWatch(DeadlineSettings(FLOOR_S, FIRST_S, 10.0))


def talking(engines: EngineWatch, name: str, until: int) -> None:
    for second in range(until + 1):
        engines.sign(name, float(second))


def test_an_engine_that_falls_silent_is_late_once_and_then_hung_once() -> None:
    engines = watch()
    talking(engines, "a", 100)
    talking(engines, "b", 131)
    assert [found.engine for found in engines.late(131.0)] == ["a"]
    assert engines.late(132.0) == []
    assert engines.hung(160.0) == []
    (hung,) = engines.hung(161.0)
    assert hung[:2] == ("a", "silence of the engine has not ended after 61 s (limit 60 s)")
    assert [found.engine for found in engines.hung(1000.0)] == ["b"]
    assert engines.hung(2000.0) == []


def test_an_engine_that_spoke_again_can_be_late_again() -> None:
    engines = watch()
    talking(engines, "a", 10)
    assert len(engines.late(45.0)) == 1
    engines.sign("a", 46.0)
    assert engines.late(47.0) == []
    assert len(engines.late(227.0)) == 1, "half of ten times the silence of 36 s"


def test_silence_during_an_operation_is_judged_by_the_operation() -> None:
    for operation in (START, WEIGHTS, WAKE):
        engines = watch()
        talking(engines, "a", 10)
        engines.began("a", operation, 10.0)
        assert engines.hung(10.0 + FIRST_S) == [], "nothing of its kind was measured yet"
        engines.ended("a", operation, 10.0 + FIRST_S)
        engines.sign("a", 10.0 + FIRST_S)
        assert engines.hung(10.0 + FIRST_S + FLOOR_S) == []
        assert engines.hung(11.0 + FIRST_S + FLOOR_S)[0].reason.startswith("silence"), operation


def test_a_measured_operation_has_ten_times_its_longest_duration_on_every_engine_of_the_node() -> None:
    engines = watch()
    engines.began("a", WEIGHTS, 0.0)
    engines.ended("a", WEIGHTS, 20.0)
    engines.began("b", WEIGHTS, 100.0)
    engines.sign("b", 150.0)
    assert engines.hung(299.0) == [], "a message is no end of the operation, and silence does not count"
    (hung,) = engines.hung(301.0)
    assert hung.reason == "weight update of the engine has not ended after 201 s (limit 200 s)"


def test_an_operation_that_is_in_flight_does_not_begin_again() -> None:
    engines = watch()
    engines.began("a", WEIGHTS, 0.0)
    engines.began("a", WEIGHTS, 800.0)
    assert len(engines.hung(901.0)) == 1


def test_nothing_is_expected_of_an_engine_that_is_gone_and_stalls_of_the_agent_do_not_count() -> None:
    engines = watch()
    for name in ("a", "b"):
        talking(engines, name, 10)
        engines.began(name, WEIGHTS, 10.0)
    engines.gone("a")
    engines.discount(10_000.0)
    assert engines.hung(10_000.0) == []
    assert [found.engine for found in engines.hung(11_000.0)] == ["b"]
    engines.sign("a", 11_000.0)
    assert engines.hung(11_061.0)[0].engine == "a"


def test_engines_that_exceed_a_limit_together_count_once() -> None:
    engines, now = watch(), 0.0
    for limit_s in (900.0, 1800.0, 3600.0, 7200.0):
        for name in ("a", "b"):
            engines.began(name, START, now)
        assert engines.hung(now + limit_s) == []
        now += limit_s + 1.0
        found = engines.hung(now)
        assert [hung.engine for hung in found] == ["a", "b"]


def test_an_engine_that_stands_still_beside_users_is_not_hung_while_it_reports() -> None:
    engines = watch()
    engines.began("a", START, 0.0)
    for second in range(3 * int(FIRST_S)):
        engines.stands_still("a", float(second))
        assert not engines.late(second + 1.0)
    assert not engines.hung(3 * FIRST_S)
    assert engines.hung(4 * FIRST_S + 1.0)
