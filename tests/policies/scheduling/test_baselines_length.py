"""The rules with a model of length: Libra's C-MLFQ, LA-MLFQ and Seer."""

from __future__ import annotations

import pytest

from libra_hpc.policies.scheduling.baselines.la_mlfq import FOLLOW_S, LaMlfq
from libra_hpc.policies.scheduling.baselines.length_buckets import LengthBuckets
from libra_hpc.policies.scheduling.baselines.libra import Libra
from libra_hpc.policies.scheduling.baselines.prefix_tree import RING, PrefixNode, PrefixTree, symbol
from libra_hpc.policies.scheduling.baselines.seer import Seer
from libra_hpc.policies.scheduling.dispatch import Dispatcher
from libra_hpc.protocol.env import Signal

from .boards import ERROR, OK, board_of, ended, turn_of

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
    again = buckets.choose(1, turn_of("t9"), board)
    assert again is not None
    assert again.engine == "two"


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
    gap = turn_of("t", at="one", turns=1, context=600, attained=10, signals=(OK,))
    moved = policy.route(gap, board, 1.0)
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
    policy.finished(ended("t1", "p", 10), 1.0)
    assert policy.route(turn_of("t4"), board, 1.0).engine == "b"


def test_la_mlfq_siblings_follow_their_scout() -> None:
    policy, board = LaMlfq(), board_of(*MIXED)
    dispatcher = Dispatcher(policy, board)
    for i in range(3):
        dispatcher.ready(turn_of(f"t{i}", "p"), 0.0)
    dispatcher.ready(turn_of("other", "q", ready=1.0), 1.0)
    sent = dispatcher.dispatch(1.0)
    assert [(turn.trajectory, d.level) for turn, d in sent] == [("t0", 0), ("other", 0)]
    dispatcher.finished(ended("t0", "p", 9_000), 20.0)
    sent = dispatcher.dispatch(20.0)
    assert [(turn.trajectory, d.engine) for turn, d in sent] == [("t1", "two"), ("t2", "two")]


def test_la_mlfq_patience_and_lost_scouts() -> None:
    policy, board = LaMlfq(), board_of(*MIXED)
    dispatcher = Dispatcher(policy, board)
    for i in range(3):
        dispatcher.ready(turn_of(f"t{i}", "p"), 0.0)
    assert [turn.trajectory for turn, _ in dispatcher.dispatch(0.0)] == ["t0"]
    assert dispatcher.dispatch(FOLLOW_S - 1.0) == []
    dispatcher.forget("t0", "p", 5.0)
    assert [turn.trajectory for turn, _ in dispatcher.dispatch(5.0)] == ["t1"], "a new scout"
    assert [(turn.trajectory, d.level) for turn, d in dispatcher.dispatch(FOLLOW_S)] == [("t2", 0)], (
        "a minute is enough"
    )


def test_la_mlfq_climbs_by_attained_service_and_forgets_old_history() -> None:
    policy, board = LaMlfq(), board_of(*MIXED)
    assert policy.route(turn_of("t"), board, 0.0).engine == "one"
    stays = policy.route(turn_of("t", at="one", turns=1, attained=4_000), board, 1.0)
    assert stays.reason == "stay in bucket 0 on one"
    assert policy.route(turn_of("t", at="one", turns=2, attained=4_001), board, 2.0).engine == "two"
    policy.finished(ended("t", "p", 4_001, version=0), 3.0)
    policy.finished(ended("x", "q", 10, version=5), 4.0)
    assert policy.route(turn_of("s"), board, 5.0).level == 1
    policy.finished(ended("y", "q", 10, version=6), 6.0)
    assert policy.route(turn_of("r", "p"), board, 7.0).level == 0, "history of six versions ago: a scout again"


def test_seer_probes_first_then_longest_groups_first() -> None:
    policy, board = Seer(), board_of(("a", 1), cap=1)
    dispatcher = Dispatcher(policy, board)
    for name in ("short/0", "short/1", "long/0", "long/1", "new/0", "new/1"):
        dispatcher.ready(turn_of(name, name.split("/")[0]), 0.0)
    order = []
    for _ in range(6):
        ((turn, decision),) = dispatcher.dispatch(1.0)
        order.append(turn.trajectory)
        board.answered("a", 500)
        if turn.trajectory in ("short/0", "long/0"):
            dispatcher.finished(
                ended(turn.trajectory, turn.prompt_id, {"short/0": 100, "long/0": 9_000}[turn.trajectory]), 1.0
            )
    assert order == ["short/0", "long/0", "new/0", "new/1", "long/1", "short/1"], (
        "probes; the unknown group; the long one; the short one"
    )
    assert decision.reason == "group of 100 tokens: a has the fewest KV tokens in flight"


def test_seer_probes_shortest_first_and_stays_unless_kv_is_pooled() -> None:
    policy, board = Seer(), board_of(("a", 1), ("b", 1))
    young, old = turn_of("x", "p", attained=10), turn_of("y", "q", attained=500)
    assert policy.key(young, 0.0) < policy.key(old, 0.0) < policy.key(turn_of("z", "p"), 0.0)
    board.sent("a", 90_000)
    gap = turn_of("x", "p", at="a", turns=1)
    assert policy.route(gap, board, 0.0).engine == "a"
    assert Seer(pooled=True).route(gap, board, 0.0).engine == "b"
