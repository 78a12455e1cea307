"""Libra's rules in `bench.policies.libra`: when a trajectory moves."""

from __future__ import annotations

from bench.policies.libra import Libra
from tests.policies.scheduling.boards import OK, board_of, ended, turn_of

MIXED = (("one", 1), ("uno", 1), ("two", 2), ("four", 4))


def libra_with(remaining: list[int]) -> Libra:
    """A policy that has seen these remaining lengths after one ok."""
    policy = Libra()
    for i, left in enumerate(remaining):
        policy.finished(ended(f"old{i}", "p", 10 + left, signals=(OK,), at=(10,)), 0.0)
    return policy


def test_libra_starts_low_and_moves_when_mean_and_p90_agree() -> None:
    policy, board = libra_with([20_000] * 5), board_of(*MIXED)
    first = policy.route(turn_of("t"), board, 0.0)
    assert (first.engine, first.level) == ("one", 0), "the shortest bucket, although the prompt is known to be long"
    moved = policy.route(turn_of("t", at="one", turns=1, context=600, attained=10, signals=(OK,)), board, 1.0)
    assert (moved.engine, moved.level) == ("four", 2)
    assert moved.reason == "bucket 2, least connections four: mean 20000 and p90 20000 of the remaining tokens agree"


def test_libra_stays_when_they_disagree_or_nothing_is_known() -> None:
    board = board_of(*MIXED)
    for policy, reason in (
        (libra_with([100] * 8 + [30_000] * 2), "mean 6080 and p90 30000 of the remaining tokens disagree"),
        (libra_with([]), "nothing is known"),
        (libra_with([100] * 5), "mean 100 and p90 100 of the remaining tokens agree"),
    ):
        policy.route(turn_of("s"), board, 0.0)
        assert policy.route(turn_of("t"), board, 0.0).engine == "uno", "least connections"
        gap = turn_of("t", at="uno", turns=1, context=600, attained=10, signals=(OK,))
        assert policy.route(gap, board, 1.0).reason == f"stay on uno: {reason}"
