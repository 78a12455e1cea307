"""The lenders of a simulation: their engines join, pause, are taken back, and return.

- A lender's device is free -> after ``join_s`` its engine takes turns, with the newest weights.
- Its gate closes -> turns stand still.  Who stands longer than its patience goes elsewhere; after `CLOSE_S` none comes.
- The owner takes it back -> all its turns go elsewhere with the tokens they have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from msgspec.structs import replace

from libra_hpc.models.step_times.steps import StepTimes
from libra_hpc.policies.scheduling.availability import Availability
from libra_hpc.policies.scheduling.board import Board

from .event_queue import Events
from .lent_engine import LentEngine
from .settings import EngineSpec, LenderSpec, SimulationSettings
from .simulated_agents import Agents
from .training_stage import TrainingStage

TICK_S = 0.25
"""Between two looks at turns that stand still; a live leader looks twice a second."""
CLOSE_S = 0.5
"""Shorter pauses are as usual as long steps."""


class LessMemory:
    """The step times of an engine with a part of its KV cache."""

    def __init__(self, steps: StepTimes, share: float) -> None:
        self.tp, self.source, self.step_s = steps.tp, steps.source, steps.step_s
        self.kv_capacity = int(share * steps.kv_capacity)


class _Lent:
    """One borrowed engine."""

    def __init__(self, spec: EngineSpec, lender: LenderSpec) -> None:
        self.spec = replace(spec, steps=LessMemory(spec.steps, lender.kv_share))
        self.terms = lender
        self.availability = Availability()
        self.since = self.paused_at = 0.0
        """When its availability was last counted, and when it was last paused."""
        self.present = self.left = self.ticking = False
        self.leaves = 0
        """How often turns had to leave it."""


class Lenders:
    """All borrowed engines; without any it does nothing."""

    def __init__(
        self,
        specs: Sequence[EngineSpec],
        settings: SimulationSettings,
        agents: Agents,
        events: Events,
        *,
        board: Board,
        training: TrainingStage,
        freed: Callable[[], None],
    ) -> None:
        self.names = frozenset(spec.name for spec in specs)
        self.lenders: dict[str, LentEngine] = {}
        self._lent: dict[str, _Lent] = {}
        self._agents, self._events, self._board, self._training = agents, events, board, training
        self._freed = freed
        for spec in specs:
            assert spec.lender is not None
            one = self._lent[spec.name] = _Lent(spec, spec.lender)
            self.lenders[spec.name] = LentEngine(
                spec,
                spec.lender.limits,
                spec.lender.requests,
                settings=settings,
                events=events,
                agents=agents,
                changed=partial(self._changed, one),
            )
            at = 0.0
            for start, end in spec.lender.away:
                if start > at:
                    events.at(at + spec.lender.join_s, self._join, (one, start))
                    events.at(start, self._take_back, one)
                at = end
            events.at(at + spec.lender.join_s, self._join, (one, float("inf")))

    @property
    def leaves(self) -> int:
        """How often the turns of an engine had to leave it."""
        return sum(one.leaves for one in self._lent.values())

    @property
    def share(self) -> float:
        """The mean share of the time that they run."""
        shares = [one.availability.share for one in self._lent.values()]
        return sum(shares) / len(shares) if shares else 0.0

    def _join(self, item: tuple[_Lent, float]) -> None:
        one, until = item
        now = one.since = self._events.now
        if now >= until:
            return
        one.present, one.left = True, False
        self.lenders[one.spec.name].lend(self._agents.up(one.spec, self._training.version))
        self._priced(one)
        if not self.lenders[one.spec.name].is_open:
            self._pause(one)
        self._freed()

    def _take_back(self, one: _Lent) -> None:
        if not one.present:
            return
        one.present = False
        self._count(one, self.lenders[one.spec.name].is_open)
        self._board.set_open(one.spec.name, False)
        self._leave(one, 0.0)
        self._gone(one)

    def _gone(self, one: _Lent) -> None:
        name = one.spec.name
        if self._board.engines[name].inflight:
            self._events.at(self._events.now + TICK_S, self._gone, one)
            return
        self.lenders[name].lend(None)
        self._agents.down(name)
        self._freed()

    def _changed(self, one: _Lent, is_open: bool) -> None:
        if not one.present:
            return
        self._count(one, not is_open)
        self._priced(one)
        if is_open:
            one.left = False
            one.availability.paused(self._events.now - one.paused_at)
            self._board.set_open(one.spec.name, True)
            self._freed()
        else:
            self._pause(one)

    def _pause(self, one: _Lent) -> None:
        one.paused_at = self._events.now
        if not one.ticking:
            one.ticking = True
            self._events.at(one.paused_at + TICK_S, self._tick, one)

    def _tick(self, one: _Lent) -> None:
        now, name = self._events.now, one.spec.name
        one.ticking = False
        if not one.present or self.lenders[name].is_open:
            return
        self._count(one, False)
        if now - one.paused_at >= CLOSE_S:
            self._board.set_open(name, False)
        self._leave(one, now - one.paused_at)
        self._priced(one)
        one.ticking = True
        self._events.at(now + TICK_S, self._tick, one)

    def _leave(self, one: _Lent, stood_s: float) -> None:
        """The turns that stand still for so long go elsewhere; those of an engine that was taken back all do."""
        for sent in self._agents.at(one.spec.name):
            if one.present and stood_s < one.availability.patience_s(self._board, sent.turn.context_tokens):
                continue
            self._agents.abort(sent)
            if not one.left:
                one.left = True
                one.leaves += 1
                one.availability.left()

    def _count(self, one: _Lent, was_open: bool) -> None:
        now = self._events.now
        one.availability.passed(now - one.since, was_open)
        one.since = now

    def _priced(self, one: _Lent) -> None:
        found = one.availability
        self._board.lends(one.spec.name, found.share, found.leaves_per_s)
