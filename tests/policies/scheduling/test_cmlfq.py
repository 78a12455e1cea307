"""Placement and order under C-MLFQ."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_hpc.policies.scheduling.board import Board
from libra_hpc.policies.scheduling.cmlfq.causal_mlfq import AGEING_S, CausalMlfq
from libra_hpc.policies.scheduling.dispatch import Dispatcher
from libra_hpc.policies.scheduling.engine_loads import EngineLoads, EngineWork, Placed
from libra_hpc.policies.scheduling.protocol import Decision, TurnView
from libra_hpc.policies.scheduling.residency import Claim

from .boards import MISS, OK, board, finished, set_cap, stats, turn

NEW = Claim("p", 0)


def warm_policy(**totals: int) -> CausalMlfq:
    """A policy that has seen eight trajectories of each prompt."""
    policy = CausalMlfq()
    for i in range(8):
        for prompt, total in totals.items():
            policy.finished(finished(total + i, prompt, f"{prompt}{i}"), 0.0)
    return policy


def route(policy: CausalMlfq, made: Board, view: TurnView, now: float = 0.0) -> Decision:
    policy.key(view, now)
    return policy.route(view, made, now)


def send(policy: CausalMlfq, made: Board, name: str, prompt: str, **options: object) -> str:
    view = turn(name, prompt, **options)
    decision = route(policy, made, view)
    if decision.engine:
        made.sent(decision.engine, view.context_tokens)
    assert decision.reason
    return decision.engine


def load_of(loads: EngineLoads, made: Board) -> EngineWork:
    loads.sync(made)
    return loads.get("e")


def test_a_long_trajectory_gets_the_fast_engine_and_short_ones_leave_it_alone() -> None:
    policy, made = warm_policy(long=30_000, short=200), board(("slow0", 1), ("slow1", 1), ("fast", 4))
    for i in range(32):
        policy.finished(finished(200, "short", f"more{i}"), 0.0)
    assert send(policy, made, "l", "long") == "fast"
    placed = [send(policy, made, f"s{i}", "short") for i in range(6)]
    assert "fast" not in placed
    assert set(placed) == {"slow0", "slow1"}


def test_work_goes_to_a_fast_engine_that_would_idle() -> None:
    policy, made = warm_policy(p=2000), board(("slow", 1), ("fast", 4))
    placed = [send(policy, made, f"t{i}", "p", context=30_000) for i in range(24)]
    assert placed.count("fast") > placed.count("slow") > 0


def test_in_a_tool_gap_it_stays_unless_moving_pays_by_the_margin() -> None:
    policy, made = warm_policy(p=3000), board(("a", 1), ("b", 1))
    first = send(policy, made, "t", "p", context=5000)
    made.answered(first, 5000)
    assert send(policy, made, "t", "p", at=first, turns=1, context=5200, attained=100, signals=(OK,)) == first


def test_the_longest_moves_to_an_idle_fast_engine_when_little_else_is_left() -> None:
    policy, made = warm_policy(p=30_000), board(("slow", 1))
    assert send(policy, made, "t", "p", context=500) == "slow"
    made.answered("slow", 500)
    made.up("fast", 8, 100_000, 0)
    decision = route(policy, made, turn("t", "p", at="slow", turns=1, context=700, attained=200, signals=(OK,)))
    assert (decision.engine, decision.level) == ("fast", 1)
    assert decision.reason.startswith("move: fast adds ")


def test_samples_of_a_long_prompt_start_where_it_is_cached() -> None:
    policy, made = warm_policy(p=50), board(("a", 1), ("b", 1))
    others = {send(policy, made, f"{prompt}{i}", prompt, context=20_000) for prompt in ("q", "r") for i in range(4)}
    assert others == {"a", "b"}
    first = send(policy, made, "p0", "p", sample=0, context=20_000)
    decision = route(policy, made, turn("p1", "p", context=20_000))
    assert decision.engine == first
    assert decision.reason.startswith(f"start: {first} has the prompt cached for a sibling")


def test_samples_of_a_short_prompt_spread() -> None:
    policy, made = warm_policy(p=3000), board(("a", 1), ("b", 1), ("c", 1))
    assert {send(policy, made, f"t{i}", "p", context=100) for i in range(3)} == {"a", "b", "c"}


def test_a_prompt_is_not_cached_under_new_weights_nor_where_no_sibling_sits() -> None:
    for change in ("nothing", "weights", "gone", "full", "ended"):
        policy, made = warm_policy(p=50, q=3000), board(("a", 1), ("b", 1), cap=2 if change == "full" else 64)
        assert {send(policy, made, f"q{i}", "q") for i in range(2)} == {"a", "b"}
        first = send(policy, made, "t0", "p", context=20_000)
        if change == "weights":
            made.applied(first, 1)
        elif change == "gone":
            made.down(first)
        elif change == "ended":
            policy.finished(finished(200, "p", "t0"), 0.0)
        reason = route(policy, made, turn("t1", "p", context=20_000)).reason
        assert ("cached for a sibling" in reason) == (change == "nothing"), change


def test_a_context_goes_where_it_fits_and_to_anybody_when_it_fits_nowhere() -> None:
    policy, made = CausalMlfq(), board(("small", 1), kv=1000)
    made.up("large", 2, 50_000, 0)
    assert send(policy, made, "t", "p", context=20_000) == "large"
    assert send(policy, made, "u", "p", context=90_000) != "", "for the engine to refuse"


def test_all_full_waits_for_any_slot() -> None:
    policy, made = CausalMlfq(), board(("a", 1), cap=1)
    made.sent("a", 5)
    decision = route(policy, made, turn())
    assert (decision.engine, decision.wait) == ("", "slot")
    assert decision.reason.startswith("wait: ")


def test_a_full_last_engine_is_a_queue_unless_moving_pays_by_the_margin() -> None:
    policy, made = warm_policy(p=3000), board(("a", 1), ("b", 1), cap=1)
    last = send(policy, made, "t", "p", context=5000)
    made.answered(last, 5000)
    made.sent(last, 5)
    later = turn("t", "p", at=last, turns=1, context=5200, attained=100, signals=(OK,))
    decision = route(policy, made, later)
    assert (decision.engine, decision.wait) == ("", "last")
    assert decision.reason.startswith(f"wait: {last} has the prefix cached and no free slot")
    for _ in range(8):
        load = policy._loads.get(last)
        load.add(Placed(), reach=3e4, work=3e8, prefill=0.0)
    assert route(policy, made, later).engine not in ("", last)


def test_the_longest_goes_first() -> None:
    policy = warm_policy(long=20_000, short=100)
    assert policy.key(turn("l", "long"), 0.0) < policy.key(turn("s", "short"), 0.0)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0.0, 900.0), st.sampled_from(("a", "b", "new")), st.integers(0, 3), st.integers(0, 9000)),
        min_size=2,
        max_size=30,
    )
)
def test_no_turn_is_overtaken_by_a_turn_that_became_ready_later_than_the_bound(
    turns: list[tuple[float, str, int, int]],
) -> None:
    policy, made = warm_policy(a=100, b=9000), board(("e", 1), cap=1)
    queue = Dispatcher(policy, made)
    for i, (ready, prompt, done, attained) in enumerate(turns):
        queue.ready(turn(f"t{i}", prompt, sample=i, turns=done, attained=attained, ready=ready, context=1), 1000.0)
    served: list[float] = []
    while len(queue):
        ((view, _),) = queue.dispatch(1000.0)
        served.append(view.ready_at)
        made.answered("e", 1)
    assert len(served) == len(turns)
    for i, ready in enumerate(served):
        assert all(before <= ready + AGEING_S for before in served[:i])


def test_engines_of_unequal_pace_are_both_candidates() -> None:
    made, loads = board(("slow", 1), ("fast", 1)), EngineLoads()
    for name, step_s in (("slow", 0.06), ("fast", 0.02)):
        for i in range(60):
            made.report(name, stats(20 * i, 20 * i * step_s, kv=0.5))
    loads.sync(made)
    assert len(loads.alike) == 2
    chosen = {load.view.engine for alike in loads.alike if (load := loads.first_to_finish(alike, NEW, 0)) is not None}
    assert chosen == {"slow", "fast"}
    set_cap(made, "fast", 0)
    assert {loads.first_to_finish(alike, NEW, 0) for alike in loads.alike} == {None, loads.get("slow")}


def test_many_that_may_become_the_longest_weigh_more_than_one() -> None:
    load = load_of(EngineLoads(), board(("e", 1)))
    alone = load.finish_with(1000.0, 0.0, 0.0)
    residents = [Placed() for _ in range(16)]
    for one in residents:
        load.add(one, reach=1000.0, work=0.0, prefill=0.0)
    assert load.finish == pytest.approx(2.0 * alone), "the fourth root of sixteen"
    assert load.finish_with(100.0, 0.0, 0.0) == pytest.approx(load.finish, rel=1e-4), "a short one is no candidate"
    for one in residents:
        load.remove(one)
    assert (load.reach4, load.finish) == (0.0, 0.0)


def test_finishes_follow_what_steps_cost() -> None:
    loads, made = EngineLoads(), board(("e", 1), ("other", 1))
    load = load_of(loads, made)
    load.add(Placed(), reach=1000.0, work=1e6, prefill=500.0)
    before = load.finish
    made.report("other", stats(0, 0.0))
    made.report("other", stats(20, 20.0))
    loads.sync(made)
    assert load.finish == load.finish_with(0.0, 0.0, 0.0) > 2.0 * before


def test_near_the_limit_of_the_context_little_can_be_left() -> None:
    keys, left = [], []
    for limit in (0, 1_000_000, 40_000, 30_010):
        policy = warm_policy(p0=40_000, p1=40_000)
        view = turn("t", "p0", at="a", turns=1, context=30_000, attained=8000, signals=(MISS,), limit=limit)
        keys.append(policy.key(view, 0.0))
        left.append(policy.route(view, board(("a", 1)), 0.0).numbers["remaining"])
    assert left[1] == pytest.approx(left[0], rel=0.1)
    assert left[2] < 10_000
    assert left[3] < 10
    assert keys == sorted(keys), "and it does not go first as a long one"


def test_the_reason_names_what_the_estimate_consists_of() -> None:
    decision = route(warm_policy(p=3000), board(("a", 1)), turn("t", "p"))
    numbers = decision.numbers
    assert (numbers["siblings"], float(numbers["total"])) == (pytest.approx(8, rel=0.01), pytest.approx(2880, rel=0.1))
    assert decision.reason.endswith(f"a total of {numbers['total']:.0f} by its task and 8 siblings")


@pytest.mark.parametrize(
    ("first", "gone", "later"), [(("a", 1), True, {"slower": 1, "fast": 4}), (("a", 8), False, {"lower": 4})]
)
def test_engines_may_come_and_go_between_a_turn_and_the_end_of_its_trajectory(
    first: tuple[str, int], gone: bool, later: dict[str, int]
) -> None:
    policy, made = CausalMlfq(), board(first)
    assert send(policy, made, "t0", "p0") == "a"
    # The class of the only engine gets another level, before anything is routed again.
    for i, (name, tp) in enumerate(later.items()):
        made.up(name, tp, 100_000, 0)
        if gone and i == 0:
            made.down("a")
    policy.finished(finished(400, "p0", "t0"), 1.0)
    assert send(policy, made, "t1", "p1") in {*made.engines}
