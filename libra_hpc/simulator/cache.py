"""The KV blocks of one replica: held by requests, cached for a later turn, or free.

vLLM's prefix cache (hashed full blocks, evicted least recently used, tail first), per trajectory instead of per block:

* A *chain* is the cached part of one trajectory after its prompt; it loses blocks from its tail.
* A *prompt* is the full blocks of a prompt, which all its samples on this replica share.
* A block enters its prompt when it is scheduled, so a sibling admitted in the same step finds it.  A second copy of
  the same block is never found.
* An evictable block is ordered by last use: when it was freed or, if pinned, when its time to live ends.  Pinned
  blocks therefore go last, and never make a request wait.
* A partly filled block cannot be found again and is free at once.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

MOST_PINNED = 0.5
"""Largest share of the blocks that is pinned, as in the live engine; beyond it the pin that would end first ends."""


class _Cached:
    """A chain or a prompt.  ``users`` requests hold it; it can be evicted when there are none."""

    __slots__ = ("blocks", "pinned", "stamp", "used_at", "users")

    def __init__(self) -> None:
        self.blocks = 0
        self.users = 0
        self.used_at = 0.0
        self.stamp = 0
        """Number of its last entry in the eviction order; 0: none."""
        self.pinned = False


class BlockCache:
    """``total`` blocks: `free`, `evictable` (cached, held by no request), and `held` by requests."""

    def __init__(self, total: int) -> None:
        self.total = self.free = total
        self.evictable = 0
        self.pinned = 0
        """Evictable blocks whose time to live had not ended at the last `expire`."""
        self._chains: dict[str, _Cached] = {}
        self._prompts: dict[str, _Cached] = {}
        self._order: list[tuple[float, int, _Cached]] = []
        self._pins: list[tuple[float, int, _Cached]] = []
        self._stamps = 0
        self._most = 256

    def __len__(self) -> int:
        """Entries stored, outdated ones included: what `_compact` bounds."""
        return len(self._chains) + len(self._prompts) + len(self._order) + len(self._pins)

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
            _, stamp, entry = order[0]
            if stamp != entry.stamp:
                heappop(order)
                continue
            gone = min(blocks, entry.blocks)
            entry.blocks -= gone
            self.evictable -= gone
            if entry.pinned:
                self.pinned -= gone
            blocks -= gone
            if not entry.blocks:
                heappop(order)
                entry.stamp = 0
                entry.pinned = False

    def release(self, trajectory: str, prompt: str, own: int, rest: int, now: float, keep_s: float = 0.0) -> None:
        """A request ends: its ``own`` blocks stay cached as a chain, ``rest`` cannot be found again."""
        self.free += rest
        if own:
            chain = self._chains[trajectory] = _Cached()
            chain.blocks = own
            self._enter(chain, now, now + keep_s)
        shared = self._prompts[prompt]
        shared.users -= 1
        shared.used_at = max(shared.used_at, now + keep_s)
        if not shared.users and shared.blocks:
            # After the chain, which cannot be found without its prompt.
            self._enter(shared, now, shared.used_at)
        if len(self) > self._most:
            self._compact()
        while self.pinned > MOST_PINNED * self.total:
            self._end_pin(now)

    def holds(self, trajectory: str, any_of: bool) -> bool:
        """Whether a trajectory has a pinned chain or, with ``any_of``, any chain."""
        chain = self._chains.get(trajectory)
        return chain is not None and (any_of or chain.pinned)

    def unpin(self, trajectory: str, now: float) -> None:
        chain = self._chains.get(trajectory)
        if chain is not None and chain.pinned:
            self._withdraw(chain)
            self._enter(chain, now, now)

    def drop(self, trajectory: str) -> None:
        """Free the chain of a trajectory, which restarts with other tokens."""
        chain = self._chains.pop(trajectory, None)
        if chain is not None:
            self._withdraw(chain)
            self.free += chain.blocks

    def expire(self, now: float) -> None:
        """End the pins whose time to live is over."""
        pins = self._pins
        while pins and (pins[0][0] <= now or pins[0][1] != pins[0][2].stamp):
            _, stamp, entry = heappop(pins)
            if stamp == entry.stamp:
                entry.pinned = False
                self.pinned -= entry.blocks

    def clear(self) -> None:
        """Empty the cache; no request may hold anything."""
        self.free, self.evictable, self.pinned = self.total, 0, 0
        self._chains.clear()
        self._prompts.clear()
        self._order.clear()
        self._pins.clear()

    def _enter(self, entry: _Cached, now: float, used_at: float) -> None:
        self._stamps += 1
        entry.stamp = self._stamps
        entry.used_at = used_at
        self.evictable += entry.blocks
        heappush(self._order, (used_at, entry.stamp, entry))
        entry.pinned = used_at > now
        if entry.pinned:
            self.pinned += entry.blocks
            heappush(self._pins, (used_at, entry.stamp, entry))

    def _withdraw(self, entry: _Cached) -> None:
        if entry.stamp:
            self.evictable -= entry.blocks
            if entry.pinned:
                self.pinned -= entry.blocks
                entry.pinned = False
            entry.stamp = 0

    def _end_pin(self, now: float) -> None:
        self.expire(now)
        if self.pinned > MOST_PINNED * self.total:
            _, _, entry = heappop(self._pins)
            self._withdraw(entry)
            self._enter(entry, now, now)

    def _compact(self) -> None:
        for order in (self._order, self._pins):
            order[:] = [item for item in order if item[1] == item[2].stamp]
            heapify(order)
        self._chains = {name: entry for name, entry in self._chains.items() if entry.blocks}
        self._prompts = {name: entry for name, entry in self._prompts.items() if entry.blocks or entry.users}
        # Twice what is left: the amortized work per name stays constant.
        self._most = 256 + 2 * len(self)
