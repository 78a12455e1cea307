"""The engine's counters since the start, from vLLM's per-request events, and the pace of its reports.

``prefill_tokens``, ``cached_tokens``: prompt tokens computed, and found in the prefix cache, at the first token of a
request; recomputation does not count. ``preemptions``: for lack of KV blocks, not by weight updates. ``busy_s``: in
steps and weight updates; ``update_s``: in weight updates alone.
"""

from __future__ import annotations

import msgspec

INTERVAL_S = 0.5
"""Least seconds between two reports of a busy engine: shorter than most tool calls, and cheap."""
IDLE_INTERVAL_S = 1.0
"""Seconds between two reports of an idle engine (heartbeat); the shortest deadline in use is a minute."""


class EngineCounters(msgspec.Struct):
    """The totals of an `EngineStats`."""

    generated_tokens: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    busy_s: float = 0.0
    update_s: float = 0.0


class Pacer:
    """When to report: at most every `INTERVAL_S` while busy, and once when the engine falls idle."""

    def __init__(self) -> None:
        self._last = float("-inf")
        self._was_busy = False

    def due(self, now: float, worked: bool, busy: bool) -> bool:
        """Whether to report now (seconds of any monotonic clock), after one pass of the loop.

        ``worked``: the pass ran a step. ``busy``: requests are left.
        """
        due = now - self._last >= INTERVAL_S if busy else worked or self._was_busy
        self._was_busy = busy
        if due:
            self._last = now
        return due
