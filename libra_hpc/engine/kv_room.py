"""KV blocks that a borrowed engine gives away and takes back between two steps, while its requests go on.

Free blocks leave vLLM's pool, those that cache prefixes last; where too few are free, requests end, the newest first.
On a CPU the pages of given blocks go back to the system.  On a GPU they stay the engine's, also with `kvcached`, which
maps pages for every block that leaves the pool.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

DONT_NEED = 4
"""Linux's MADV_DONTNEED: pages of private memory are freed, and read as zeros from then on."""


class KvRoom:
    """The blocks of one engine; one block of the pool is vLLM's own."""

    def __init__(self, pool: BlockPool, release: Callable[[list[int]], object]) -> None:
        """``release`` gets the numbers of blocks whose pages nobody needs."""
        self._pool, self._release = pool, release
        self._given: list[KVCacheBlock] = []
        self.blocks = max(1, pool.num_gpu_blocks - 1)
        self.share = 1.0

    @property
    def usable(self) -> int:
        """Blocks that requests may have."""
        return self.blocks - len(self._given)

    @property
    def use(self) -> float:
        """Share of the usable blocks that requests hold."""
        return 1.0 - self._pool.get_num_free_blocks() / self.usable if self.usable else 0.0

    def set_share(self, share: float, end_newest: Callable[[], bool]) -> None:
        """Keep this share of the blocks.

        ``end_newest()`` ends the request that was admitted last, and returns False when there is none.
        """
        self.share = share
        target = self.blocks - int(share * self.blocks)
        self._take_back(target)
        missing = target - len(self._given)
        while self._pool.get_num_free_blocks() < missing and end_newest():
            pass
        taken = self._pool.get_new_blocks(min(missing, self._pool.get_num_free_blocks()))
        self._given += taken
        if taken:
            self._release([block.block_id for block in taken])

    def lend(self) -> None:
        """Have all blocks in the pool for a moment: vLLM drops no prefix caches while a block is out."""
        self._take_back(0)

    def _take_back(self, given: int) -> None:
        if len(self._given) > given:
            self._pool.free_blocks(self._given[given:])
            del self._given[given:]


def release_pages(caches: Iterable[torch.Tensor], blocks: Iterable[int]) -> int:
    """Give the memory of KV blocks back to the system, on a CPU; returns its bytes.

    ``caches``: one tensor a layer, any dtype, first dimension the block; only whole pages are freed.
    """
    advise, freed = ctypes.CDLL(None, use_errno=True).madvise, 0
    for start, end in _joined(sorted(_spans(caches, list(blocks)))):
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            if advise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), DONT_NEED):
                raise OSError(ctypes.get_errno(), "KV memory cannot be given back to the system")
            freed += last - first
    return freed


def _spans(caches: Iterable[torch.Tensor], blocks: list[int]) -> Iterator[tuple[int, int]]:
    """Addresses of the blocks of every layer, where a block has a range of its own."""
    for cache in caches:
        one = cache[0]
        span = 1 + sum((size - 1) * stride for size, stride in zip(one.shape, one.stride(), strict=True))
        if span != one.numel():
            continue
        width = cache.element_size()
        for block in blocks:
            start = cache.data_ptr() + block * cache.stride(0) * width
            yield start, start + span * width


def _joined(spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Adjacent ranges as one; ``spans`` are sorted."""
    begin = end = 0
    for start, stop in spans:
        if start > end:
            yield begin, end
            begin = start
        end = max(end, stop)
    yield begin, end
