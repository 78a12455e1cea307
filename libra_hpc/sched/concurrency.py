"""How many turns one engine may have in flight: additive increase, multiplicative decrease on its KV use and
preemptions.

Too few turns leave memory bandwidth unused, because a decode step costs almost the same for one sequence as for many;
too many fill the KV cache, and vLLM then preempts sequences and computes their whole context again.  The right number
follows from context lengths that nobody knows beforehand and that grow during a step, so it is found the way TCP finds
a window, from what each report (twice a second) says:

* *cut*: sequences were preempted since the last report, or KV use is above `CUT_AT` = 0.95: the cap becomes `CUT_TO` =
  0.8 of the turns in flight.  One cut, then no other for `HOLD_REPORTS` = 8 reports (4 s), because the turns over the
  cap are not cancelled, only not replaced, and a turn lasts seconds.
* *hold*: KV use above `GROW_BELOW` = 0.85, or requests wait inside the engine: it has enough.  The cap is not raised,
  and stays.
* *grow*: otherwise, when the engine uses at least half of its cap (an unused cap says nothing): the cap rises by `GROW`
  = 1/16 of itself, at least one. From 16 to 64 that takes some 12 s; the step is small against the distance between
  `GROW_BELOW` and `CUT_AT`.

A fresh engine starts at `START` = 64 turns, the most the controller assumes without evidence (64 contexts of 4k tokens
fill a 14B model's cache on one A800); `FLOOR` = 4 keeps the batch from collapsing on a burst of long contexts.  The
run's own limit is the ceiling throughout.
"""

from __future__ import annotations

from typing import Final

from libra_hpc.protocol.rollout import EngineStats

CUT_AT: Final = 0.95
CUT_TO: Final = 0.8
GROW_BELOW: Final = 0.85
GROW: Final = 1.0 / 16.0
HOLD_REPORTS: Final = 8
START: Final = 64
FLOOR: Final = 4


class CapController:
    """The state of one engine's cap; feed every `EngineStats` to `update`."""

    __slots__ = ("_hold", "_preemptions", "cap", "ceiling")

    def __init__(self, ceiling: int) -> None:
        self.ceiling = ceiling
        """Ceiling: the run's most turns in flight at one engine."""
        self.cap = min(ceiling, START)
        self._hold = 0
        self._preemptions: int | None = None

    def update(self, stats: EngineStats, inflight: int) -> int:
        """The cap after a report; ``inflight`` is the number of turns in flight at the engine now."""
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
