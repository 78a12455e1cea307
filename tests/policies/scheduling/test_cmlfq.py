"""Placement and order under C-MLFQ."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_hpc.policies.scheduling.board import Board
from libra_hpc.policies.scheduling.causal_mlfq import AGEING_S, CausalMlfq
from libra_hpc.policies.scheduling.dispatch import Dispatcher
from libra_hpc.policies.scheduling.protocol import Decision, TurnView

from .boards import OK, board, finished, stats, turn


def route(policy: CausalMlfq, made: Board, view: TurnView, now: float = 0.0) -> Decision:
    policy.key(view, now)
    return policy.route(view, made, now)


def send(policy: CausalMlfq, made: Board, name: str, prompt: str = "", **options: object) -> str:
    view = turn(name, prompt or name, **options)
    decision = route(policy, made, view)
    if decision.engine:
        made.sent(decision.engine, view.context_tokens)
    assert decision.reason
    return decision.engine


def later(name: str, at: str, context: int = 5_200) -> TurnView:
    return turn(name, name, at=at, turns=1, context=context, attained=100, signals=(OK,))


def fill(policy: CausalMlfq, made: Board, tokens: int) -> None:
    """Let a trajectory of so many tokens live at engine ``a``, while no other engine takes turns."""
    others = [name for name in made.engines if name != "a"]
    for name in others:
        made.set_open(name, False)
    assert send(policy, made, f"fill {tokens}", context=tokens) == "a"
    for name in others:
        made.set_open(name, True)


def test_contexts_spread_by_what_engines_hold_and_by_what_a_token_costs() -> None:
    policy, made = CausalMlfq(), board(("slow", 1), ("fast", 4))
    placed = [send(policy, made, f"t{i}", context=3_000) for i in range(24)]
    assert placed[0] == "fast"
    assert placed.count("fast") > 2 * placed.count("slow") > 0


def test_an_engine_that_is_measured_as_slow_gets_less() -> None:
    policy, made = CausalMlfq(), board(("slow", 1), ("a", 1), ("b", 1))
    for i in range(60):
        for name, step_s in (("slow", 0.06), ("a", 0.02), ("b", 0.02)):
            made.report(name, stats(20 * i, 20 * i * step_s, kv=0.5))
    placed = [send(policy, made, f"t{i}", context=3_000) for i in range(24)]
    assert placed.count("a") == placed.count("b") > 2 * placed.count("slow")


def test_in_a_tool_gap_it_stays_unless_moving_pays_by_the_margin() -> None:
    policy, made = CausalMlfq(), board(("a", 1), ("b", 1))
    first = send(policy, made, "t", context=5_000)
    made.answered(first, 5_000)
    made.set_open("b" if first == "a" else "a", True)
    assert route(policy, made, later("t", first)).reason.startswith(f"stay: {first} has the context cached")
    fill(policy, made, 500)
    assert route(policy, made, later("t", first)).engine == first
    fill(policy, made, 9_000)
    decision = route(policy, made, later("t", first))
    assert (decision.engine, decision.reason.split(" adds")[0]) == ("b", "move: b")


@pytest.mark.parametrize("gone", ["down", "closed", "replaced"])
def test_a_trajectory_whose_engine_is_gone_starts_again(gone: str) -> None:
    policy, made = CausalMlfq(), board(("a", 1), ("b", 1))
    assert send(policy, made, "t", context=5_000) == "a"
    if gone == "closed":
        made.set_open("a", False)
    else:
        made.down("a")
    if gone == "replaced":
        made.up("a", 1, 100_000, 0)
    decision = route(policy, made, later("t", "a"))
    assert (decision.engine, decision.reason.split(" holds")[0]) == ("b", "start: b")
    policy.finished(finished(400, "t", "t"), 1.0)
    assert send(policy, made, "t1") in {*made.engines}


def test_a_context_goes_where_it_fits_and_to_anybody_when_it_fits_nowhere() -> None:
    policy, made = CausalMlfq(), board(("small", 1), kv=1000)
    made.up("large", 2, 50_000, 0)
    assert send(policy, made, "t", context=20_000) == "large"
    policy = CausalMlfq()
    assert send(policy, made, "u", context=90_000) != "", "for the engine to refuse"


def test_all_full_waits_for_any_slot() -> None:
    policy, made = CausalMlfq(), board(("a", 1), cap=1)
    made.sent("a", 5)
    decision = route(policy, made, turn())
    assert (decision.engine, decision.wait) == ("", "slot")
    assert decision.reason == "wait: no engine has a free slot"


def test_a_full_last_engine_is_a_queue_unless_moving_pays_by_the_margin() -> None:
    policy, made = CausalMlfq(), board(("a", 1), ("b", 1), cap=2)
    assert send(policy, made, "t", context=5_000) == "a"
    fill(policy, made, 1_000)
    decision = route(policy, made, later("t", "a"))
    assert (decision.engine, decision.wait) == ("", "last")
    assert decision.reason == "wait: a has the context cached and no free slot"
    made.answered("a", 1_000)
    fill(policy, made, 20_000)
    assert route(policy, made, later("t", "a")).engine == "b"


def test_the_longest_goes_on_first_and_the_shortest_starts_first() -> None:
    policy = CausalMlfq()
    contexts = (1_000, 10_000, 100_000)
    keys = [policy.key(turn(f"n{context}", context=context), 0.0) for context in contexts]
    keys += [policy.key(later(f"l{context}", "a", context), 0.0) for context in contexts]
    assert sorted(keys) == [*reversed(keys[3:]), *keys[:3]]


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0.0, 900.0), st.integers(0, 3), st.integers(1, 90_000)), min_size=2, max_size=30))
def test_no_turn_is_overtaken_by_a_turn_that_became_ready_later_than_the_bound(
    turns: list[tuple[float, int, int]],
) -> None:
    policy, made = CausalMlfq(), board(("e", 1), cap=1, kv=10_000_000)
    queue = Dispatcher(policy, made)
    for i, (ready, done, context) in enumerate(turns):
        queue.ready(turn(f"t{i}", f"p{i}", turns=done, ready=ready, context=context), 1000.0)
    served: list[float] = []
    while len(queue):
        ((view, _),) = queue.dispatch(1000.0)
        served.append(view.ready_at)
        made.answered("e", 1)
    assert len(served) == len(turns)
    for i, ready in enumerate(served):
        assert all(before <= ready + AGEING_S for before in served[:i])
