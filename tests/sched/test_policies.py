"""Where turns go, when they wait, and that nobody starves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_hpc.errors import UserError
from libra_hpc.sched.buckets import LOAD_SHARE, TP_EXPONENT, buckets, tp_classes
from libra_hpc.sched.cmlfq import AGEING_S, MOVE_MARGIN, CausalMlfq
from libra_hpc.sched.protocol import EngineView, Policy
from libra_hpc.sched.registry import make_policy, policy_names
from tests.sched.views import MISS, OK, engine, finished, turn

SLOW, FAST = engine("slow", 1, decode=0.02, prefill=1e-4), engine("fast", 4, decode=0.008, prefill=5e-5)


@pytest.fixture(params=policy_names())
def policy(request: pytest.FixtureRequest) -> Policy:
    return make_policy(request.param, seed=1)


def test_an_unknown_policy_names_the_valid_ones() -> None:
    assert policy_names() == ("cmlfq", "least_loaded")
    with pytest.raises(UserError, match=r"rollout\.policy = 'cmlfk': unknown scheduling policy; valid: cmlfq, least_loaded \(did you mean 'cmlfq'\?\)\."):
        make_policy("cmlfk")


def test_everyone_waits_only_when_all_are_full(policy: Policy) -> None:
    full = [engine("a", inflight=4, tokens=10, most=4), engine("b", inflight=4, tokens=10, most=4)]
    decision = policy.route(turn(), full, 0.0)
    assert decision.engine == ""
    assert decision.reason.startswith("wait: ")
    assert policy.route(turn(), [*full, engine("c", 8, 3, 90_000, most=4)], 0.0).engine == "c"
    assert policy.route(turn(), [], 0.0).engine == ""


def test_load_is_kv_tokens_not_turns(policy: Policy) -> None:
    views = [engine("one-long", inflight=1, tokens=32_000), engine("ten-short", inflight=10, tokens=5_000)]
    assert policy.route(turn(), views, 0.0).engine == "ten-short"


def test_an_idle_pool_keeps_the_prefix(policy: Policy) -> None:
    views = [engine("a"), engine("b"), engine("c")]
    assert policy.route(turn(at="b", turns=1, signals=(OK,)), views, 0.0).engine == "b"


def test_least_loaded_ties() -> None:
    policy = make_policy("least_loaded")
    assert policy.route(turn(at="a"), [engine("a", inflight=2, tokens=9), engine("b", inflight=1, tokens=9)], 0.0).engine == "b"
    assert policy.route(turn(at="b"), [engine("a"), engine("b")], 0.0).engine == "b"
    assert policy.route(turn(), [engine("b"), engine("a")], 0.0).engine == "a"
    assert policy.order([turn("x", waited=1.0), turn("y", waited=3.0), turn("z", waited=2.0)], 9.0) == [1, 2, 0]


def test_classes_and_their_costs() -> None:
    views = [engine("a", 4, decode=0.01), engine("b", 1, tokens=300), engine("c", 1, tokens=100), engine("d", 4, decode=0.03)]
    assert tp_classes(views) == [1, 4]
    made = buckets(views)
    assert [(b.tp, b.level, b.engines) for b in made.values()] == [(1, 0, 2), (4, 1, 2)]
    assert made[4].decode_s == pytest.approx(0.02)
    assert made[1].decode_s == pytest.approx(0.02 * 4**TP_EXPONENT), "not measured: scaled from the class that is"
    heavy, light = made[1].decode_cost(views[1], 10), made[1].decode_cost(views[2], 10)
    assert heavy / light == pytest.approx((1 + LOAD_SHARE / 2) / (1 - LOAD_SHARE / 2))
    small = engine("e", 1, tokens=150, kv=100)
    assert made[1].decode_cost(small, 50) == pytest.approx(2.0 * made[1].decode_cost(engine("e", 1, tokens=150), 50)), "twice the capacity: half the speed"


def test_a_new_prompt_starts_low_and_a_long_known_one_high() -> None:
    policy = CausalMlfq()
    first = policy.route(turn("a", "new"), [FAST, SLOW], 0.0)
    assert (first.engine, first.level) == ("slow", 0)
    assert "starts low" in first.reason
    policy.finished(finished(5000, "long"), 0.0)
    known = policy.route(turn("b", "long"), [FAST, SLOW], 0.0)
    assert (known.engine, known.level) == ("fast", 1)
    assert known.numbers["saving_s"] > 0.0


def test_in_a_tool_gap_it_moves_only_when_the_saving_beats_the_prefill_by_the_margin() -> None:
    # Context 20,000: moving prefills 20,000 tokens again = 1.0 s; staying 5 tokens.  Decoding saves 0.012 s a token.
    for remaining, expected in ((60, "slow"), (110, "slow"), (160, "fast")):
        policy = CausalMlfq()
        policy.finished(finished(remaining, "p"), 0.0)
        assert policy.route(turn("t", "p", context=100), [SLOW], 0.0).engine == "slow"
        for _ in range(200):
            policy.finished(finished(10 + remaining, "p", signals=(OK,), at=(10,)), 0.0)
        gap = turn("t", "p", at="slow", turns=1, context=20_000, attained=10, signals=(OK,))
        decision = policy.route(gap, [SLOW, FAST], 1.0)
        assert decision.engine == expected
        assert decision.numbers["remaining"] == pytest.approx(remaining, rel=0.05)
        pays = decision.numbers["saving_s"] > MOVE_MARGIN * decision.numbers["move_s"]
        assert pays == (expected == "fast")
        assert decision.reason.startswith("move: " if pays else "stay: ")
        assert f"costs {decision.numbers['move_s']:.2f} s, saves {decision.numbers['saving_s']:.2f} s" in decision.reason


def test_it_also_moves_down_when_the_fast_class_is_crowded() -> None:
    policy = CausalMlfq()
    policy.finished(finished(2000, "p"), 0.0)
    assert policy.route(turn("t", "p"), [SLOW, FAST], 0.0).engine == "fast"
    crowded = engine("fast", 4, 60, 390_000, decode=0.01, prefill=5e-5)
    assert policy.route(turn("t", "p", at="fast", turns=1, signals=(OK,)), [SLOW, crowded], 1.0).engine == "slow"


def test_a_weight_swap_empties_the_prefix_cache() -> None:
    policy = CausalMlfq()
    policy.finished(finished(100, "p"), 0.0)
    a, b = engine("a", decode=0.01, prefill=1e-3, tokens=1000), engine("b", decode=0.01, prefill=1e-3)
    assert policy.route(turn("t", "p"), [a], 0.0).engine == "a"
    gap = turn("t", "p", at="a", turns=1, context=5000, signals=(OK,))
    assert policy.route(gap, [a, b], 1.0).engine == "a", "a saved prefill of 5 s beats the load"
    swapped = engine("a", decode=0.01, prefill=1e-3, tokens=1000, version=1)
    assert policy.route(gap, [swapped, b], 2.0).engine == "b"


def test_a_class_that_left_is_replaced_by_the_nearest() -> None:
    policy = CausalMlfq()
    policy.finished(finished(5000, "p"), 0.0)
    assert policy.route(turn("t", "p"), [SLOW, FAST], 0.0).engine == "fast"
    eight = engine("eight", 8, decode=0.006, prefill=4e-5)
    decision = policy.route(turn("t", "p", at="fast", turns=1, signals=(MISS,)), [SLOW, eight], 1.0)
    assert (decision.engine, decision.level) == ("eight", 1)


def test_a_context_too_long_for_an_engine_goes_elsewhere_or_waits() -> None:
    policy = CausalMlfq()
    small, large = engine("small", kv=1000), engine("large", inflight=1, tokens=50_000)
    assert policy.route(turn(context=5000), [small, large], 0.0).engine == "large"
    full = engine("large", inflight=1, tokens=50_000, most=1)
    assert policy.route(turn(context=5000), [small, full], 0.0).engine == ""
    assert policy.route(turn(context=500_000), [small, full], 0.0).engine == "small", "nobody can hold it: the engine refuses it"


def test_long_trajectories_go_first_within_the_bound() -> None:
    policy = CausalMlfq()
    for _ in range(8):
        policy.finished(finished(20, "short"), 0.0)
        policy.finished(finished(5000, "long"), 0.0)
    waiting = [turn("s", "short", waited=1.0), turn("l", "long", waited=0.5), turn("old", "short", waited=0.5 + AGEING_S)]
    assert policy.order(waiting, 10.0) == [2, 1, 0]
    by_priority = sorted(range(3), key=lambda i: policy.route(waiting[i], [SLOW], 10.0).priority)
    assert by_priority == [2, 1, 0]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0.0, 30.0), st.integers(0, 5)), max_size=20), st.lists(st.tuples(st.integers(1, 9000), st.integers(0, 5)), max_size=20))
def test_nobody_is_overtaken_by_a_turn_that_became_ready_later_than_the_bound(waits: list[tuple[float, int]], past: list[tuple[int, int]]) -> None:
    policy = CausalMlfq()
    for total, prompt in past:
        policy.finished(finished(total, str(prompt)), 0.0)
    waiting = [turn(f"t{i}", str(prompt), waited=waited) for i, (waited, prompt) in enumerate(waits)]
    order = policy.order(waiting, 100.0)
    assert sorted(order) == list(range(len(waits)))
    for place, i in enumerate(order):
        assert all(waits[j][0] >= waits[i][0] - AGEING_S for j in order[:place])


views = st.builds(
    engine, st.sampled_from("abcdef"), st.sampled_from([1, 2, 4, 8]), st.integers(0, 4), st.integers(0, 200_000), most=st.integers(1, 4),
    version=st.integers(0, 2), decode=st.sampled_from([0.0, 0.01]), prefill=st.sampled_from([0.0, 1e-4]),
)  # fmt: skip


@settings(deadline=None)
@given(st.sampled_from(policy_names()), st.lists(views, max_size=6, unique_by=lambda e: e.engine), st.integers(0, 3), st.integers(1, 300_000))
def test_a_decision_is_always_admissible_and_explained(name: str, pool: list[EngineView], turns: int, context: int) -> None:
    policy = make_policy(name)
    policy.finished(finished(900, "p"), 0.0)
    decision = policy.route(turn("t", "p", at="a" if turns else "", turns=turns, context=context, signals=(OK,) * turns), pool, 5.0)
    if decision.engine:
        chosen = next(e for e in pool if e.engine == decision.engine)
        assert chosen.inflight < chosen.max_inflight
        assert tp_classes(pool)[decision.level] == chosen.tp
    else:
        assert all(e.inflight >= e.max_inflight or e.kv_capacity < context for e in pool)
    assert decision.reason
    assert all(isinstance(v, float) for v in decision.numbers.values())


def test_finished_and_abandoned_trajectories_are_forgotten() -> None:
    policy = CausalMlfq()
    for i in range(100):
        policy.route(turn(f"t{i}"), [SLOW], 0.0)
        policy.finished(finished(10, name=f"t{i}"), 0.0)
    assert not policy._tracked
