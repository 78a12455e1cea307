"""Memory of given KV blocks goes back to the system, and no other does; with a real engine: `test_offline`."""

from __future__ import annotations

import torch

from libra_hpc.engine.kv_room import release_pages


def test_whole_pages_of_given_blocks_are_freed_and_nothing_else() -> None:
    # Two layers in one allocation, 32 KiB a block, as vLLM lays them out.
    memory = torch.ones(2 * 64 * 8192, dtype=torch.float32)
    caches = [part.view(64, 2, 64, 64) for part in memory.split(64 * 8192)]
    # No block begins at a page for sure, so two pages a range may stay.
    freed = release_pages(caches, [3, 4, 5, 60])
    assert 2 * (4 * 32 * 1024 - 4 * 4096) <= freed <= 2 * 4 * 32 * 1024
    for cache in caches:
        kept = [block for block in range(64) if block not in (3, 4, 5, 60)]
        assert bool((cache[kept] == 1).all())
        assert bool((cache[4] == 0).any())


def test_blocks_without_a_range_of_their_own_are_left() -> None:
    cache = torch.ones(64, 64, 1024).transpose(0, 1)
    assert release_pages([cache], range(64)) == 0
    assert bool((cache == 1).all())
