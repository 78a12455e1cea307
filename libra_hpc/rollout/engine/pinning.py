"""Pins: KV blocks of a finished turn are retained for the trajectory's next turn while its tool runs.

vLLM evicts the blocks of finished requests by their last use, whether they are used again or not.

- Request with `Generate.keep_s` > 0 ends by itself -> pin its full blocks: `Pins` takes a reference on each.
- Time over, or weights swapped -> release the pin.
- Allocation fails for lack of free blocks -> release pins, earliest expiry first, until it succeeds or none is left.
- More than `MOST_PINNED` of the blocks pinned -> release the earliest expiry.

A request therefore runs, waits or is preempted exactly as if there were no pins.
"""

from __future__ import annotations

import time
from heapq import heappop, heappush
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

MOST_PINNED = 0.5
"""Share of the blocks. The other half stays in vLLM's own order, which serves turns without ``keep_s``."""
PINNABLE = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
"""Requests that ended by themselves; the next turn of an aborted one is not here."""


class Pins:
    """The pins of one block pool; times are seconds of ``time.monotonic``."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._most = int(MOST_PINNED * pool.num_gpu_blocks)
        self._heap: list[tuple[float, int, list[KVCacheBlock]]] = []
        self._serial = 0
        self._counts: dict[int, int] = {}
        """Number of pins by block id: siblings share the blocks of their prompt."""

    def __len__(self) -> int:
        return len(self._heap)

    def hold(self, blocks: list[KVCacheBlock], until: float) -> None:
        """Pin blocks that are still referenced, in the order of the context."""
        self._pool.touch(blocks)
        for block in blocks:
            self._counts[block.block_id] = self._counts.get(block.block_id, 0) + 1
        self._serial += 1
        heappush(self._heap, (until, self._serial, blocks))
        while len(self._counts) > self._most:
            self.release()

    def release(self) -> bool:
        """End the pin with the earliest expiry; False when there is none."""
        if not self._heap:
            return False
        _, _, blocks = heappop(self._heap)
        for block in blocks:
            left = self._counts.pop(block.block_id) - 1
            if left:
                self._counts[block.block_id] = left
        # The tail is evicted first: without the beginning of its context it is worth nothing.
        self._pool.free_blocks(reversed(blocks))
        return True

    def expire(self, now: float) -> None:
        while self._heap and self._heap[0][0] <= now:
            self.release()

    def clear(self) -> None:
        while self.release():
            pass

    @property
    def next_expiry(self) -> float | None:
        """When the first pin ends by itself; None without pins."""
        return self._heap[0][0] if self._heap else None

    def shares(self) -> tuple[float, float]:
        """(share of the pool that requests hold, share that only pins hold), 0..1, without vLLM's null block."""
        pool = self._pool
        blocks = max(1, pool.num_gpu_blocks - 1)
        alone = sum(pool.blocks[block].ref_cnt == count for block, count in self._counts.items())
        return (blocks - pool.get_num_free_blocks() - alone) / blocks, alone / blocks


class PinningScheduler(Scheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pins = Pins(self.kv_cache_manager.block_pool)
        self._keep: dict[str, float] = {}
        self._allocate = self.kv_cache_manager.allocate_slots
        # Every request, running or waiting, gets its blocks through this method.
        self.kv_cache_manager.allocate_slots = self._allocate_or_release  # type: ignore[method-assign]

    def keep(self, request_id: str, seconds: float) -> None:
        """Pin the blocks of a request for ``seconds`` from its end on."""
        self._keep[request_id] = seconds

    def _allocate_or_release(self, *args: Any, **kwargs: Any) -> KVCacheBlocks | None:
        blocks: KVCacheBlocks | None = self._allocate(*args, **kwargs)
        while blocks is None and self.pins.release():
            blocks = self._allocate(*args, **kwargs)
        return blocks

    def _free_blocks(self, request: Request) -> None:
        seconds = self._keep.pop(request.request_id, 0.0)
        if seconds > 0.0 and request.status in PINNABLE:
            groups = self.kv_cache_manager.get_blocks(request.request_id).blocks
            full = [block for group in groups for block in group if block.block_hash is not None and not block.is_null]
            if full:
                self.pins.hold(full, time.monotonic() + seconds)
        super()._free_blocks(request)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Release all pins, then reset as vLLM does, which needs every block free."""
        self.pins.clear()
        done: bool = super().reset_prefix_cache(*args, **kwargs)
        return done
