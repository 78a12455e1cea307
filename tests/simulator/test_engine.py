"""One simulated engine against cases computed by hand, its block cache, and what comes back from host memory."""

from __future__ import annotations

import pytest

from libra_hpc.simulator.engine.cache import BlockCache
from libra_hpc.simulator.engine.host_cache import HostCache
from libra_hpc.simulator.engine.simulated_engine import IDLE, Engine
from libra_hpc.simulator.engine.simulated_engines import build_engines

from .toys import Linear, engine, play, request


def test_one_sequence_prefills_once_and_decodes_the_rest() -> None:
    e = engine(Linear(400, base=1.0, prefill=0.5))
    # 1 + 10 / 2 for the prompt and the first token, then two more tokens.
    assert play(e, (0.0, request("a", 10, 3))) == [(8.0, "a")]
    assert (e.counters.generated, e.counters.prefilled, e.counters.steps, e.counters.busy_s) == (3, 10, 3, 8.0)


def test_two_sequences_share_every_step() -> None:
    steps = Linear(400, base=1.0, kv=0.125)
    e = engine(steps)
    both = ((0.0, request("a", 4, 2)), (0.0, request("b", 8, 3)))
    # Prefill of both: 1.  Then 5 + 9 tokens are attended to: 2.75, then b alone with 10: 2.25.
    assert play(e, *both) == [(3.75, "a"), (6.0, "b")]
    assert [call[:3] for call in steps.calls] == [(0, 0, 12), (2, 14, 0), (1, 10, 0)]


def test_chunks_fill_what_decodes_leave_of_the_budget() -> None:
    steps = Linear(400)
    e = engine(steps, max_num_batched_tokens=8, max_num_seqs=8)
    done = play(e, (0.0, request("a", 4, 10)), (0.5, request("b", 20, 1)))
    # b gets 7, 7 and 6 tokens beside a's decodes, and its only token with the last of them.
    assert done == [(4.0, "b"), (10.0, "a")]
    assert steps.calls[1:4] == [(1, 5, 7, 0), (1, 6, 7, 7), (1, 7, 6, 14)]


def test_chunks_of_several_prompts_preserve_the_number_of_attended_pairs() -> None:
    steps = Linear(400)
    e = engine(steps)
    both = ((0.0, request("a", 24, 1)), (0.0, request("b", 8, 1)))
    play(e, *both)
    # 24 * 12 + 8 * 4 = 320 pairs, as many as 32 tokens after a context of -6 would have: none is less than none.
    assert steps.calls[0] == (0, 0, 32, 0)


@pytest.mark.parametrize(("at", "joins"), [(10.5, 11.0), (10.0, 10.0), (10.0009765625, 11.0)])
def test_an_arrival_cuts_a_stretch_at_the_next_boundary(at: float, joins: float) -> None:
    e = engine(Linear(4000))
    done = play(e, (0.0, request("a", 4, 300)), (at, request("b", 4, 1)))
    assert done == [(joins + 1.0, "b"), (300.0, "a")]


def test_with_asynchronous_steps_an_arrival_joins_a_step_later_unless_nothing_runs() -> None:
    e = engine(Linear(4000), async_steps=True)
    work = ((0.0, request("a", 4, 300)), (10.5, request("b", 4, 1)), (299.5, request("c", 4, 1)))
    assert play(e, *work) == [(13.0, "b"), (300.0, "a"), (301.0, "c")]
    assert e.requests == 0


def test_a_growing_step_is_cut_exactly_too() -> None:
    e = engine(Linear(4000, base=1.0, kv=0.25))
    # The prefill ends at 1; steps then attend to 5, 6, 7 ... tokens: boundaries at 3.25, 5.75, 8.5.
    done = play(e, (0.0, request("a", 4, 300)), (6.0, request("b", 4, 1)))
    # The step from 8.5 on decodes with 8 tokens and prefills b: 1 + 2.
    assert done[0] == (11.5, "b")


def test_the_latest_of_the_lowest_priority_is_preempted_and_computed_again() -> None:
    e = engine(Linear(24))
    both = ((0.0, request("a", 8, 8)), (0.0, request("b", 8, 8)))
    # 6 blocks.  With 12 tokens computed each holds 3; a's 13th needs a fourth, which b loses at t = 5.  b then lacks
    # room until a ends at 8, computes 13 - 8 tokens (its prompt is still cached) and has three tokens to go.
    assert play(e, *both) == [(8.0, "a"), (11.0, "b")]
    assert (e.counters.preemptions, e.counters.prefilled, e.counters.cached) == (1, 8 + 8 + 5, 8)
    assert e.counters.again == {"preemption": 4}
    assert e.counters.generated == 16


