"""KV caches in host memory: what the device evicts comes back in the time of a copy, until new weights or no room."""

from __future__ import annotations

from libra_hpc.simulator.engine.host_cache import HostCache
from libra_hpc.simulator.engine.simulated_engine import Engine
from libra_hpc.simulator.engine.simulated_engines import build_engines
from libra_hpc.simulator.settings import SimulationSettings

from .toys import Linear, play, request


def engine(host: HostCache | None) -> Engine:
    """20 blocks of 4 tokens; a step takes 1 s and 1/4 s for each token of a prompt."""
    steps = Linear(80, base=1.0, prefill=0.25)
    limits = SimulationSettings(block_size=4, max_num_seqs=8, max_num_batched_tokens=64)
    return Engine(name="e", tp=1, steps=steps, settings=limits, number=1, version=0, now=0.0, host=host)


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
    plain, with_host = engine(None), engine(HostCache(100, block_s=0.125))
    # The device keeps 5 of 9 whole blocks; the others are computed again, or they come back.
    assert evicted(plain)[-1] == 100.0 + 1.0 + 22 / 4
    assert evicted(with_host)[-1] == 100.0 + 1.0 + 6 / 4 + 4 * 0.125
    assert with_host.counters.fetched == 16
    assert not with_host.counters.again.get("eviction")


def test_new_weights_empty_the_host_too() -> None:
    e = engine(HostCache(100, block_s=0.125))
    done = play(
        e,
        (0.0, request("a", 38, 2, prompt_tokens=0)),
        (50.0, lambda now: e.swap(1, 1.0, now)),
        (100.0, request("a", 42, 1, prompt_tokens=0, high=39)),
    )
    assert done[-1][0] == 100.0 + 1.0 + 42 / 4
    assert e.counters.fetched == 0


def held(host: HostCache, trajectory: str, prompt: str = "p", prompt_blocks: int = 2) -> int:
    return host.beyond(trajectory, prompt, shared=0, own=0, prompt_blocks=prompt_blocks, most=100)


def test_the_least_recently_used_goes_first() -> None:
    host = HostCache(12, block_s=1.0)
    host.store("a", "p", own=4, prompt_blocks=2)
    host.store("b", "p", own=4, prompt_blocks=2)
    assert (held(host, "a"), held(host, "b")) == (6, 6)
    host.store("c", "p", own=3, prompt_blocks=2)
    assert (held(host, "a"), held(host, "b"), held(host, "c")) == (2, 6, 5)
    host.clear()
    assert held(host, "c") == 0


def test_a_chain_is_of_no_use_without_its_prompt() -> None:
    host = HostCache(100, block_s=1.0)
    host.store("a", "p", own=4, prompt_blocks=2)
    assert held(host, "a", "q") == 0
    assert host.beyond("a", "q", shared=1, own=0, prompt_blocks=2, most=100) == 0
    assert host.beyond("a", "q", shared=2, own=1, prompt_blocks=2, most=100) == 3
    assert host.beyond("a", "p", shared=2, own=1, prompt_blocks=2, most=5) == 2


def test_host_memory_and_links_of_all_gpus_of_an_engine_count() -> None:
    (plain,) = build_engines("1xTP4", 4, "a800", "qwen3-14b").engines
    (engine,) = build_engines("1xTP4", 4, "a800", "qwen3-14b", host_gb=64.0).engines
    # 160 KiB of keys and values a token, a quarter of them on each GPU, over 25 GB/s each.
    assert plain.host is None
    assert engine.host is not None
    assert (engine.host.tokens, round(engine.host.tokens_s)) == (64 * 2**30 // 40_960, round(25e9 / 40_960))
