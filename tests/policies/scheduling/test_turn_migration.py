"""Which running turns are interrupted, and where they continue.

Costs are those of a board that has no reports yet: at TP 1 a step takes 0.02 s, twice that with 100,000 tokens of
context (a full cache), and a prefilled token 1e-4 s.
"""

from __future__ import annotations

import pytest

from libra_hpc.policies.scheduling.board import Board
from libra_hpc.policies.scheduling.cmlfq.causal_mlfq import CausalMlfq
from libra_hpc.policies.scheduling.dispatch import REBALANCE_EVERY_S, Dispatcher
from libra_hpc.policies.scheduling.protocol import TurnView
from libra_hpc.policies.scheduling.rules import LeastLoaded
from libra_hpc.policies.scheduling.turn_migration import (
    MAX_OPEN_PER_ENGINE,
    MIN_SAVED_PREFILLS,
    OpenTrajectory,
    Running,
    TurnMigration,
    choose_moves,
)

from .boards import MISS, board, finished, set_cap, stats, turn

EARNED = int(MIN_SAVED_PREFILLS * 4.0 / 0.008) + 1
"""Tokens after which 40,000 of context are worth prefilling again (4 s) for steps of 0.028 instead of 0.036 s."""


def open_trajectory(
    name: str, at: str = "a", left: float = 20_000.0, context: float = 40_000.0, generated: float = EARNED
) -> OpenTrajectory:
    return OpenTrajectory(name, turns=0, engine=at, left=left, context=context, generated=generated)


def where(found: list[TurnMigration]) -> list[tuple[str, str, str]]:
    return [(move.trajectory, move.source, move.target) for move in found]


def test_long_turns_that_share_an_engine_spread_over_idle_ones() -> None:
    made = board(("a", 1), ("b", 1), ("c", 1))
    found = choose_moves(made, [open_trajectory("x"), open_trajectory("y"), open_trajectory("z")])
    assert {(source, target) for _, source, target in where(found)} == {("a", "b"), ("a", "c")}
    assert len(found) == 2, "the last one has its engine to itself"
    assert "40000 tokens are prefilled again" in found[0].reason


def test_the_numbers_of_a_move_add_up() -> None:
    (move,) = choose_moves(board(("a", 1), ("b", 1)), [open_trajectory("x"), open_trajectory("y", left=30_000.0)])
    assert move.trajectory == "x", "both would gain the same, but the later one should not pay for the prefill"
    assert move.numbers["left_s"] == pytest.approx(20_000 * 0.036)
    assert move.numbers["saves_s"] == pytest.approx(20_000 * 0.008 - 4.0)


TWO, X, BETWEEN_TURNS = (("a", 1), ("b", 1)), open_trajectory("x"), open_trajectory("y", generated=0.0)
LONG = open_trajectory("y", left=60_000.0, generated=0.0)


@pytest.mark.parametrize(
    ("engines", "open_ones", "moves"),
    [
        ((("slow", 1), ("fast", 4)), [open_trajectory("x", at="slow")], [("x", "slow", "fast")]),
        ((("slow", 1), ("fast", 4)), [open_trajectory(name, at="fast", context=1000.0) for name in "xy"], []),
        # The batch waits for another one.
        ((*TWO, ("c", 1)), [X, open_trajectory("y"), open_trajectory("last", at="c", left=60_000.0)], []),
        # Each has its own engine.
        (TWO, [X, open_trajectory("y", at="b")], []),
        # No other engine is much lighter.
        (TWO, [X, BETWEEN_TURNS, open_trajectory("z", at="b", context=30_000.0)], []),
        # A move must have saved its prefill first.
        (TWO, [open_trajectory("x", generated=EARNED - 10), BETWEEN_TURNS], []),
        (TWO, [X, BETWEEN_TURNS], [("x", "a", "b")]),
        # None moves for the sake of others alone: 4.8 s sooner, 4 s of prefill.
        (TWO, [open_trajectory("x", left=600.0), LONG], []),
        (TWO, [open_trajectory("x", left=2000.0), LONG], [("x", "a", "b")]),
    ],
)
def test_a_turn_moves_to_a_lighter_engine_where_it_gains_enough(
    engines: tuple[tuple[str, int], ...], open_ones: list[OpenTrajectory], moves: list[tuple[str, str, str]]
) -> None:
    assert where(choose_moves(board(*engines), open_ones)) == moves


def test_only_an_engine_that_would_start_at_once_is_a_target() -> None:
    made = board(*((name, 1) for name in ("a", "closed", "queue", "full", "small")))
    made.set_open("closed", False)
    made.report("queue", stats(waiting=1))
    set_cap(made, "full", 0)
    made.engines["small"].kv_capacity = 30_000
    pair = [open_trajectory("x"), open_trajectory("y")]
    assert not choose_moves(made, pair)
    made.set_open("closed", True)
    assert [move.target for move in choose_moves(made, pair)] == ["closed"]


