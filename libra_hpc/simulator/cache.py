"""The KV blocks of one replica: held by requests, cached for a later turn, or free.

vLLM hashes every full block over the whole context before it and frees a request's blocks tail first into one queue,
from whose old end new blocks are taken.  The same, kept per trajectory instead of per block:

* a *chain* is the cached part of one trajectory after its prompt; it loses blocks from its tail;
* a *prompt* is the full blocks of a prompt, shared by all its samples on this replica.  A block enters it when it is
  scheduled for computation, so that a sibling admitted in the same step finds it; one that computes a block which is
  there already holds a copy that nobody finds.

Everything evictable stands in one order, the time at which it counts as last used: when it was freed, or, if it is
kept, when its time to live ends. Kept blocks therefore go last, and only when nothing else is left; they never make a
request wait.  At most `MOST_PINNED` = 0.5 of the blocks are kept, as in the live engine: beyond that the keep that
would end first ends now.  Partly filled blocks cannot be found again and are free at once.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

MOST_PINNED = 0.5


class _Cached:
    """Blocks in the order of eviction.  ``users`` requests hold them; only those with none can be evicted."""

    __slots__ = ("blocks", "kept", "stamp", "used_at", "users")

    def __init__(self) -> None:
        self.blocks = 0
        self.users = 0
        self.used_at = 0.0
        self.stamp = 0
        """Number of its last entry in the order; 0: none."""
        self.kept = False


class BlockCache:
    """``total`` blocks; `free` were never used or are evicted, `evictable` are cached and held by no request."""

    def __init__(self, total: int) -> None:
        self.total = self.free = total
        self.evictable = 0
        self.kept = 0
        """Evictable blocks whose time to live is not over, as of the last `expire`."""
        self._chains: dict[str, _Cached] = {}
        self._prompts: dict[str, _Cached] = {}
        self._order: list[tuple[float, int, _Cached]] = []
        self._keeps: list[tuple[float, int, _Cached]] = []
        self._stamps = 0
        self._most = 256

    def __len__(self) -> int:
        """Names and places in orders that are remembered."""
        return len(self._chains) + len(self._prompts) + len(self._order) + len(self._keeps)

    @property
    def available(self) -> int:
        """Blocks a request can get."""
        return self.free + self.evictable

    @property
    def held(self) -> int:
        """Blocks that requests hold."""
        return self.total - self.free - self.evictable

    def find(self, trajectory: str, prompt: str, prompt_blocks: int, most: int) -> tuple[int, int, int]:
        """What a request of at most ``most`` reusable blocks finds: (blocks of its prompt, blocks after it,
        evictable blocks it would bind)."""
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
        """Give a request what `find` found: it uses the prompt, and ``own`` blocks of its chain, the rest of which
        is free."""
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
        """A request computes the first ``full`` blocks of a prompt; returns how many of its own blocks the prompt
        takes over."""
        entry = self._prompts[prompt]
        gain = max(0, full - entry.blocks)
        entry.blocks += gain
        return gain

    def take(self, blocks: int) -> None:
        """Bind ``blocks`` new blocks, evicting the least recently used; there must be that many `available`."""
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
            if entry.kept:
                self.kept -= gone
            blocks -= gone
            if not entry.blocks:
                heappop(order)
                entry.stamp = 0
                entry.kept = False

    def release(self, trajectory: str, prompt: str, own: int, rest: int, now: float, keep_s: float = 0.0) -> None:
        """A request gives back its blocks: ``own`` stay cached after the prompt's, ``rest`` cannot be found again."""
        self.free += rest
        if own:
            chain = self._chains[trajectory] = _Cached()
            chain.blocks = own
            self._enter(chain, now, now + keep_s)
        shared = self._prompts[prompt]
        shared.users -= 1
        shared.used_at = max(shared.used_at, now + keep_s)
        if not shared.users and shared.blocks:
            # After the chain: without its prompt a chain is worth nothing.
            self._enter(shared, now, shared.used_at)
        if len(self) > self._most:
            self._compact()
        while self.kept > MOST_PINNED * self.total:
            self._end_keep(now)

    def holds(self, trajectory: str, any_of: bool) -> bool:
        """Whether a trajectory has a chain that is kept, or any at all."""
        chain = self._chains.get(trajectory)
        return chain is not None and (any_of or chain.kept)

    def unkeep(self, trajectory: str, now: float) -> None:
        """A trajectory ended: its chain is kept no longer."""
        chain = self._chains.get(trajectory)
        if chain is not None and chain.kept:
            self._withdraw(chain)
            self._enter(chain, now, now)

    def drop(self, trajectory: str) -> None:
        """A trajectory starts anew with other tokens: its chain will never be found."""
        chain = self._chains.pop(trajectory, None)
        if chain is not None:
            self._withdraw(chain)
            self.free += chain.blocks

    def expire(self, now: float) -> None:
        """Bring `kept` up to date."""
        keeps = self._keeps
        while keeps and (keeps[0][0] <= now or keeps[0][1] != keeps[0][2].stamp):
            _, stamp, entry = heappop(keeps)
            if stamp == entry.stamp:
                entry.kept = False
                self.kept -= entry.blocks

    def clear(self) -> None:
        """Forget everything; no request may hold anything."""
        self.free, self.evictable, self.kept = self.total, 0, 0
        self._chains.clear()
        self._prompts.clear()
        self._order.clear()
        self._keeps.clear()

    def _enter(self, entry: _Cached, now: float, used_at: float) -> None:
        self._stamps += 1
        entry.stamp = self._stamps
        entry.used_at = used_at
        self.evictable += entry.blocks
        heappush(self._order, (used_at, entry.stamp, entry))
        entry.kept = used_at > now
        if entry.kept:
            self.kept += entry.blocks
            heappush(self._keeps, (used_at, entry.stamp, entry))

    def _withdraw(self, entry: _Cached) -> None:
        if entry.stamp:
            self.evictable -= entry.blocks
            if entry.kept:
                self.kept -= entry.blocks
                entry.kept = False
            entry.stamp = 0

    def _end_keep(self, now: float) -> None:
        self.expire(now)
        if self.kept > MOST_PINNED * self.total:
            _, _, entry = heappop(self._keeps)
            self._withdraw(entry)
            self._enter(entry, now, now)

    def _compact(self) -> None:
        """Drop outdated entries, and names under which nothing is left."""
        for order in (self._order, self._keeps):
            order[:] = [item for item in order if item[1] == item[2].stamp]
            heapify(order)
        self._chains = {name: entry for name, entry in self._chains.items() if entry.blocks}
        self._prompts = {name: entry for name, entry in self._prompts.items() if entry.blocks or entry.users}
        # Twice what is left: the work per name stays constant.
        self._most = 256 + 2 * len(self)
