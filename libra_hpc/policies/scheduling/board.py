"""The board: the current state of every engine, updated in constant time per turn.

The rollout leader or the simulator writes it; policies read it.  Engines of one tensor-parallel degree form a *TP
class*; the index of a class, in ascending degree, is its *level*, a bucket of C-MLFQ.

- A turn is sent or answered -> tokens and slots of its engine change.  A trajectory in a tool call counts nowhere.
- An engine reports (twice a second) -> the step costs of its class and its own (`costs`).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from itertools import count
from math import inf
from typing import Final

from libra_hpc.protocol.engine_state import EngineStats

from .costs import PACE_BAND, WINDOW_STEPS, ClassFit, Coefficients, EngineFit, default_costs, scaled_costs

REFIT_EVERY: Final = 16
"""Observations of a class between two refits (25 us); each of the first 16 refits.  The window holds 64."""

_generations = count(1)


class EngineView:
    """State of one vLLM replica; only the `Board` changes it."""

    def __init__(self, engine: str, tp: int, kv_capacity: int, cap: int, version: int, tp_class: TpClass) -> None:
        self.engine = engine
        self.tp = tp
        self.tp_class = tp_class
        self.kv_capacity = kv_capacity
        """Tokens."""
        self.cap = cap
        """Most turns in flight."""
        self.version = version
        self.open = True
        """False while it drains or lacks the newest weights."""
        self.inflight = 0
        """Turns sent and not answered."""
        self.inflight_tokens = 0
        """Context tokens of those turns when they were sent."""
        self.kv_use = 0.0
        """Share of the KV cache, 0..1, as last reported."""
        self.base_s = self.slope_s = self.prefill_s = 0.0
        """Its seconds per empty decode step, per KV token in use, and per prefilled token."""
        self.pace = 1.0
        """These seconds over those of its class, the median engine's."""
        self.fit = EngineFit()
        self.borrowed = False
        """Whether it is another job's, which may pause it or take it back."""
        self.share = 1.0
        """Share of the time that a borrowed engine runs."""

    @property
    def level(self) -> int:
        """Index of its TP class."""
        return self.tp_class.level

    @property
    def free(self) -> int:
        """Turns that may still be sent."""
        return max(0, self.cap - self.inflight) if self.open else 0

    @property
    def decode_s(self) -> float:
        """Seconds per token of one sequence at the KV use last reported; 0.0 before any report of its class."""
        measured = self.tp_class.fit.count > 0
        return self.base_s + self.slope_s * self.kv_use * self.kv_capacity if measured else 0.0


class TpClass:
    """The engines of one TP degree."""

    def __init__(self, tp: int) -> None:
        self.tp = tp
        self.level = 0
        self.members: list[EngineView] = []
        self.base_s = self.slope_s = self.prefill_s = 0.0
        """Seconds per empty decode step, per KV token in use, and per prefilled token, of its median engine."""
        self.fit = ClassFit()


