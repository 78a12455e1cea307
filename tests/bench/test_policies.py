"""The rules in `bench.policies`: who is chosen on small boards, why, and who is admitted."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.policies import FILES, POLICIES
from bench.policies.admission import Admitted
from bench.policies.libra import CmlfqCost, LaMlfq, PrefixTree
from bench.policies.programs import Fit, KvRouter, ProgramAge, ThunderAgent
from bench.policies.stays import MORE_TURNS, CacheAware, LeastLive, RoundRobin
from libra_hpc.policies.scheduling.board import Board
from libra_hpc.policies.scheduling.dispatch import Dispatcher
from libra_hpc.policies.scheduling.registry import make_policy, policy_class
from libra_hpc.policies.scheduling.rules import LeastLoaded
from tests.policies.scheduling.boards import ERROR, OK, assert_nothing_is_kept, board_of, drive, ended, turn_of

MIXED = (("one", 1), ("uno", 1), ("two", 2), ("four", 4))


def test_the_table_names_every_policy_by_its_own_name() -> None:
    assert [policy_class(POLICIES[name]).name for name in FILES] == list(FILES)


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32))
def test_everything_is_served_and_nothing_is_kept_of_it(name: str, seed: int) -> None:
    policy = make_policy(POLICIES[name])
    drive(policy, board_of(*MIXED, cap=2), seed)
    assert_nothing_is_kept(policy)


def test_cmlfq_cost_weighs_decoding_against_the_prefill_of_a_move() -> None:
    policy, board = CmlfqCost(), board_of(("small", 1), ("large", 8))
    for number in range(4):
        policy.finished(ended(f"old{number}", "p", 5_000, signals=(OK,), at=(100,)), 0.0)
    long = policy.route(turn_of("t", at="small", turns=1, context=2_000, signals=(OK,)), board, 0.0)
    assert long.engine == "large", "4,900 tokens are worth a prefill of 2,000"
    for number in range(4):
        policy.finished(ended(f"short{number}", "q", 110, signals=(OK,), at=(100,)), 0.0)
    short = policy.route(turn_of("u", "q", at="small", turns=1, context=50_000, signals=(OK,)), board, 0.0)
    assert short.engine == "small", "10 tokens are not worth a prefill of 50,000"


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


def test_common_balancers_spread_trajectories_and_then_stay_even_where_their_engine_is_full() -> None:
    for policy, engines in ((RoundRobin(), "abab"), (LeastLive(), "abab"), (CacheAware(), "aaaa")):
        board = board_of(("a", 1), ("b", 1), cap=8)
        assert "".join(policy.route(turn_of(f"t{i}"), board, 0.0).engine for i in range(4)) == engines, policy.name
        later = turn_of("t0", at="a", turns=1)
        assert policy.route(later, board, 1.0).engine == "a"
        for _ in range(8):
            board.sent("a", 10)
        assert (policy.route(later, board, 1.0).engine, policy.route(later, board, 1.0).wait) == ("", "last")
        board.set_open("a", False)
        assert policy.route(later, board, 1.0).engine == "b"


def test_cache_aware_gives_new_prompts_to_the_engine_with_the_fewest_and_an_unbalanced_fleet_to_the_emptiest() -> None:
    policy, board = CacheAware(), board_of(("a", 1), ("b", 1), cap=200)
    found = [policy.route(turn_of(f"{p}{i}", p), board, 0.0).engine for p in "pqr" for i in range(2)]
    assert found == ["a", "a", "b", "b", "a", "a"]
    for _ in range(MORE_TURNS + 1):
        board.sent("a", 1)
    assert policy.route(turn_of("p9", "p"), board, 0.0).engine == "b"


def test_the_tree_asks_the_prompt_first_walks_as_deep_as_it_matches_and_is_rebuilt() -> None:
    tree = PrefixTree()
    tree.insert(ended("a", "p", 1000, signals=(OK, ERROR), at=(100, 400)))
    assert list(tree.look_up("p", (OK, ERROR)).recent) == [600]
    assert list(tree.look_up("p", (OK, OK)).recent) == [900], "the deepest match"
    assert list(tree.look_up("q", (OK, ERROR)).recent) == [600], "no tree of its own: the global one"
    tree.insert(ended("b", "q", 50, signals=(ERROR,), at=(10,)))
    assert list(tree.look_up("q", (OK, ERROR)).recent) == [50], "its own root, although the global tree has the path"
    tree.insert(ended("c", "p", 77))
    tree.insert(ended("d", "p", 100, signals=(OK,), at=(1,), version=5))
    assert list(tree.look_up("p", ()).recent) == [1000, 100], "of tools alone, and nothing recent is lost"


WITH_A = {"at": "a", "turns": 1}


@pytest.mark.parametrize(
    ("policy", "grown", "stays", "parked"),
    [
        (Fit(), 550, False, ""),
        (Fit(), 450, True, ""),
        (ThunderAgent(), 650, True, "t0"),
        (ThunderAgent(), 250, True, ""),
        (ProgramAge(), 650, True, ""),
    ],
)
def test_programs_lose_their_places_where_contexts_exceed_the_cache(
    policy: Fit, grown: int, stays: bool, parked: str
) -> None:
    board = board_of(("a", 1), cap=8, kv=1_000)
    for name, context in (("t0", 400), ("t1", 300)):
        policy.key(turn_of(name, context=context), 0.0)
        assert policy.route(turn_of(name, context=context), board, 0.0).engine == "a"
    policy.key(turn_of("new", context=200), 0.0)
    assert policy.route(turn_of("new", context=200), board, 0.0).wait == "room", "900 of 1,000"
    first = turn_of("t0", context=400, **WITH_A)
    later = turn_of("t1", context=grown, **WITH_A)
    policy.key(first, 1.0)
    policy.key(later, 1.0)
    assert bool(policy.route(later, board, 1.0).engine) is stays
    assert policy.route(first, board, 1.0).wait == ("room" if parked else "slot")


def test_the_kv_router_weighs_prefill_against_contexts_in_flight() -> None:
    policy, board = KvRouter(), board_of(("a", 1), ("b", 1))
    for name, sample in (("t", 0), ("s", 1)):
        assert policy.route(turn_of(name, sample=sample), board, 0.0).engine == "a", "it has the prompt"
    board.sent("a", 499)
    assert policy.route(turn_of("t", **WITH_A), board, 1.0).engine == "a"
    board.sent("a", 2)
    assert policy.route(turn_of("t", **WITH_A), board, 2.0).engine == "b"


# --- limits of admission


def sent(dispatcher: Dispatcher, now: float = 0.0) -> list[tuple[str, str]]:
    return [(turn.trajectory, decision.engine) for turn, decision in dispatcher.dispatch(now)]


def shared(share: float, engines: str, cap: int = 4) -> tuple[Board, Dispatcher]:
    """Least loaded under a share of caches of 1,000 tokens."""
    board = board_of(*((name, 1) for name in engines), cap=cap, kv=1_000)
    return board, Dispatcher(Admitted(LeastLoaded(), share=share), board)


@pytest.mark.parametrize("limit", [{"share": 0.05}, {"most": 1}])
@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**32))
def test_everything_is_served_however_little_is_admitted(limit: dict[str, float], seed: int) -> None:
    policy = Admitted(make_policy("sticky"), **limit)  # type: ignore[arg-type]
    drive(policy, board_of(("a", 1), ("b", 1), ("c", 2), cap=3), seed)
    assert_nothing_is_kept(policy)


def test_contexts_of_live_trajectories_fill_at_most_the_share() -> None:
    board, dispatcher = shared(0.6, "ab")
    for name in "stuv":
        dispatcher.ready(turn_of(name, name, context=300), 0.0)
    assert sent(dispatcher) == [("s", "a"), ("t", "b"), ("u", "a"), ("v", "b")]
    dispatcher.ready(turn_of("w", "w", context=10), 0.0)
    assert sent(dispatcher) == [], "both engines are at the share"
    board.answered("a", 300)
    assert sent(dispatcher, 1.0) == [], "the trajectory is in a tool call, its cache is still wanted"
    dispatcher.ready(turn_of("s", "s", at="a", turns=1, context=700), 1.0)
    assert sent(dispatcher, 1.0) == [("s", "a")], "its own engine admits it beyond the share"
    board.answered("b", 300)
    dispatcher.finished(ended("t", "t", 300), 2.0)
    assert sent(dispatcher, 2.0) == [("w", "b")]


def test_at_most_so_many_trajectories_live_at_an_engine() -> None:
    board = board_of(("a", 1), ("b", 1), cap=4)
    dispatcher = Dispatcher(Admitted(LeastLoaded(), most=1), board)
    for name in "stu":
        dispatcher.ready(turn_of(name, name), 0.0)
    assert sent(dispatcher) == [("s", "a"), ("t", "b")]
    board.answered("a", 500)
    dispatcher.drop("s", "s", 1.0)
    assert sent(dispatcher, 1.0) == [("u", "a")]
