"""The published rules in `bench.policies`: who is chosen on small boards and why."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.policies import FILES, POLICIES
from bench.policies.autellix import BETA, DECODE_S, Autellix, lower_bound_s
from bench.policies.length_aware import LengthAware
from bench.policies.libra import FOLLOW_S, CmlfqCost, LaMlfq
from bench.policies.stays import MORE_TURNS, CacheAware, LeastLive, RoundRobin
from bench.policies.tp_sticky import TpSticky
from libra_hpc.policies.scheduling.dispatch import Dispatcher
from libra_hpc.policies.scheduling.registry import make_policy, policy_class
from tests.policies.scheduling.boards import OK, assert_nothing_is_kept, board_of, drive, ended, turn_of

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


@pytest.mark.parametrize(("prompt", "engine"), [(5_000, "one"), (5_001, "two"), (10_001, "four"), (15_001, "eight")])
def test_length_aware_maps_the_prompt_to_a_tp_degree(prompt: int, engine: str) -> None:
    policy, board = LengthAware(), board_of(("eight", 8), ("four", 4), ("two", 2), ("one", 1))
    assert policy.route(turn_of("t", context=prompt), board, 0.0).engine == engine
    grown = turn_of("t", context=60_000, at=engine, turns=3)
    assert policy.route(grown, board, 0.0).engine == engine, "the prompt decides, not the context"


def test_length_aware_takes_the_next_degree_and_counts_live_trajectories() -> None:
    policy, board = LengthAware(), board_of(("a1", 1), ("b1", 1), ("two", 2), ("four", 4), cap=1)
    assert [policy.route(turn_of(f"t{i}"), board, 0.0).engine for i in range(2)] == ["a1", "b1"], (
        "one live trajectory each, tool time included"
    )
    board.sent("a1", 1)
    board.sent("b1", 1)
    assert policy.route(turn_of("u"), board, 0.0).engine == "two"
    board.sent("two", 1)
    assert policy.route(turn_of("v"), board, 0.0).engine == "four", "then any other"


def test_autellix_serves_the_least_served_program_first_until_the_other_has_waited_as_long() -> None:
    policy, board = Autellix(), board_of(("a", 1), cap=1)
    policy.route(turn_of("old"), board, 0.0)
    tokens = int(100.0 / DECODE_S)
    old = turn_of("old", attained=tokens, turns=1, ready=10.0)
    assert policy.key(old, 10.0) == pytest.approx(10.0 + BETA * lower_bound_s(6)), (
        "100 s of service: queue 6, from 64 s on"
    )
    assert policy.route(old, board, 10.0).priority == 6
    assert (
        policy.key(turn_of("new", ready=70.0), 70.0)
        < policy.key(old, 70.0)
        < policy.key(turn_of("newer", ready=80.0), 80.0)
    )
    assert policy.route(old, board, 80.0).priority == 0, "it has waited as long as it was served"
    served = turn_of("old", attained=tokens, turns=2, ready=90.0)
    assert policy.key(served, 90.0) == 90.0, "what it waited counts from then on"


def test_autellix_sends_long_contexts_to_their_programs_engine() -> None:
    policy, board = Autellix(), board_of(("a", 1), ("b", 1), cap=2)
    assert policy.route(turn_of("t", context=3_000), board, 0.0).engine == "a"
    board.sent("a", 3_000)
    assert policy.route(turn_of("t", context=4_000, at="a", turns=1), board, 1.0).engine == "a"
    assert policy.route(turn_of("s", context=2_048, at="a", turns=1), board, 1.0).engine == "b", (
        "short ones go where there is least to do"
    )
    board.sent("a", 3_000)
    assert policy.route(turn_of("t", context=5_000, at="a", turns=2), board, 2.0).engine == "b"
    board.answered("a", 3_000)
    assert policy.route(turn_of("t", context=6_000, at="b", turns=3), board, 3.0).engine == "b", (
        "it stays with the new one"
    )


def test_tp_sticky_fills_engines_in_proportion_to_their_gpus() -> None:
    policy, board = TpSticky(), board_of(("small", 1), ("large", 4), cap=99)
    chosen = [policy.route(turn_of(f"t{number}"), board, 0.0).engine for number in range(10)]
    assert chosen.count("large") == 8
    assert policy.route(turn_of("t0", at=chosen[0], turns=1), board, 1.0).engine == chosen[0]


def test_tp_sticky_counts_trajectories_in_tools_or_only_turns_in_flight() -> None:
    board = board_of(("a", 1), ("b", 1))
    by_life, by_turns = TpSticky(), TpSticky(live=False)
    assert [p.route(turn_of("s"), board, 0.0).engine for p in (by_life, by_turns)] == ["a", "a"]
    assert [p.route(turn_of("t"), board, 0.0).engine for p in (by_life, by_turns)] == ["b", "a"]


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


def test_cmlfq_cost_starts_small_without_samples_and_respects_the_limit() -> None:
    policy, board = CmlfqCost(max_queue_length=1), board_of(("small", 1), ("large", 8))
    assert policy.route(turn_of("s"), board, 0.0).engine == "small"
    policy.finished(ended("old", "p", 9_000, signals=(OK,), at=(100,)), 0.0)
    assert [policy.route(turn_of(name), board, 0.0).engine for name in "tu"] == ["large", "small"]


def test_cmlfq_cost_bins_the_samples_by_threshold() -> None:
    policy = CmlfqCost(thresholds=(100, 1_000))
    for name, total in (("a", 50), ("b", 70), ("c", 5_000)):
        policy.finished(ended(name, "p", total, signals=(OK,), at=(0,)), 0.0)
    bins = policy.bins(policy.tree.look_up("p", ()))
    assert [share for share, _ in bins] == pytest.approx([2 / 3, 1 / 3])
    assert [mean for _, mean in bins] == pytest.approx([60.0, 5_000.0])


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
    dispatcher.drop("t0", "p", 5.0)
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