class Board:
    """Load and step costs of all engines.

    `answered`, `report` and `down` ignore engines that are not up; other methods raise `KeyError`.
    """

    def __init__(self, max_inflight: int) -> None:
        self.max_inflight = max_inflight
        """Most turns in flight at one engine."""
        self.engines: dict[str, EngineView] = {}
        self.classes: list[TpClass] = []
        """In ascending TP; the index is the level."""
        self.free = 0
        """Free slots of all open engines."""
        self.room_key = inf
        """Key of the first turn that waits for room in a KV cache; the `Dispatcher` writes it."""
        self.generation = next(_generations)
        """Changes with engines and class costs; unique across boards."""

    def up(
        self,
        engine: str,
        tp: int,
        kv_capacity: int,
        version: int,
        warm_up: Sequence[EngineStats] = (),
        borrowed: bool = False,
    ) -> EngineView:
        """Add or replace an engine; ``warm_up`` are the reports of its warm-up profile, the first step costs."""
        if engine in self.engines:
            self.down(engine)
        tp_class = next((c for c in self.classes if c.tp == tp), None)
        if tp_class is None:
            tp_class = TpClass(tp)
            insort(self.classes, tp_class, key=lambda c: c.tp)
        view = self.engines[engine] = EngineView(
            engine, tp=tp, kv_capacity=kv_capacity, cap=self.max_inflight, version=version, tp_class=tp_class
        )
        view.borrowed = borrowed
        tp_class.members.append(view)
        for stats in warm_up:
            self._observe(view, stats, 1)
        view.fit.restart()
        self._recost()
        self.free += view.free
        return view

    def down(self, engine: str) -> EngineView | None:
        """Remove an engine and its turns in flight."""
        view = self.engines.pop(engine, None)
        if view is None:
            return None
        self.free -= view.free
        tp_class = view.tp_class
        tp_class.members.remove(view)
        view.open = False
        if not tp_class.members:
            self.classes.remove(tp_class)
        self._recost()
        return view

    def lends(self, engine: str, share: float) -> None:
        """What is left of a borrowed engine."""
        self.engines[engine].share = share
        self._recost()

    def set_open(self, engine: str, is_open: bool) -> None:
        """Allow or stop new turns at an engine."""
        view = self.engines[engine]
        if view.open != is_open:
            self.free -= view.free
            view.open = is_open
            self.free += view.free

    def sent(self, engine: str, tokens: int) -> None:
        """A turn of ``tokens`` context tokens is in flight."""
        view = self.engines[engine]
        if view.open and view.inflight < view.cap:
            self.free -= 1
        view.inflight += 1
        view.inflight_tokens += tokens

    def answered(self, engine: str, tokens: int) -> None:
        """A turn sent with ``tokens`` is no longer in flight."""
        view = self.engines.get(engine)
        if view is None:
            return
        view.inflight -= 1
        view.inflight_tokens -= tokens
        if view.open and view.inflight < view.cap:
            self.free += 1

    def applied(self, engine: str, version: int) -> None:
        """An engine has applied a weight version."""
        self.engines[engine].version = version

    def report(self, engine: str, stats: EngineStats) -> None:
        """Update load, speed and class costs from an engine's counters."""
        view = self.engines.get(engine)
        if view is None:
            return
        view.kv_use = stats.kv_use
        count = view.tp_class.fit.count
        if self._observe(view, stats, WINDOW_STEPS) and (count < REFIT_EVERY or (count + 1) % REFIT_EVERY == 0):
            self._recost()

    @staticmethod
    def _observe(view: EngineView, stats: EngineStats, steps: int) -> bool:
        """Add what the engine did to its fit and that of its class; False if it did fewer ``steps``."""
        window = view.fit.observe(stats, view.kv_capacity, steps)
        if window is None:
            return False
        tp_class = view.tp_class
        # Before, the costs of the class are hardly more than assumed.
        if tp_class.fit.count >= REFIT_EVERY:
            view.fit.compare(window, (tp_class.base_s, tp_class.slope_s, tp_class.prefill_s))
        tp_class.fit.add(window, view.pace)
        return True

    def _recost(self) -> None:
        self.generation = next(_generations)
        measured = [c for c in self.classes if c.fit.count]
        for level, c in enumerate(self.classes):
            c.level = level
            prior = default_costs(c.tp, c.members[0].kv_capacity)
            if measured and not c.fit.count:
                near = min(measured, key=lambda m: max(m.tp / c.tp, c.tp / m.tp))
                prior = scaled_costs(near.fit.solve(default_costs(near.tp, near.members[0].kv_capacity)), near.tp, c.tp)
            _price(c, c.fit.solve(prior))


def _price(tp_class: TpClass, costs: Coefficients) -> None:
    """Set the costs of a class, those of its median engine, and of its engines."""
    tp_class.base_s, tp_class.slope_s, tp_class.prefill_s = costs
    paces = [view.fit.pace for view in tp_class.members]
    own = [view.fit.pace for view in tp_class.members if not view.borrowed] or paces
    median = sorted(own)[len(own) // 2]
    for view, measured in zip(tp_class.members, paces, strict=True):
        pace = measured / median
        if 1.0 / PACE_BAND < pace < PACE_BAND:
            pace = 1.0
        if view.borrowed:
            pace /= view.share
        view.pace = pace
        view.base_s, view.slope_s, view.prefill_s = pace * costs[0], pace * costs[1], pace * costs[2]