def test_a_step_that_preempts_admits_nothing_and_the_next_one_may() -> None:
    e = engine(Linear(24, base=2**-6))
    both = ((0.0, request("a", 8, 8)), (0.0, request("b", 8, 8, priority=1)))
    # As above, in 64ths of a second; c needs 2 blocks, finds none before b loses its three at 5, one of which goes to
    # a, and starts at 6.
    done = play(e, *both, (3 / 64, request("c", 5, 1)))
    assert [(now * 64, name) for now, name in done] == [(7.0, "c"), (8.0, "a"), (11.0, "b")]


def test_one_that_preempts_itself_stops_nobody() -> None:
    e = engine(Linear(24))
    done = play(e, (0.0, request("a", 8, 8, priority=1)), (1.0, request("b", 8, 8)))
    # a, served first, lacks a block at 5 and is itself the one to go; the step is b's alone.  a goes on at 9 and has
    # three tokens left.
    assert done == [(9.0, "b"), (12.0, "a")]
    assert (e.counters.steps, e.counters.preemptions) == (12, 1)


def test_priority_decides_who_waits() -> None:
    e = engine(Linear(400), max_num_seqs=1)
    order = play(e, *((0.25 * i, request(f"r{i}", 4, 2, priority=-i)) for i in range(4)))
    assert [name for _, name in order] == ["r0", "r3", "r2", "r1"]


def test_a_returning_turn_finds_its_prefix() -> None:
    e = engine(Linear(400))
    play(e, (0.0, request("a", 10, 5)))
    # 14 tokens are computed: three full blocks.  The next turn has 15 + 6.
    play(e, (9.0, request("a", 21, 1, prompt_tokens=10, high=14)))
    assert (e.counters.prefilled, e.counters.cached) == (10 + 9, 12)
    assert e.counters.again == {"partial_block": 2}


def test_siblings_share_the_blocks_of_their_prompt() -> None:
    e = engine(Linear(48))
    group = [(0.0, request(f"s{i}", 34, 2, prompt="p", prompt_tokens=32)) for i in range(4)]
    # 8 blocks of prompt and one of its own each: 12 of 12.  Without sharing two would not fit.
    assert play(e, *group) == [(2.0, f"s{i}") for i in range(4)]
    assert (e.counters.prefilled, e.counters.cached, e.counters.preemptions) == (34 + 3 * 2, 3 * 32, 0)


def test_a_prompt_that_is_cached_whole_computes_its_last_block() -> None:
    e = engine(Linear(400))
    play(e, (0.0, request("s0", 8, 1, prompt="p")), (5.0, request("s1", 8, 1, prompt="p")))
    assert (e.counters.prefilled, e.counters.cached) == (8 + 4, 4)


def test_the_least_recently_used_prefix_is_evicted_first() -> None:
    e = engine(Linear(40))
    play(e, *((10.0 * i, request(name, 13, 1)) for i, name in enumerate("ab")))
    # Of 10 blocks 3 + 3 are cached; c needs 6 and evicts two of a, tail first.
    play(e, (30.0, request("c", 21, 1)))
    play(e, (40.0, request("b", 14, 1, prompt_tokens=13, high=13)))
    assert (e.counters.cached, e.counters.again) == (12, {"partial_block": 1})
    play(e, (50.0, request("a", 14, 1, prompt_tokens=13, high=13)))
    assert e.counters.cached == 12 + 4, "its first block is left"
    assert e.counters.again == {"partial_block": 1, "eviction": 9}


def test_a_weight_update_recomputes_what_runs_and_empties_the_cache() -> None:
    e = engine(Linear(400, base=1.0, prefill=0.25))
    play(e, (0.0, request("old", 8, 1)))
    # a: prefill from 4 to 8 (1 + 8 / 4 = 3, boundary 7), tokens at 7, 8, 9.  The update asked for at 8.5 begins at 9
    # and ends at 11; 8 + 3 tokens are computed again in 1 + 11 / 4 seconds, which gives the fourth of six.
    done = play(e, (4.0, request("a", 8, 6)), (8.5, lambda now: e.swap(7, 2.0, now)))
    assert done == [(11.0 + 3.75 + 2.0, "a")]
    assert e.version == 7
    assert e.counters.again == {"swap": 10}, "the third token was sampled and never computed"
    assert (e.counters.recomputed, e.counters.preemptions, e.counters.paused_s) == (1, 0, 2.0)
    play(e, (30.0, request("old", 9, 1, prompt_tokens=8)))
    assert e.counters.cached == 0


def test_kv_caches_outlive_an_update_that_keeps_them() -> None:
    e = engine(Linear(400, base=1.0, prefill=0.25), keep_kv=True)
    play(e, (0.0, request("old", 8, 1)))
    # As above, but after the update the fourth of six tokens takes one step.
    done = play(e, (4.0, request("a", 8, 6)), (8.5, lambda now: e.swap(7, 2.0, now)))
    assert done == [(11.0 + 3.0, "a")]
    assert (e.version, e.counters.again, e.counters.recomputed, e.counters.paused_s) == (7, {}, 0, 2.0)
    play(e, (30.0, request("old", 9, 1, prompt_tokens=8)))
    assert e.counters.cached == 8


