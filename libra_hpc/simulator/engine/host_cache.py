"""KV blocks of one replica in host memory, behind its cache on the device, as vLLM's offloading connector holds them.

- A turn ends -> its blocks are copied to the host, where they stay when the device evicts them.
- A request finds fewer blocks on the device than here -> the rest is read over PCIe instead of computed again.
- Host memory is full -> the trajectory or prompt that was used least recently goes, whole.
- New weights -> everything goes.

Copies to the host overlap with steps, as they do in vLLM.  Reads do not: the step that needs them takes so much longer.
"""

from __future__ import annotations

from collections import OrderedDict

from libra_hpc.models.capacity import HostMemory


class HostCache:
    """At most ``total`` blocks; reading one takes ``block_s`` seconds."""

    def __init__(self, total: int, block_s: float) -> None:
        self.block_s = block_s
        self._free = total
        self._held: OrderedDict[str, int] = OrderedDict()

    def beyond(self, trajectory: str, prompt: str, *, shared: int, own: int, prompt_blocks: int, most: int) -> int:
        """Blocks here that follow the ``shared`` and ``own`` ones found on the device; at most ``most`` in all."""
        found = min(max(shared, self._held.get(_of_prompt(prompt), 0)), most)
        if found < prompt_blocks:
            return found - shared
        return min(found + max(own, self._held.get(trajectory, 0)), most) - shared - own

    def store(self, trajectory: str, prompt: str, *, own: int, prompt_blocks: int) -> None:
        """A turn ended with ``own`` full blocks after those of its prompt."""
        for name, blocks in ((_of_prompt(prompt), prompt_blocks), (trajectory, own)):
            if blocks:
                self._free -= blocks - self._held.pop(name, 0)
                self._held[name] = blocks
        while self._free < 0:
            self._free += self._held.popitem(last=False)[1]

    def clear(self) -> None:
        self._free += sum(self._held.values())
        self._held.clear()


def host_cache(memory: HostMemory | None, block_size: int) -> HostCache | None:
    """The cache in this memory; None without any."""
    return None if memory is None else HostCache(memory.tokens // block_size, block_size / memory.tokens_s)


def _of_prompt(prompt: str) -> str:
    return f"prompt/{prompt}"
