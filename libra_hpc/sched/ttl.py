"""Time to live of a KV cache while a tool runs, per tool (the idea of Continuum, arXiv 2511.02230).

Retaining c tokens until time t saves their prefill if the tool, of duration D, returns by then.  It occupies c /
capacity of the cache for min(D, t) seconds.  Per token, for a full cache:

    gain(t) = P(D <= t) * prefill_s - E[min(D, t)] / capacity

- A tool without measured durations -> those of all tools.
- No measurement at all -> 0: the engine's own eviction decides.
"""

from __future__ import annotations

from collections import deque
from typing import Final

WINDOW: Final = 64
"""Last durations of a tool that count."""
KEEP_SLACK: Final = 1.25
"""Times the best t, for durations just above the longest one within it."""
REFRESH: Final = 16
"""Durations of a tool between two searches."""
MAX_TOOLS: Final = 256
"""Tools with their own durations; later ones count under all tools only."""
ALL_TOOLS: Final = ""


class _Tool:
    __slots__ = ("chosen", "count", "durations")

    def __init__(self) -> None:
        self.durations: deque[float] = deque(maxlen=WINDOW)
        self.count = 0
        self.chosen: dict[int, float] = {}


class KeepTimes:
    """Learns tool durations and returns how long to retain a cache."""

    def __init__(self) -> None:
        self._tools: dict[str, _Tool] = {ALL_TOOLS: _Tool()}

    def learn(self, tool: str, seconds: float) -> None:
        """One call of ``tool`` took ``seconds``."""
        known = self._tools.get(tool)
        if known is None and len(self._tools) <= MAX_TOOLS:
            known = self._tools[tool] = _Tool()
        for one in (known, self._tools[ALL_TOOLS]):
            if one is not None:
                one.durations.append(seconds)
                one.count += 1
                if one.count % REFRESH == 0 or one.count <= REFRESH:
                    one.chosen.clear()

    def keep_s(self, tool: str, tp: int, prefill_s: float, kv_capacity: int) -> float:
        """Seconds to retain a cache on a replica of ``tp`` devices.

        ``prefill_s`` is per token, ``kv_capacity`` in tokens.  A result stands for `REFRESH` durations of the tool,
        even if ``prefill_s`` changes.
        """
        known = self._tools.get(tool)
        if known is None:
            known = self._tools[ALL_TOOLS]
        chosen = known.chosen.get(tp)
        if chosen is None:
            chosen = known.chosen[tp] = best_keep_s(sorted(known.durations), prefill_s, kv_capacity)
        return chosen


def best_keep_s(durations: list[float], prefill_s: float, kv_capacity: int) -> float:
    """The time to live with the largest gain; ``durations`` in seconds, ascending."""
    size = len(durations)
    best, chosen, before = 0.0, 0.0, 0.0
    for i, t in enumerate(durations):
        before += t
        held = (before + (size - i - 1) * t) / size
        gain = (i + 1) / size * prefill_s - held / kv_capacity
        if gain > best:
            best, chosen = gain, KEEP_SLACK * t
    return chosen