def test_an_aborted_request_ends_at_the_next_boundary_with_what_it_has() -> None:
    e = engine(Linear(400), max_num_seqs=1)
    running, waiting = request("a", 8, 50), request("b", 8, 50)
    both = ((0.0, running), (0.0, waiting))
    done = play(e, *both, (3.25, lambda now: e.abort(waiting, now)), (6.5, lambda now: e.abort(running, now)))
    assert done == [(4.0, "b"), (7.0, "a")]
    assert (running.generated, waiting.generated) == (7, 0)


def test_reports_come_twice_a_second_at_step_boundaries_and_once_when_idle() -> None:
    e = engine(Linear(4000, base=0.1875))
    e.submit(request("a", 8, 9), 0.0)
    reports = []
    while e.next_at != IDLE:
        now = e.next_at
        e.advance(now)
        stats = e.report(now)
        if stats is not None:
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


def with_host(host: HostCache | None) -> Engine:
    """20 blocks of 4 tokens; a step takes 1 s and 1/4 s for each token of a prompt."""
    return engine(Linear(80, base=1.0, prefill=0.25), host=host)


def evicted(e: Engine) -> list[float]:
    """When ``a`` ends, then ``b``, which takes its blocks, then the next turn of ``a``: 40 tokens known, 2 new."""
    done = play(
        e,
        (0.0, request("a", 38, 2, prompt_tokens=0)),
        (50.0, request("b", 60, 1, prompt_tokens=0)),
        (100.0, request("a", 42, 1, prompt_tokens=0, high=39)),
    )
    return [at for at, _ in done]


def test_an_evicted_context_comes_back_in_the_time_of_a_copy() -> None:
    plain, hosted = with_host(None), with_host(HostCache(100, block_s=0.125))
    # The device keeps 5 of 9 whole blocks; the others are computed again, or they come back.
    assert evicted(plain)[-1] == 100.0 + 1.0 + 22 / 4
    assert evicted(hosted)[-1] == 100.0 + 1.0 + 6 / 4 + 4 * 0.125
    assert hosted.counters.fetched == 16
    assert not hosted.counters.again.get("eviction")


def test_new_weights_empty_the_host_too() -> None:
    e = with_host(HostCache(100, block_s=0.125))
    done = play(
        e,
        (0.0, request("a", 38, 2, prompt_tokens=0)),
        (50.0, lambda now: e.swap(1, 1.0, now)),
        (100.0, request("a", 42, 1, prompt_tokens=0, high=39)),
    )
    assert done[-1][0] == 100.0 + 1.0 + 42 / 4
    assert e.counters.fetched == 0


def beyond(host: HostCache, trajectory: str, prompt: str = "p", prompt_blocks: int = 2) -> int:
    return host.beyond(trajectory, prompt, shared=0, own=0, prompt_blocks=prompt_blocks, most=100)


def test_the_least_recently_used_leaves_host_memory_first() -> None:
    host = HostCache(12, block_s=1.0)
    host.store("a", "p", own=4, prompt_blocks=2)
    host.store("b", "p", own=4, prompt_blocks=2)
    assert (beyond(host, "a"), beyond(host, "b")) == (6, 6)
    host.store("c", "p", own=3, prompt_blocks=2)
    assert (beyond(host, "a"), beyond(host, "b"), beyond(host, "c")) == (2, 6, 5)
    host.clear()
    assert beyond(host, "c") == 0


def test_a_chain_in_host_memory_is_of_no_use_without_its_prompt() -> None:
    host = HostCache(100, block_s=1.0)
    host.store("a", "p", own=4, prompt_blocks=2)
    assert beyond(host, "a", "q") == 0
    assert host.beyond("a", "q", shared=1, own=0, prompt_blocks=2, most=100) == 0
    assert host.beyond("a", "q", shared=2, own=1, prompt_blocks=2, most=100) == 3
    assert host.beyond("a", "p", shared=2, own=1, prompt_blocks=2, most=5) == 2


def test_host_memory_and_links_of_all_gpus_of_an_engine_count() -> None:
    (plain,) = build_engines("1xTP4", 4, "a800", "qwen3-14b").engines
    (hosted,) = build_engines("1xTP4", 4, "a800", "qwen3-14b", host_gb=64.0).engines
    # 160 KiB of keys and values a token, a quarter of them on each GPU, over 25 GB/s each.
    assert plain.host is None
    assert hosted.host is not None
    assert (hosted.host.tokens, round(hosted.host.tokens_s)) == (64 * 2**30 // 40_960, round(25e9 / 40_960))
