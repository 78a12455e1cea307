"""The cap on turns in flight at one engine: additive increase, multiplicative decrease, as TCP finds its window.

Too few turns waste memory bandwidth; too many fill the KV cache, and vLLM preempts sequences.  At every report:

- A sequence was preempted, or KV use > `CUT_AT` -> cap = `CUT_TO` * turns in flight, once per `HOLD_REPORTS`.
- KV use > `GROW_BELOW`, or requests wait inside the engine -> the cap stays.
- Fewer turns than half of the cap are in flight -> the cap stays.
- Otherwise -> the cap rises by `GROW`, at least 1.
"""

from __future__ import annotations

from typing import Final

from libra_hpc.protocol.engine_state import EngineStats

CUT_AT: Final = 0.95
"""Share of the KV cache; the contexts in flight still grow."""
CUT_TO: Final = 0.8
GROW_BELOW: Final = 0.85
"""Share of the KV cache; one increase is small against the distance to `CUT_AT`."""
GROW: Final = 1.0 / 16.0
"""From 16 to 64 turns this takes about 12 s."""
HOLD_REPORTS: Final = 8
"""Reports (4 s) between two cuts: turns over the cap are not cancelled, and each lasts seconds."""
START: Final = 64
"""Turns of a new engine: 64 contexts of 4k tokens fill the cache of a 14B model on one A800."""
FLOOR: Final = 4
"""Turns; a burst of long contexts must not collapse the batch."""


class CapController:
    """The cap of one engine; give every `EngineStats` to `update`."""

    def __init__(self, ceiling: int) -> None:
        self.ceiling = ceiling
        """The run's limit of turns in flight at one engine."""
        self.cap = min(ceiling, START)
        self._hold = 0
        self._preemptions: int | None = None

    def update(self, stats: EngineStats, inflight: int) -> int:
        """The cap after a report; ``inflight`` is the present number of turns."""
        last, self._preemptions = self._preemptions, stats.preemptions
        preempted = last is not None and stats.preemptions > last
        if self._hold:
            self._hold -= 1
        if preempted or stats.kv_use > CUT_AT:
            if not self._hold:
                self.cap = max(min(FLOOR, self.ceiling), min(self.cap, int(CUT_TO * inflight)))
                self._hold = HOLD_REPORTS
        elif stats.kv_use < GROW_BELOW and not stats.waiting and not self._hold and 2 * inflight >= self.cap:
            self.cap = min(self.ceiling, self.cap + max(1, int(GROW * self.cap)))
        return self.cap
