"""How much of its KV caches a borrowed engine may use while its owner's server needs memory.

After ROSE (arXiv 2605.06534, section 4.2), with a thaw by time instead of its freeze to the next step:

- The server's KV use crosses the mark (1 - ``headroom``) -> the share is cut to half, once.
- It is above the mark still, or again, ``settle_s`` after the cut -> the engine is frozen: it keeps no cache.
- The use stayed below the lower mark (1 - 2 x ``headroom``) for a while -> one step back: half, then whole.  That while
  doubles whenever a cut follows within it, up to `LONGEST` times, so that a server at the mark makes nobody flap.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

SHARES = (0.0, 0.5, 1.0)
"""Frozen, cut, whole."""
LONGEST = 32
"""Most times ``thaw_s`` that the server must be calm."""


class KvShareRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the owner wants; shares are of the server's KV caches."""

    headroom: Annotated[float, msgspec.Meta(gt=0, lt=0.5)] = 0.2
    """That the server finds free at any time."""
    settle_s: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    """Until a cut shows in what the server uses."""
    thaw_s: Annotated[float, msgspec.Meta(gt=0)] = 10.0


class KvShare:
    """The share of one borrowed engine; times are seconds of any monotonic clock."""

    def __init__(self, rule: KvShareRule) -> None:
        self._rule = rule
        self._level = len(SHARES) - 1
        self._changed = float("-inf")
        self._calm_since: float | None = None
        self._calm_times = 1
        self._thawed = False
        """Whether the last change gave memory back to the engine."""

    @property
    def share(self) -> float:
        return SHARES[self._level]

    def decide(self, used: float, now: float) -> float:
        """The share from now on; ``used``: share of the server's KV caches in use."""
        mark = 1 - self._rule.headroom
        if used > mark - self._rule.headroom or self.share == 1:
            self._calm_since = None
        elif self._calm_since is None:
            self._calm_since = now
        if used > mark:
            self._take(now)
        elif self._calm_since is not None and now - self._calm_since >= self._calm_times * self._rule.thaw_s:
            self._level, self._changed, self._thawed, self._calm_since = self._level + 1, now, True, now
        return self.share

    def _take(self, now: float) -> None:
        if self.share == 0 or now - self._changed < self._rule.settle_s:
            return
        if self._thawed:
            soon = now - self._changed < self._calm_times * self._rule.thaw_s
            self._calm_times = min(LONGEST, 2 * self._calm_times) if soon else 1
        self._level, self._changed, self._thawed = self._level - 1, now, False
