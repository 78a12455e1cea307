"""The KV blocks of one replica: held by requests, cached for a later turn, or free.

vLLM's prefix cache (hashed full blocks, evicted least recently used, tail first), per trajectory instead of per block:

* A *chain* is the cached part of one trajectory after its prompt; it loses blocks from its tail.
* A *prompt* is the full blocks of a prompt, which all its samples on this replica share.
* A block enters its prompt when it is scheduled, so a sibling admitted in the same step finds it.  A second copy of
  the same block is never found.
* Evictable blocks go in the order in which they were freed.
* A partly filled block cannot be found again and is free at once.
"""

from __future__ import annotations

from collections import OrderedDict


class _Cached:
    """A chain or a prompt.  ``users`` requests hold it; it can be evicted when there are none."""

    __slots__ = ("blocks", "users")

    def __init__(self) -> None:
        self.blocks = 0
        self.users = 0


class BlockCache:
    """``total`` blocks: `free`, `evictable` (cached, held by no request), and `held` by requests."""

    def __init__(self, total: int) -> None:
        self.total = self.free = total
        self.evictable = 0
        self._chains: dict[str, _Cached] = {}
        self._prompts: dict[str, _Cached] = {}
        self._order: OrderedDict[_Cached, None] = OrderedDict()
        """Evictable chains and prompts, first to go first."""
        self._most = 256

    def __len__(self) -> int:
        """Chains and prompts stored, empty ones included: what `_compact` bounds."""
        return len(self._chains) + len(self._prompts)

    @property
    def available(self) -> int:
        return self.free + self.evictable

    @property
    def held(self) -> int:
        return self.total - self.free - self.evictable

    def find(self, trajectory: str, prompt: str, prompt_blocks: int, most: int) -> tuple[int, int, int]:
        """At most ``most`` reusable blocks: (of the prompt, after it, evictable ones that `bind` would take)."""
        shared = self._prompts.get(prompt)
        if shared is None:
            own = self._chains.get(trajectory) if not prompt_blocks else None
            found = min(own.blocks, most) if own else 0
            return 0, found, found
        bound = 0 if shared.users else shared.blocks
        found = min(shared.blocks, most)
        own = self._chains.get(trajectory) if shared.blocks >= prompt_blocks else None
        after = min(own.blocks, most - found) if own else 0
        return found, after, bound + after

    def bind(self, trajectory: str, prompt: str, own: int) -> None:
        """Bind what `find` found: the prompt, and ``own`` blocks of the chain, the rest of which becomes free."""
        shared = self._prompts.get(prompt)
        if shared is None:
            shared = self._prompts[prompt] = _Cached()
        if not shared.users:
            self._withdraw(shared)
        shared.users += 1
        chain = self._chains.pop(trajectory, None)
        if chain is not None:
            self._withdraw(chain)
            self.free += chain.blocks - own

    def publish(self, prompt: str, full: int) -> int:
        """A request computes the first ``full`` blocks of a prompt; returns how many of them the prompt takes over."""
        entry = self._prompts[prompt]
        gain = max(0, full - entry.blocks)
        entry.blocks += gain
        return gain

    def take(self, blocks: int) -> None:
        """Take ``blocks`` new blocks, evicting the least recently used; there must be that many `available`."""
        if blocks <= self.free:
            self.free -= blocks
            return
        blocks -= self.free
        self.free = 0
        order = self._order
        while blocks:
            entry = next(iter(order))
            gone = min(blocks, entry.blocks)
            entry.blocks -= gone
            self.evictable -= gone
            blocks -= gone
            if not entry.blocks:
                del order[entry]

    def release(self, trajectory: str, prompt: str, own: int, rest: int) -> None:
        """A request ends: its ``own`` blocks stay cached as a chain, ``rest`` cannot be found again."""
        self.free += rest
        if own:
            chain = self._chains[trajectory] = _Cached()
            chain.blocks = own
            self._enter(chain)
        shared = self._prompts[prompt]
        shared.users -= 1
        if not shared.users and shared.blocks:
            # After the chain, which cannot be found without its prompt.
            self._enter(shared)
        if len(self) > self._most:
            self._compact()

    def clear(self) -> None:
        """Empty the cache; no request may hold anything."""
        self.free, self.evictable = self.total, 0
        self._chains.clear()
        self._prompts.clear()
        self._order.clear()

    def _enter(self, entry: _Cached) -> None:
        self.evictable += entry.blocks
        self._order[entry] = None

    def _withdraw(self, entry: _Cached) -> None:
        if entry in self._order:
            del self._order[entry]
            self.evictable -= entry.blocks

    def _compact(self) -> None:
        self._chains = {name: entry for name, entry in self._chains.items() if entry.blocks}
        self._prompts = {name: entry for name, entry in self._prompts.items() if entry.blocks or entry.users}
        # Twice what is left: the amortized work per name stays constant.
        self._most = 256 + 2 * len(self)
