"""Rules of placement: those without a model of length, what every policy owes, and a user's own."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_hpc.errors import UserError
from libra_hpc.policies.scheduling.dispatch import Dispatcher
from libra_hpc.policies.scheduling.registry import check_policy, make_policy, policy_names
from libra_hpc.policies.scheduling.rules import LeastLoaded, Sticky, eligible

from .boards import assert_nothing_is_kept, board_of, drive, turn_of

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
            r" valid: cmlfq, least_loaded, sticky, path/to/file.py:ClassName \(did you mean 'least_loaded'\?"
        ),
    ):
        make_policy("least_load")


MINE = """
from libra_hpc.policies.scheduling.rules import LeastLoaded
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
