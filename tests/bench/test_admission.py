"""Admission: engines that do not admit a trajectory are closed to it, whatever the policy, and no turn is lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from bench.policies.admission import Admission, Admitted, KvShare
from bench.policies.episode_cap import HARDER_CUT, POLL_S, EpisodeCap
from libra_hpc.policies.scheduling.board import Board
from libra_hpc.policies.scheduling.dispatch import Dispatcher
from libra_hpc.policies.scheduling.registry import make_policy, policy_names
from libra_hpc.policies.scheduling.rules import LeastLoaded
from libra_hpc.protocol.engine_state import EngineStats
from tests.policies.scheduling.boards import assert_nothing_is_kept, board_of, drive, ended, turn_of


def sent(dispatcher: Dispatcher, now: float = 0.0) -> list[tuple[str, str]]:
    return [(turn.trajectory, decision.engine) for turn, decision in dispatcher.dispatch(now)]


def rules() -> list[Admission]:
    return [KvShare(0.05), EpisodeCap(50_000, floor=1)]


@pytest.mark.parametrize("name", policy_names())
@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0, 1]))
def test_everything_is_served_under_every_policy_however_little_is_admitted(name: str, seed: int, rule: int) -> None:
    admission = rules()[rule]
    drive(Admitted(make_policy(name), admission), board_of(("a", 1), ("b", 1), ("c", 2), cap=3), seed)
    assert_nothing_is_kept(admission)


def shared(share: float, engines: str, cap: int = 4) -> tuple[Board, Dispatcher]:
    """Least loaded under a share of caches of 1,000 tokens."""
    board = board_of(*((name, 1) for name in engines), cap=cap, kv=1_000)
    return board, Dispatcher(Admitted(LeastLoaded(), KvShare(share)), board)


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


def test_a_trajectory_larger_than_the_share_runs_alone() -> None:
    board, dispatcher = shared(0.5, "a")
    dispatcher.ready(turn_of("long", "l", context=900), 0.0)
    dispatcher.ready(turn_of("short", "s", context=100), 0.0)
    assert sent(dispatcher) == [("long", "a")]
    board.answered("a", 900)
    dispatcher.drop("long", "l", 1.0)
    assert sent(dispatcher, 1.0) == [("short", "a")]


def test_turns_set_aside_do_not_keep_admitted_ones_waiting() -> None:
    board, dispatcher = shared(0.5, "a", cap=64)
    dispatcher.ready(turn_of("s", "s", context=500), 0.0)
    assert sent(dispatcher) == [("s", "a")]
    for number in range(200):
        dispatcher.ready(turn_of(f"new{number}", "p", context=500), 0.0)
    board.answered("a", 500)
    dispatcher.ready(turn_of("s", "s", at="a", turns=1, context=600, ready=1.0), 1.0)
    assert sent(dispatcher, 1.0) == [("s", "a")], "200 earlier turns are not admitted"


def test_a_lost_engine_holds_no_trajectories() -> None:
    board, dispatcher = shared(0.5, "ab")
    dispatcher.ready(turn_of("s", "s", context=500), 0.0)
    assert sent(dispatcher) == [("s", "a")]
    board.down("a")
    dispatcher.ready(turn_of("s", "s", context=500), 1.0)
    assert sent(dispatcher, 1.0) == [("s", "b")]


def capped(cap: EpisodeCap, board: Board, trajectories: int) -> int:
    """Start trajectories while they are admitted; returns how many were."""
    for number in range(trajectories):
        turn = turn_of(f"t{number}", "p", context=1_000)
        if not cap.admits(turn, board.engines["a"]):
            return number
        cap.sent(turn, "a")
    return trajectories


def test_the_episode_cap_is_capacity_over_cost_and_is_cut_once_per_overload() -> None:
    board = board_of(("a", 1), kv=100_000)
    cap = EpisodeCap(1_000.0, step=1_000)
    cap.observe(board, 0.0)
    assert capped(cap, board, 200) == 100
    board.report("a", replace(EngineStats(), preemptions=3))
    cap.observe(board, 0.5)
    assert cap.cap == 100, "the next poll is not due"
    cap.observe(board, POLL_S)
    assert cap.cap == 75
    board.report("a", replace(EngineStats(), preemptions=6))
    cap.observe(board, 2 * POLL_S)
    assert cap.cap == 75, "the first cut is still draining"
    for number in range(30):
        cap.ended(f"t{number}", 1_000)
    board.report("a", replace(EngineStats(), preemptions=9))
    cap.observe(board, 3 * POLL_S)
    assert cap.cap == int(HARDER_CUT * 70)


def test_the_episode_cap_grows_after_a_clear_step_and_ignores_weight_updates() -> None:
    board = board_of(("a", 1), kv=10_000)
    cap = EpisodeCap(1_000.0, growth=1.5, step=2)
    cap.observe(board, 0.0)
    assert capped(cap, board, 50) == 10
    board.applied("a", 1)
    board.report("a", replace(EngineStats(), preemptions=8))
    cap.observe(board, POLL_S)
    assert cap.cap == 10, "an update computes all sequences again"
    cap.ended("t0", 1_000)
    cap.sent(turn_of("more", "p", context=1_000), "a")
    cap.ended("t1", 1_000)
    assert cap.cap == 15
