"""How long a trajectory's KV cache is worth keeping while its tool runs (the idea of Continuum, arXiv 2511.02230: a
time to live per tool).

Keeping c tokens until time t into the tool call saves their prefill, c * prefill_s, if the tool returns by then; and it
takes c / capacity of the engine's cache for min(D, t) seconds, D the tool's duration, which costs that share of the
engine's time as far as the cache is short of room.  Per token:

    gain(t) = P(D <= t) * prefill_s - scarcity * E[min(D, t)] / capacity,      scarcity = 1 (a cache that is full; with
    room to spare nothing is evicted anyway)

so c cancels, and the best t depends on the tool and the engine class alone.  t is searched over the measured durations
themselves, the last `KEPT` = 64 of each tool; `SLACK` = 1.25 of the best one is kept, for durations just beyond the
longest seen within it.  A tool not measured yet takes the durations of all tools; with none at all, 0: the engine's own
eviction decides.  Choices are cached and searched anew every `REFRESH` = 16 durations of a tool.
"""

from __future__ import annotations

from collections import deque
from typing import Final

WINDOW: Final = 64
KEEP_SLACK: Final = 1.25
REFRESH: Final = 16
MAX_TOOLS: Final = 256
"""Tools told apart; later ones count as "all tools" only."""
ALL_TOOLS: Final = ""


class _Tool:
    __slots__ = ("chosen", "count", "durations")

    def __init__(self) -> None:
        self.durations: deque[float] = deque(maxlen=WINDOW)
        self.count = 0
        self.chosen: dict[int, float] = {}


class KeepTimes:
    """Learns tool durations, answers how long to keep a cache."""

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
        """Seconds to keep a cache on a replica of ``tp`` devices; ``prefill_s`` seconds per token, ``kv_capacity``
        tokens.

        A choice stands until the tool's durations are searched again, even if ``prefill_s`` moved a little since.
        """
        known = self._tools.get(tool)
        if known is None:
            known = self._tools[ALL_TOOLS]
        chosen = known.chosen.get(tp)
        if chosen is None:
            chosen = known.chosen[tp] = best_keep_s(sorted(known.durations), prefill_s, kv_capacity)
        return chosen


def best_keep_s(durations: list[float], prefill_s: float, kv_capacity: int) -> float:
    """The time to live that maximises the gain of the module; ``durations`` ascending, seconds."""
    size = len(durations)
    best, chosen, before = 0.0, 0.0, 0.0
    for i, t in enumerate(durations):
        before += t
        held = (before + (size - i - 1) * t) / size
        gain = (i + 1) / size * prefill_s - held / kv_capacity
        if gain > best:
            best, chosen = gain, KEEP_SLACK * t
    return chosen
