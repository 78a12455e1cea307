"""The engine's figures: totals since start, read off vLLM's own per-request events, and how often they are sent.

``prefill_tokens`` and ``cached_tokens`` split the prompts of requests at their first token into computed and found in
the prefix cache; recomputation after a preemption is not counted again.  ``preemptions`` counts every request put back
into the queue for lack of KV blocks; those that a weight update puts back are not a sign of load and do not count.
``busy_s`` is the time inside engine steps and weight updates, ``update_s`` the latter alone: what steps cost is learned
from the difference.
"""

from __future__ import annotations

from typing import Any

from libra_hpc.protocol.rollout import EngineStats

INTERVAL_S = 0.5
"""Shortest time between two reports of a busy engine: fresh enough for a scheduler that decides in tool gaps, cheap
enough to ignore."""
IDLE_INTERVAL_S = 1.0
"""Between two reports of an idle engine, which say that it is alive.  The shortest deadline in use is a minute."""


class EngineCounters:
    """Running totals of one engine."""

    def __init__(self) -> None:
        self.generated_tokens = 0
        self.prefill_tokens = 0
        self.cached_tokens = 0
        self.preemptions = 0
        self.steps = 0
        self.busy_s = 0.0
        self.update_s = 0.0

    def prefilled(self, stats: Any) -> None:
        """Count a finished prefill (vLLM's ``PrefillStats``)."""
        self.prefill_tokens += stats.num_computed_tokens
        self.cached_tokens += stats.num_cached_tokens

    def message(
        self, version: int, running: int, waiting: int, kv_use: float, kv_pinned: float, asleep: bool
    ) -> EngineStats:
        """The report as it goes to the agent."""
        return EngineStats(
            version=version,
            running=running,
            waiting=waiting,
            kv_use=kv_use,
            generated_tokens=self.generated_tokens,
            prefill_tokens=self.prefill_tokens,
            cached_tokens=self.cached_tokens,
            preemptions=self.preemptions,
            steps=self.steps,
            busy_s=self.busy_s,
            kv_pinned=kv_pinned,
            update_s=self.update_s,
            asleep=asleep,
        )


class Pacer:
    """When to report: at most every ``interval_s`` while busy, and once when the engine falls idle."""

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._last = float("-inf")
        self._was_busy = False

    def due(self, now: float, worked: bool, busy: bool) -> bool:
        """Whether to report now (seconds of any monotonic clock), after a turn of the loop that ran a step
        (``worked``) or not, and left ``busy`` requests."""
        due = now - self._last >= self._interval_s if busy else worked or self._was_busy
        self._was_busy = busy
        if due:
            self._last = now
        return due
