"""One simulated engine against cases computed by hand, its block cache, and what comes back from host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from libra_hpc.simulator.engine.cache import BlockCache
from libra_hpc.simulator.engine.simulated_engine import IDLE, Engine
from libra_hpc.simulator.engine.simulated_request import SimulatedRequest

from .toys import Linear, engine, play, request


def again(name: str, **of: int) -> SimulatedRequest:
    """The last token of the next turn of ``name``."""
    return request(name, left=1, **of)


def swap(engine: Engine, now: float) -> None:
    """Two seconds for the weights of version 7."""
    engine.swap(7, 2.0, now)


TURNS = [
    pytest.param(
        Linear(400, base=1.0, prefill=0.5),
        {},
        [(0.0, request("a", 10, 3))],
        # 1 + 10 / 2 for the prompt and the first token, then two more tokens.
        [(8.0, "a")],
        {"generated": 3, "prefilled": 10, "steps": 3, "busy_s": 8.0},
        [],
        id="one sequence prefills once and decodes the rest",
    ),
    pytest.param(
        Linear(400, base=1.0, kv=0.125),
        {},
        [(0.0, request("a", 4, 2)), (0.0, request("b", 8, 3))],
        # Prefill of both: 1.  Then 5 + 9 tokens are attended to: 2.75, then b alone with 10: 2.25.
        [(3.75, "a"), (6.0, "b")],
        {},
        [(0, 0, 12, 0), (2, 14, 0, 0), (1, 10, 0, 0)],
        id="two sequences share every step",
    ),
    pytest.param(
        Linear(400),
        {"max_num_batched_tokens": 8},
        [(0.0, request("a", 4, 10)), (0.5, request("b", 20, 1))],
        # b gets 7, 7 and 6 tokens beside a's decodes, and its only token with the last of them.
        [(4.0, "b"), (10.0, "a")],
        {},
        [(0, 0, 4, 0), (1, 5, 7, 0), (1, 6, 7, 7), (1, 7, 6, 14)],
        id="chunks fill what decodes leave of the budget",
    ),
    pytest.param(
        Linear(400),
        {},
        [(0.0, request("a", 24, 1)), (0.0, request("b", 8, 1))],
        [(1.0, "a"), (1.0, "b")],
        {},
        # 24 * 12 + 8 * 4 = 320 pairs, as many as 32 tokens after a context of -6 would have: none is less than none.
        [(0, 0, 32, 0)],
        id="chunks of several prompts preserve the number of attended pairs",
    ),
    *(
        pytest.param(
            Linear(4000),
            {},
            [(0.0, request("a", 4, 300)), (at, request("b", 4, 1))],
            [(joins + 1.0, "b"), (300.0, "a")],
            {},
            [],
            id=f"an arrival at {at} cuts a stretch at the next boundary",
        )
        for at, joins in ((10.5, 11.0), (10.0, 10.0), (10.0009765625, 11.0))
    ),
    pytest.param(
        Linear(4000),
        {"async_steps": True},
        [(0.0, request("a", 4, 300)), (10.5, request("b", 4, 1)), (299.5, request("c", 4, 1))],
        [(13.0, "b"), (300.0, "a"), (301.0, "c")],
        {},
        [],
        id="with asynchronous steps an arrival joins a step later unless nothing runs",
    ),
    pytest.param(
        Linear(4000, base=1.0, kv=0.25),
        {},
        [(0.0, request("a", 4, 300)), (6.0, request("b", 4, 1))],
        # The prefill ends at 1; steps then attend to 5, 6, 7 ... tokens: boundaries at 3.25, 5.75, 8.5.  The step from
        # 8.5 on decodes with 8 tokens and prefills b: 1 + 2.
        [(11.5, "b"), (300 + (299 * 4 + 299 * 300 / 2) / 4, "a")],
        {},
        [],
        id="a growing step is cut exactly too",
    ),
    pytest.param(
        Linear(24),
        {},
        [(0.0, request("a", 8, 8)), (0.0, request("b", 8, 8))],
        # 6 blocks.  With 12 tokens computed each holds 3; a's 13th needs a fourth, which b loses at t = 5.  b then
        # lacks room until a ends at 8, computes 13 - 8 tokens (its prompt is still cached) and has three tokens to go.
        [(8.0, "a"), (11.0, "b")],
        {"preemptions": 1, "prefilled": 8 + 8 + 5, "cached": 8, "again": {"preemption": 4}, "generated": 16},
        [],
        id="the latest of the lowest priority is preempted and computed again",
    ),
    pytest.param(
        Linear(24, base=2**-6),
        {},
        [(0.0, request("a", 8, 8)), (0.0, request("b", 8, 8, priority=1)), (3 / 64, request("c", 5, 1))],
        # As above, in 64ths of a second; c needs 2 blocks, finds none before b loses its three at 5, one of which goes
        # to a, and starts at 6.
        [(7 / 64, "c"), (8 / 64, "a"), (11 / 64, "b")],
        {},
        [],
        id="a step that preempts admits nothing and the next one may",
    ),
    pytest.param(
        Linear(24),
        {},
        [(0.0, request("a", 8, 8, priority=1)), (1.0, request("b", 8, 8))],
        # a, served first, lacks a block at 5 and is itself the one to go; the step is b's alone.  a goes on at 9 and
        # has three tokens left.
        [(9.0, "b"), (12.0, "a")],
        {"steps": 12, "preemptions": 1},
        [],
        id="one that preempts itself stops nobody",
    ),
    pytest.param(
        Linear(400),
        {"max_num_seqs": 1},
        [(0.25 * i, request(f"r{i}", 4, 2, priority=-i)) for i in range(4)],
        [(2.0, "r0"), (4.0, "r3"), (6.0, "r2"), (8.0, "r1")],
        {},
        [],
        id="priority decides who waits",
    ),
    pytest.param(
        Linear(400),
        {},
        # 14 tokens are computed: three full blocks.  The next turn has 15 + 6.
        [(0.0, request("a", 10, 5)), (9.0, again("a", tokens=21, prompt_tokens=10, high=14))],
        [(5.0, "a"), (10.0, "a")],
        {"prefilled": 10 + 9, "cached": 12, "again": {"partial_block": 2}},
        [],
        id="a returning turn finds its prefix",
    ),
    pytest.param(
        Linear(48),
        {},
        [(0.0, request(f"s{i}", 34, 2, prompt="p", prompt_tokens=32)) for i in range(4)],
        # 8 blocks of prompt and one of its own each: 12 of 12.  Without sharing two would not fit.
        [(2.0, f"s{i}") for i in range(4)],
        {"prefilled": 34 + 3 * 2, "cached": 3 * 32, "preemptions": 0},
        [],
        id="siblings share the blocks of their prompt",
    ),
    pytest.param(
        Linear(400),
        {},
        [(0.0, request("s0", 8, 1, prompt="p")), (5.0, request("s1", 8, 1, prompt="p"))],
        [(1.0, "s0"), (6.0, "s1")],
        {"prefilled": 8 + 4, "cached": 4},
        [],
        id="a prompt that is cached whole computes its last block",
    ),
    pytest.param(
        Linear(400, base=1.0, prefill=0.25),
        {},
        [(0.0, request("old", 8, 1)), (4.0, request("a", 8, 6)), (8.5, swap), (30.0, again("old", tokens=8))],
        # a: prefill from 4 to 8 (1 + 8 / 4 = 3, boundary 7), tokens at 7, 8, 9.  The update asked for at 8.5 begins at
        # 9 and ends at 11; 8 + 3 tokens are computed again in 1 + 11 / 4 seconds, which gives the fourth of six.
        [(3.0, "old"), (11.0 + 3.75 + 2.0, "a"), (33.0, "old")],
        # The third token was sampled and never computed.
        {"again": {"swap": 10}, "recomputed": 1, "preemptions": 0, "paused_s": 2.0, "cached": 0},
        [],
        id="a weight update recomputes what runs and empties the cache",
    ),
    pytest.param(
        Linear(400, base=1.0, prefill=0.25),
        {"keep_kv": True},
        [(0.0, request("old", 8, 1)), (4.0, request("a", 8, 6)), (8.5, swap), (30.0, again("old", tokens=8))],
        # As above, but after the update the fourth of six tokens takes one step, and a block of the prompt is there.
        [(3.0, "old"), (11.0 + 3.0, "a"), (32.0, "old")],
        {"again": {}, "recomputed": 0, "paused_s": 2.0, "cached": 4},
        [],
        id="KV caches outlive an update that keeps them",
    ),
]


@pytest.mark.parametrize(("steps", "limits", "arrivals", "ends", "counters", "calls"), TURNS)
def test_turns_end_as_computed_by_hand(
    steps: Linear,
    limits: dict[str, Any],
    arrivals: Sequence[Any],
    ends: list[tuple[float, str]],
    counters: dict[str, Any],
    calls: list[tuple[int, int, int, int]],
) -> None:
    e = engine(steps, **limits)
    assert play(e, *arrivals) == ends
    assert {name: getattr(e.counters, name) for name in counters} == counters
    assert steps.calls[: len(calls)] == calls
    assert e.version == (7 if any(act is swap for _, act in arrivals) else 0)
    assert e.requests == 0


def test_the_least_recently_used_prefix_is_evicted_first() -> None:
    e = engine(Linear(40))
    play(e, *((10.0 * i, request(name, 13, 1)) for i, name in enumerate("ab")))
    # Of 10 blocks 3 + 3 are cached; c needs 6 and evicts two of a, tail first.
    play(e, (30.0, request("c", 21, 1)))
    play(e, (40.0, again("b", tokens=14, prompt_tokens=13, high=13)))
    assert (e.counters.cached, e.counters.again) == (12, {"partial_block": 1})
    play(e, (50.0, again("a", tokens=14, prompt_tokens=13, high=13)))
    assert e.counters.cached == 12 + 4, "its first block is left"
    assert e.counters.again == {"partial_block": 1, "eviction": 9}


def test_an_aborted_request_ends_at_the_next_boundary_with_what_it_has() -> None:
    running, waiting = request("a", 8, 50), request("b", 8, 50)
    aborts = ((3.25, lambda e, now: e.abort(waiting, now)), (6.5, lambda e, now: e.abort(running, now)))
    done = play(engine(Linear(400), max_num_seqs=1), (0.0, running), (0.0, waiting), *aborts)
    assert done == [(4.0, "b"), (7.0, "a")]
    assert (running.generated, waiting.generated) == (7, 0)


def test_reports_come_twice_a_second_at_step_boundaries_and_once_when_idle() -> None:
    e = engine(Linear(4000, base=0.1875))
    e.submit(request("a", 8, 9), 0.0)
    reports = []
    while (now := e.next_at) != IDLE:
        e.advance(now)
        if stats := e.report(now):
            reports.append((now, stats.running, stats.steps, stats.generated_tokens))
    assert reports == [(0.1875, 1, 1, 1), (0.75, 1, 4, 4), (1.3125, 1, 7, 7), (1.6875, 0, 9, 9)]


def fill(cache: BlockCache, name: str, blocks: int) -> None:
    """A request without a shared prompt comes, takes ``blocks`` and goes."""
    cache.bind(name, f"prompt of {name}", 0)
    cache.take(blocks)
    cache.release(name, f"prompt of {name}", blocks, 0)


def found(cache: BlockCache, name: str) -> int:
    return cache.find(name, f"prompt of {name}", 0, 1000)[1]


def test_nothing_is_lost_or_made() -> None:
    cache = BlockCache(20)
    fill(cache, "a", 6)
    fill(cache, "b", 6)
    assert (cache.free, cache.evictable, cache.held) == (8, 12, 0)
    cache.bind("c", "p", 0)
    cache.take(16)
    assert (cache.free, cache.evictable, cache.held) == (0, 4, 16)
    assert (found(cache, "a"), found(cache, "b")) == (0, 4), "the younger chain goes last, from its tail"


def test_a_chain_without_its_prompt_is_not_found() -> None:
    cache = BlockCache(20)
    cache.bind("a", "p", 0)
    cache.take(6)
    assert cache.publish("p", 4) == 4
    cache.release("a", "p", 2, 0)
    assert cache.find("a", "p", 4, 100) == (4, 2, 6)
    assert cache.find("b", "p", 4, 3) == (3, 0, 4)
    cache.take(20 - 3)
    assert cache.find("a", "p", 4, 100) == (3, 0, 3), "of one context the tail goes first"


def test_many_names_leave_nothing_behind() -> None:
    cache = BlockCache(8)
    for i in range(1000):
        fill(cache, f"t{i}", 4)
    assert (cache.free, cache.evictable) == (0, 8)
    assert len(cache) < 600, "names whose blocks are gone are forgotten"