class Tail:
    """C-MLFQ with one long turn each of ``names`` at engine ``a`` and the others gone home."""

    def __init__(self, *names: str) -> None:
        self.policy, self.board = CausalMlfq(), board(("a", 1), ("b", 1))
        for i in range(32):
            self.policy.finished(finished(40_000 + 10 * i, f"old{i}", f"old{i}"), 0.0)
        self.dispatcher = Dispatcher(self.policy, self.board)
        self.board.set_open("b", False)
        for name in names:
            self.dispatcher.ready(turn(name, name), 0.0)
        assert [d.engine for _, d in self.dispatcher.dispatch(0.0)] == ["a"] * len(names)
        self.board.set_open("b", True)

    def rebalance(self, generated: int, now: float) -> list[TurnMigration]:
        return self.dispatcher.rebalance([Running(turn(name, name, at="a"), generated) for name in ("x", "y")], now)

    def back(self, generated: int, turns: int = 0) -> TurnView:
        self.board.answered("a", 500)
        return turn("x", "x", at="a", turns=turns, context=500 + generated, attained=generated, signals=(MISS,) * turns)


def test_an_interrupted_turn_continues_at_its_target() -> None:
    tail = Tail("x", "y")
    assert not tail.rebalance(100, 10.0), "too early"
    (move,) = tail.rebalance(30_000, 20.0)
    assert (move.trajectory, move.source, move.target) == ("x", "a", "b")
    tail.dispatcher.ready(tail.back(30_000), 21.0)
    ((view, decision),) = tail.dispatcher.dispatch(21.0)
    assert (view.trajectory, decision.engine) == ("x", "b")
    assert decision.reason == move.reason
    apart = [Running(turn("x", "x", at="b"), 0), Running(turn("y", "y", at="a"), 30_100)]
    assert not tail.dispatcher.rebalance(apart, 30.0), "each has its own engine now"


@pytest.mark.parametrize("why", ["it ended before", "its engine is gone"])
def test_a_turn_that_cannot_go_on_at_its_target_is_routed_as_any_other(why: str) -> None:
    tail = Tail("x", "y")
    assert len(tail.rebalance(30_000, 20.0)) == 1
    assert not tail.rebalance(30_000, 20.0 + REBALANCE_EVERY_S), "y is alone once x has gone"
    if gone := why == "its engine is gone":
        tail.board.down("b")
    tail.dispatcher.ready(tail.back(30_000, turns=not gone), 21.0)
    ((_, decision),) = tail.dispatcher.dispatch(21.0)
    assert not decision.reason.startswith("migrate")
    assert decision.engine in tail.board.engines


def test_evaluation_changes_nothing_that_is_learned() -> None:
    evaluated, plain = Tail("x", "y"), Tail("x", "y")
    evaluated.board.set_open("b", False)
    for i in range(6):
        assert not evaluated.rebalance(6000 * i, 10.0 * i), "nowhere to go"
    for tail in (evaluated, plain):
        tail.policy.finished(finished(50_000, "x", "x"), 100.0)
        for i in range(32):
            tail.policy.finished(finished(100, f"new{i}", f"new{i}"), 100.0)
    assert len({tail.policy.estimator.cursor("x", "task").mean for tail in (evaluated, plain)}) == 1
    views = [turn("late", "late"), turn("y", "y", at="a", turns=1, attained=4000, signals=(MISS,))]
    assert [evaluated.policy.key(view, 100.0) for view in views] == [plain.policy.key(view, 100.0) for view in views]


def test_turns_are_evaluated_in_the_tail_only_and_not_too_often() -> None:
    asked: list[float] = []

    class Asked(LeastLoaded):
        def rebalance(self, running: object, board: Board, now: float) -> list[TurnMigration]:
            asked.append(now)
            return []

    made = board(("a", 1), cap=1)
    dispatcher = Dispatcher(Asked(), made)
    for now in (1.0, 1.0 + REBALANCE_EVERY_S / 2, 1.0 + REBALANCE_EVERY_S):
        dispatcher.rebalance((), now)
    assert asked == [1.0, 1.0 + REBALANCE_EVERY_S]
    dispatcher.ready(turn("x"), 50.0)
    dispatcher.rebalance((), 50.0)
    assert len(asked) == 2, "a turn waits"
    tail = Tail("x", "y", *(f"t{i}" for i in range(2 * MAX_OPEN_PER_ENGINE - 1)))
    unread = (pytest.fail("read") for _ in range(1))
    assert not tail.dispatcher.rebalance(unread, 20.0), "more open trajectories than in a tail"
