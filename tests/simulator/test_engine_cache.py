"""The block cache's own rules."""

from __future__ import annotations

from libra_hpc.simulator.engine.cache import BlockCache


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
