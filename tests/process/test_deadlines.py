"""Deadlines on progress and budgets of restarts."""

from __future__ import annotations

from libra_hpc.process.budget import RestartBudget
from libra_hpc.process.deadlines import Deadlines, DeadlineSettings, stall_of


def test_an_unmeasured_operation_has_the_first_limit_and_a_measured_one_its_own() -> None:
    deadlines = Deadlines(DeadlineSettings(floor_s=2.0, first_s=100.0, factor=10.0))
    deadlines.begin("step", 1, 0.0)
    assert not deadlines.pending(99.0)
    assert [late.key for late in deadlines.pending(60.0, share=0.5)] == [1]
    deadlines.end(1, 0.5)
    assert deadlines.limit("step") == 5.0
    deadlines.begin("step", 2, 10.0)
    assert not deadlines.pending(15.0)
    (overdue,) = deadlines.pending(15.1)
    assert (overdue.key, overdue.limit_s) == (2, 5.0)
    assert "step has not ended after 5 s" in overdue.sentence


def test_no_limit_is_below_the_floor_and_a_declared_one_may_be_longer() -> None:
    deadlines = Deadlines(DeadlineSettings(floor_s=2.0, first_s=100.0, factor=10.0))
    deadlines.begin("turn", "a", 0.0)
    deadlines.end("a", 0.01)
    assert deadlines.limit("turn") == 2.0
    deadlines.begin("turn", "long", 0.0, limit_s=3600.0)
    assert not deadlines.pending(3599.0)
    assert deadlines.pending(3601.0)


def test_a_stall_of_the_waiting_process_is_discounted() -> None:
    deadlines = Deadlines(DeadlineSettings(floor_s=2.0, first_s=10.0, factor=2.0))
    deadlines.begin("step", 1, 0.0)
    deadlines.discount(30.0)
    assert not deadlines.pending(39.0)
    assert deadlines.pending(41.0)


def test_a_forgotten_operation_is_never_overdue_and_leaves_no_duration() -> None:
    deadlines = Deadlines(DeadlineSettings(floor_s=1.0, first_s=10.0, factor=2.0))
    deadlines.begin("step", 1, 0.0)
    deadlines.drop(1)
    deadlines.end(1, 500.0)
    assert not deadlines.pending(1000.0)
    assert deadlines.limit("step") == 10.0


def test_a_budget_counts_restarts_per_time_not_in_all() -> None:
    budget = RestartBudget(restarts=2, window_s=10.0)
    assert all(budget.spend(20.0 * i) for i in range(50))
    assert budget.spend(1000.0)
    assert budget.spend(1001.0)
    assert not budget.spend(1002.0)
    assert budget.spend(1013.0)


def test_a_limit_that_was_exceeded_doubles_until_an_operation_ends() -> None:
    deadlines, limits = Deadlines(DeadlineSettings(floor_s=2.0, first_s=100.0, factor=10.0)), []
    for _ in range(4):
        deadlines.begin("start", 1, 0.0)
        deadlines.begin("start", 2, 0.0)
        limits.append(deadlines.limit("start"))
        assert not deadlines.pending(limits[-1])
        assert len(deadlines.pending(limits[-1] + 1.0)) == 2
        for key in (1, 2, 1):
            deadlines.exceeded(key)
    assert limits == [100.0, 200.0, 400.0, 800.0]
    deadlines.begin("start", 1, 0.0)
    deadlines.end(1, 20.0)
    assert deadlines.limit("start") == 200.0
    deadlines.begin("start", 1, 0.0)
    deadlines.exceeded(1)
    assert deadlines.limit("start") == 400.0


def test_a_loop_that_wakes_about_as_planned_was_not_stopped() -> None:
    assert stall_of(1.1, 1.0) == 0.0
    assert stall_of(3.0, 1.0) == 0.0
    assert stall_of(31.0, 1.0) == 30.0
