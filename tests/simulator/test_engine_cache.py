"""The block cache's own rules."""

from __future__ import annotations

from libra_hpc.simulator.cache import BlockCache


def fill(cache: BlockCache, name: str, blocks: int, now: float, keep_s: float = 0.0) -> None:
    """A request without a shared prompt comes, takes ``blocks`` and goes."""
    cache.bind(name, f"prompt of {name}", 0)
    cache.take(blocks)
    cache.release(name, f"prompt of {name}", blocks, 0, now, keep_s)


def found(cache: BlockCache, name: str) -> int:
    return cache.find(name, f"prompt of {name}", 0, 1000)[1]


def test_nothing_is_lost_or_made() -> None:
    cache = BlockCache(20)
    fill(cache, "a", 6, 0.0)
    fill(cache, "b", 6, 1.0, keep_s=10.0)
    assert (cache.free, cache.evictable, cache.held, cache.pinned) == (8, 12, 0, 6)
    cache.bind("c", "p", 0)
    cache.take(16)
    assert (cache.free, cache.evictable, cache.held, cache.pinned) == (0, 4, 16, 4)
    assert (found(cache, "a"), found(cache, "b")) == (0, 4), "the pinned chain goes last, from its tail"


def test_a_pin_ends_with_its_time() -> None:
    cache = BlockCache(20)
    fill(cache, "a", 4, 0.0, keep_s=5.0)
    fill(cache, "b", 4, 6.0)
    cache.expire(4.0)
    assert cache.pinned == 4
    cache.expire(5.0)
    assert cache.pinned == 0
    cache.take(14)
    assert (found(cache, "a"), found(cache, "b")) == (2, 4)


def test_half_the_blocks_may_be_pinned_and_the_first_pin_to_end_gives_way() -> None:
    cache = BlockCache(20)
    fill(cache, "a", 6, 0.0, keep_s=50.0)
    fill(cache, "b", 6, 1.0, keep_s=10.0)
    assert cache.pinned == 6
    cache.take(12)
    assert (found(cache, "a"), found(cache, "b")) == (6, 2)


def test_a_finished_trajectory_is_unpinned() -> None:
    cache = BlockCache(20)
    fill(cache, "a", 6, 0.0, keep_s=50.0)
    fill(cache, "b", 6, 1.0)
    cache.unpin("a", 2.0)
    assert cache.pinned == 0
    cache.take(15)
    assert (found(cache, "a"), found(cache, "b")) == (5, 0), "it counts as used when it ended"


def test_a_chain_without_its_prompt_is_not_found() -> None:
    cache = BlockCache(20)
    cache.bind("a", "p", 0)
    cache.take(6)
    assert cache.publish("p", 4) == 4
    cache.release("a", "p", 2, 0, 0.0)
    assert cache.find("a", "p", 4, 100) == (4, 2, 6)
    assert cache.find("b", "p", 4, 3) == (3, 0, 4)
    cache.take(20 - 3)
    assert cache.find("a", "p", 4, 100) == (3, 0, 3), "of one context the tail goes first"
    cache.drop("a")
    assert cache.available == 3


def test_many_names_leave_nothing_behind() -> None:
    cache = BlockCache(8)
    for i in range(1000):
        fill(cache, f"t{i}", 4, float(i))
    assert (cache.free, cache.evictable) == (0, 8)
    assert len(cache) < 600, "names whose blocks are gone are forgotten"
