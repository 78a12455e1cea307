"""Trajectories keep their cache, wait for room, or are parked; contexts that fit change nothing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_hpc.policies.scheduling.board import Board
from libra_hpc.policies.scheduling.causal_mlfq import CausalMlfq
from libra_hpc.policies.scheduling.dispatch import Dispatcher
from libra_hpc.policies.scheduling.residency import PARK_AT, START_AT, Claim, EngineCache, release

from .boards import board_of, drive, ended, turn_of

CAPACITY = 1_000


def claim(name: str, prompt_tokens: int = 0) -> Claim:
    return Claim(name, prompt_tokens)


def sent(dispatcher: Dispatcher, now: float = 0.0) -> list[str]:
    return [turn.trajectory for turn, _ in dispatcher.dispatch(now)]


def test_one_more_resident_needs_a_distance_to_the_limit_at_which_residents_are_parked() -> None:
    cache = EngineCache(CAPACITY)
    assert cache.has_room(claim("a"), 2 * CAPACITY), "an empty engine takes any context"
    cache.hold(claim("a"), 600)
    assert cache.has_room(claim("b"), int(START_AT * CAPACITY) - 600)
    assert not cache.has_room(claim("b"), int(START_AT * CAPACITY) - 599)


def test_siblings_count_their_prompt_once() -> None:
    cache = EngineCache(CAPACITY)
    first, second = claim("p", 400), claim("p", 400)
    cache.hold(first, 450)
    assert cache.has_room(second, 700)
    cache.hold(second, 700)
    assert cache.held == 400 + 50 + 300
    release(first)
    assert cache.held == 700
    release(second)
    assert cache.held == 0


def test_the_smallest_is_parked_and_a_running_one_never() -> None:
    cache = EngineCache(CAPACITY)
    large, small, running, least = claim("a"), claim("b"), claim("c"), claim("d")
    running.running = True
    for each, tokens in ((large, 310), (small, 300), (running, 250)):
        cache.hold(each, tokens)
    assert cache.fits(large), "860 of 1,000"
    cache.hold(least, 50)
    assert not cache.fits(least), "it is the smallest itself"
    release(least)
    cache.hold(large, 360)
    assert cache.fits(large)
    assert small.cache is None
    assert running.cache is cache
    cache.hold(large, 700)
    assert not cache.fits(large), "only the running one is left"
    assert cache.held > PARK_AT * CAPACITY


def test_a_resident_moves_with_its_trajectory() -> None:
    here, there, moved = EngineCache(CAPACITY), EngineCache(CAPACITY), claim("a", 100)
    for cache in (here, there):
        cache.hold(moved, 300)
    assert (here.held, there.held, moved.cache) == (0, 300, there)


def two_waiting() -> tuple[Board, Dispatcher]:
    """The first turns of s (400 tokens) and t (500) at an engine that holds 1,000."""
    board = board_of()
    board.up("a", 1, CAPACITY, 0)
    dispatcher = Dispatcher(CausalMlfq(), board)
    for name, context in (("s", 400), ("t", 500)):
        dispatcher.ready(turn_of(name, name, context=context), 0.0)
    return board, dispatcher


def test_a_first_turn_waits_while_the_residents_are_in_tool_calls_and_starts_when_one_ends() -> None:
    board, dispatcher = two_waiting()
    assert sent(dispatcher) == ["s"]
    board.answered("a", 400)
    assert sent(dispatcher, 1.0) == [], "its context stays in the cache"
    dispatcher.ready(turn_of("s", "s", at="a", turns=1, context=600, attained=50, ready=2.0), 2.0)
    assert sent(dispatcher, 2.0) == ["s"]
    board.answered("a", 600)
    dispatcher.finished(ended("s", "s", 100), 3.0)
    assert sent(dispatcher, 3.0) == ["t"]


@pytest.mark.parametrize(("aborted", "served"), [(False, ["large", "small"]), (True, ["small"])])
def test_nobody_overtakes_the_first_that_waits_for_room(aborted: bool, served: list[str]) -> None:
    board = board_of(("a", 1), kv=CAPACITY)
    dispatcher = Dispatcher(CausalMlfq(), board)
    for now, name, context in ((0.0, "s", 500), (10.0, "large", 700), (40.0, "small", 50)):
        dispatcher.ready(turn_of(name, name, context=context, ready=now), now)
        assert sent(dispatcher, now) == (["s"] if name == "s" else []), "small would fit"
    assert dispatcher.waiting_for_room == 2
    if aborted:
        dispatcher.drop("large", "large", 50.0)
    else:
        board.answered("a", 500)
        dispatcher.finished(ended("s", "s", 100), 50.0)
    assert sent(dispatcher, 50.0) == served
    assert dispatcher.waiting_for_room == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([600, 4_000, 20_000, 100_000]), st.sampled_from([0.0, 0.1]))
def test_everything_is_served_and_nothing_is_held_however_small_the_caches_are(seed: int, kv: int, lost: float) -> None:
    policy = CausalMlfq()
    drive(policy, board_of(("a", 1), ("b", 1), ("c", 2), cap=3, kv=kv), seed, lost)
    assert not policy._claims
    assert all(engine.cache.held == 0 for engine in policy._engines.values())
