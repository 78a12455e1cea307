"""Rules of placement: those without a model of length, Libra's, what every policy owes, and a user's own."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_hpc.errors import UserError
from libra_hpc.policies.scheduling.dispatch import Dispatcher
from libra_hpc.policies.scheduling.registry import check_policy, make_policy, policy_names
from libra_hpc.policies.scheduling.rules.least_loaded import LeastLoaded, Sticky
from libra_hpc.policies.scheduling.rules.length_buckets import LengthBuckets
from libra_hpc.policies.scheduling.rules.libra import Libra
from libra_hpc.policies.scheduling.rules.prefix_tree import RING, PrefixNode, PrefixTree, symbol
from libra_hpc.policies.scheduling.rules.rule import eligible
from libra_hpc.protocol.env import Signal

from .boards import ERROR, OK, assert_nothing_is_kept, board_of, drive, ended, turn_of

ALL = [name for name in policy_names() if name != "cmlfq"]


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32))
def test_everything_is_served_by_open_engines_with_a_slot_and_nothing_is_kept(name: str, seed: int) -> None:
    policy = make_policy(name)
    drive(policy, board_of(("a", 1), ("b", 1), ("c", 2), ("d", 4), cap=2), seed, lost=0.02)
    assert_nothing_is_kept(policy)


def test_too_small_engines_are_not_eligible_unless_all_are() -> None:
    board = board_of(("a", 1), cap=1)
    board.up("large", 2, 200_000, 0)
    assert [e.engine for e in eligible(turn_of("t", context=150_000), board)] == ["large"]
    board.sent("large", 10)
    assert eligible(turn_of("t", context=150_000), board) == [], "it waits for the one that can hold it"
    assert [e.engine for e in eligible(turn_of("t", context=300_000), board)] == ["a"], "no engine can: it is refused"


def test_least_loaded_counts_tokens_and_sticky_turns() -> None:
    board = board_of(("a", 1), ("b", 1))
    board.sent("a", 30_000)
    for _ in range(2):
        board.sent("b", 100)
    assert LeastLoaded().route(turn_of("t"), board, 0.0).engine == "b"
    decision = Sticky().route(turn_of("t"), board, 0.0)
    assert (decision.engine, decision.reason) == ("a", "a has the fewest turns in flight: 1")
    # Ties.
    board = board_of(("a", 1), ("b", 1), ("c", 1))
    assert LeastLoaded().route(turn_of("t", at="b"), board, 0.0).engine == "b", "the prefix may be there"
    assert LeastLoaded().route(turn_of("t"), board, 0.0).engine == "a"
    rotating = Sticky()
    assert [rotating.route(turn_of("t"), board, 0.0).engine for _ in range(4)] == ["a", "b", "c", "a"]


def test_sticky_stays_until_its_engine_is_full() -> None:
    policy, board = Sticky(), board_of(("a", 1), ("b", 1), cap=2)
    board.sent("a", 90_000)
    assert policy.route(turn_of("t", at="a"), board, 0.0).engine == "a"
    board.sent("a", 10)
    assert policy.route(turn_of("t", at="a"), board, 0.0).engine == "b"
    assert policy.route(turn_of("t", at="gone"), board, 0.0).engine == "b"


def test_waiting_turns_go_first_come_first_served() -> None:
    for name in ALL:
        board = board_of(("a", 1), cap=1)
        dispatcher = Dispatcher(make_policy(name), board)
        for i, ready in enumerate((3.0, 1.0, 2.0)):
            dispatcher.ready(turn_of(f"t{i}", f"p{i}", ready=ready), 3.0)
        order = []
        while len(dispatcher):
            order += [turn.trajectory for turn, _ in dispatcher.dispatch(4.0)]
            board.answered("a", 500)
        assert order == ["t1", "t2", "t0"], name


def test_names_and_mistakes() -> None:
    assert [make_policy(name).name for name in ALL] == ALL
    with pytest.raises(
        UserError,
        match=(
            r"^rollout\.policy = 'least_load': unknown policy \(other published rules are files in bench/policies .*\);"
            r" valid: cmlfq, least_loaded, libra, sticky, path/to/file.py:ClassName \(did you mean 'least_loaded'\?"
        ),
    ):
        make_policy("least_load")


MINE = """
from libra_hpc.policies.scheduling.rules.least_loaded import LeastLoaded
class Mine(LeastLoaded):
    name = "mine"
class Costly(LeastLoaded):
    def __init__(self, price): self.price = price
class Half:
    name = "half"
    def key(self, turn, now): return 0.0
"""


def test_a_file_may_have_a_policy(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    check_policy(f"{tmp_path}/mine.py:Mine")
    assert make_policy(f"{tmp_path}/mine.py:Mine").name == "mine"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mien.py:Mine", r"no file '.*mien\.py'; valid: path/to/file\.py:ClassName"),
        ("mine.py:Mien", r"= 'Mien': .*mine\.py has no such class with name, key, .*; valid: .*mean 'Mine'"),
        ("mine.py:Half", r"= 'Half': .*mine\.py has no such class with name, key, route, finished and forget"),
        ("mine.py:Costly", r"Costly cannot be made without arguments \(.*'price'\)"),
        ("bad.py:Mine", r"bad\.py does not import \(SyntaxError: .*\)"),
        ("notes.txt:Mine", r"notes\.txt does not import \(ImportError: not a Python file\)"),
    ],
)
def test_every_mistake_in_a_file_is_one_sentence(tmp_path: Path, name: str, words: str) -> None:
    for file, text in {"mine.py": MINE, "bad.py": "class Mine(:", "notes.txt": ""}.items():
        (tmp_path / file).write_text(text)
    with pytest.raises(UserError, match=words):
        check_policy(f"{tmp_path}/{name}")


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
    policy.finished(ended("t1", "p", 10), 1.0)
    assert policy.route(turn_of("t4"), board, 1.0).engine == "b"
