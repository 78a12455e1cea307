"""Libra's rules in `bench.policies.libra`: buckets, prefix tree, and when a trajectory moves."""

from __future__ import annotations

import pytest

from bench.policies.libra import RING, LengthBuckets, Libra, PrefixNode, PrefixTree, symbol
from libra_hpc.protocol.env import Signal
from tests.policies.scheduling.boards import ERROR, OK, board_of, ended, turn_of

MIXED = (("one", 1), ("uno", 1), ("two", 2), ("four", 4))


@pytest.mark.parametrize(("length", "level"), [(0, 0), (4_000, 0), (4_001, 1), (12_000, 1), (12_001, 2), (90_000, 2)])
def test_a_length_belongs_to_the_first_threshold_not_below_it(length: int, level: int) -> None:
    assert LengthBuckets().level(length, 3) == level
    assert LengthBuckets().level(length, 2) == min(level, 1)
    assert LengthBuckets().level(length, 1) == 0


def test_buckets_fill_their_class_then_the_others_then_ignore_the_limit() -> None:
    buckets, board = LengthBuckets(max_queue_length=1), board_of(*MIXED)
    chosen = [buckets.choose(1, turn_of(f"t{i}"), board) for i in range(6)]
    assert [e.engine for e in chosen if e] == ["two", "one", "uno", "four", "one", "uno"]
    buckets.live.drop("t0")
    assert buckets.choose(1, turn_of("t9"), board).engine == "two"


def test_symbols_carry_tool_size_and_status() -> None:
    assert [symbol(Signal("t", o, 1, 0.0))[2] for o in ("ok", "error", "timeout", "miss")] == [
        "success",
        "failure",
        "timeout",
        "success",
    ]
    assert [symbol(Signal("t", "ok", n, 0.0))[1] for n in (500, 501, 5_000, 5_001)] == [0, 1, 1, 2]


def test_a_node_has_the_mean_of_all_and_the_p90_of_the_last() -> None:
    node = PrefixNode()
    for value in (10, 20, 30, 40, 50, 60, 70, 80, 90, 100):
        node.add(value)
    assert (node.mean, node.p90) == (55.0, 90)
    for _ in range(RING):
        node.add(7)
    assert node.p90 == 7
    assert node.mean == pytest.approx((550 + 7 * RING) / (10 + RING)), "the mean includes all samples"


def test_the_tree_asks_the_prompt_first_and_walks_as_deep_as_it_matches() -> None:
    tree = PrefixTree()
    tree.insert(ended("a", "p", 1000, signals=(OK, ERROR), at=(100, 400)))
    assert tree.look_up("p", (OK, ERROR)).mean == 600
    assert tree.look_up("p", (OK, OK)).mean == 900, "the deepest match"
    assert tree.look_up("q", (OK, ERROR)).mean == 600, "no tree of its own: the global one"
    tree.insert(ended("b", "q", 50, signals=(ERROR,), at=(10,)))
    assert tree.look_up("q", (OK, ERROR)).mean == 50, "its own root, although the global tree has the path"
    tree.insert(ended("c", "p", 77))
    assert tree.look_up("p", ()).count == 1, "a trajectory without tools adds no sample"


def test_the_tree_is_rebuilt_from_recent_trajectories() -> None:
    tree = PrefixTree()
    for version in (0, 4, 5):
        tree.insert(ended(f"t{version}", "p", 100 + version, signals=(OK,), at=(1,), version=version))
    assert tree.look_up("p", ()).count == 3, "rebuilding loses nothing that is recent"


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


def test_libra_moves_down_too_and_again_whatever_it_costs() -> None:
    policy, board = libra_with([20_000] * 5), board_of(*MIXED)
    policy.route(turn_of("t"), board, 0.0)
    policy.route(turn_of("t", at="one", turns=1, attained=10, signals=(OK,)), board, 1.0)
    for i in range(60):
        policy.finished(ended(f"new{i}", "p", 130, signals=(OK, ERROR), at=(10, 30)), 2.0)
    back = policy.route(turn_of("t", at="four", turns=2, context=90_000, attained=30, signals=(OK, ERROR)), board, 3.0)
    assert (back.engine, back.level) == ("one", 0)


def test_libra_counts_a_trajectory_until_it_ends() -> None:
    policy, board = Libra(), board_of(("a", 1), ("b", 1))
    assert [policy.route(turn_of(f"t{i}"), board, 0.0).engine for i in range(3)] == ["a", "b", "a"]
    for name in ("t0", "t2"):
        policy.finished(ended(name, "p", 10), 1.0)
    assert policy.route(turn_of("t4"), board, 1.0).engine == "a"
