"""The rules without a model of length: who is chosen on small boards and why; and what every policy owes the driver."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_hpc.errors import UserError
from libra_hpc.policies.scheduling.baselines.autellix import BETA, DECODE_S, Autellix, lower_bound_s
from libra_hpc.policies.scheduling.baselines.common import eligible
from libra_hpc.policies.scheduling.baselines.least_loaded import LeastLoaded, LeastRequests, Sticky
from libra_hpc.policies.scheduling.baselines.length_aware import LengthAware
from libra_hpc.policies.scheduling.baselines.round_robin import RoundRobin
from libra_hpc.policies.scheduling.dispatch import Dispatcher
from libra_hpc.policies.scheduling.registry import SIMULATOR_ONLY, check_policy, make_policy, policy_names

from .boards import assert_nothing_is_kept, board_of, drive, random_lengths, turn_of

ALL = [name for name in policy_names() if name != "cmlfq"]


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32))
def test_everything_is_served_and_only_open_engines_with_a_slot_are_chosen(name: str, seed: int) -> None:
    rng = random.Random(seed)
    lengths = random_lengths(rng, groups=rng.randint(1, 12))
    board = board_of(("a", 1), ("b", 1), ("c", 2), ("d", 4), cap=2)
    order = drive(make_policy(name), board, lengths, rng)
    assert sorted(order) == sorted(lengths)


@pytest.mark.parametrize("name", ALL)
def test_a_policy_holds_nothing_of_ended_trajectories(name: str) -> None:
    rng = random.Random(1)
    lengths = random_lengths(rng, groups=6)
    policy = make_policy(name)
    drive(policy, board_of(("a", 1), ("b", 4)), lengths, rng)
    assert_nothing_is_kept(policy)


def test_too_small_engines_are_not_eligible_unless_all_are() -> None:
    board = board_of(("a", 1), cap=1)
    board.up("large", 2, 200_000, 0)
    assert [e.engine for e in eligible(turn_of("t", context=150_000), board)] == ["large"]
    board.sent("large", 10)
    assert eligible(turn_of("t", context=150_000), board) == [], "it waits for the one that can hold it"
    assert [e.engine for e in eligible(turn_of("t", context=300_000), board)] == ["a"], "no engine can: it is refused"


def test_round_robin_goes_around_and_skips_the_full() -> None:
    policy, board = RoundRobin(), board_of(("a", 1), ("b", 4), ("c", 1), cap=1)
    assert [policy.route(turn_of("t", at="a"), board, 0.0).engine for _ in range(4)] == ["a", "b", "c", "a"]
    board.sent("b", 1)
    assert policy.route(turn_of("t"), board, 0.0).engine == "c"
    board.down("c")
    assert policy.route(turn_of("t"), board, 0.0).engine == "a"
    board.set_open("a", False)
    decision = policy.route(turn_of("t"), board, 0.0)
    assert (decision.engine, decision.wait, decision.reason) == (
        "",
        "slot",
        "wait: none of 2 engines has a free slot that fits",
    )


def test_least_loaded_counts_tokens_and_least_requests_turns() -> None:
    board = board_of(("a", 1), ("b", 1))
    board.sent("a", 30_000)
    for _ in range(2):
        board.sent("b", 100)
    assert LeastLoaded().route(turn_of("t"), board, 0.0).engine == "b"
    decision = LeastRequests().route(turn_of("t"), board, 0.0)
    assert (decision.engine, decision.reason) == ("a", "a has the fewest turns in flight: 1")


def test_ties() -> None:
    board = board_of(("a", 1), ("b", 1), ("c", 1))
    assert LeastLoaded().route(turn_of("t", at="b"), board, 0.0).engine == "b", "the prefix may be there"
    assert LeastLoaded().route(turn_of("t"), board, 0.0).engine == "a"
    rotating = LeastRequests()
    assert [rotating.route(turn_of("t", at="b"), board, 0.0).engine for _ in range(4)] == ["a", "b", "c", "a"]


def test_sticky_stays_until_its_engine_is_full() -> None:
    policy, board = Sticky(), board_of(("a", 1), ("b", 1), cap=2)
    board.sent("a", 90_000)
    assert policy.route(turn_of("t", at="a"), board, 0.0).engine == "a"
    board.sent("a", 10)
    assert policy.route(turn_of("t", at="a"), board, 0.0).engine == "b"
    assert policy.route(turn_of("t", at="gone"), board, 0.0).engine == "b"


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


def test_waiting_turns_go_first_come_first_served() -> None:
    for name in ("round_robin", "least_loaded", "least_requests", "sticky", "length_aware", "libra"):
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
    assert not set(SIMULATOR_ONLY) & set(policy_names())
    for name in ALL:
        assert make_policy(name).name == name
    with pytest.raises(
        UserError,
        match=(
            r"^rollout\.policy = 'least_load': unknown policy; valid: .*least_loaded.* \(did you mean"
            r" 'least_loaded'\?\)\.$"
        ),
    ):
        make_policy("least_load")
    with pytest.raises(
        UserError,
        match=(
            r"^rollout\.policy = 'oracle': this policy runs in the simulator only: it knows the future; valid: autellix"
        ),
    ):
        check_policy("oracle")
