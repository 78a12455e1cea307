"""The engines that accept turns: their nodes, their turns in flight, and the totals of their counters.

Policies read load from the `libra_hpc.policies.scheduling.board.Board`; this module passes every change on to it.

What a lender or guest gave since the ranks started is kept for `status` and `report`. Engines of one that was there
before go on counting: a lender's next guest has another rank.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from statistics import fmean
from typing import NamedTuple

from libra_hpc.policies.learning.engine_gaps import Gap
from libra_hpc.policies.scheduling.availability import Availability
from libra_hpc.policies.scheduling.board import Board
from libra_hpc.policies.scheduling.measured_steps import MeasuredSteps
from libra_hpc.policies.scheduling.slow_engines import SlowEngines
from libra_hpc.process.progress import TURN, DeadlineLimits, ProgressWatch
from libra_hpc.protocol.agents import LenderReport
from libra_hpc.protocol.engine_state import EngineCapacity, EngineStats, LenderKind, ObservedEngine
from libra_hpc.protocol.joining import is_guest
from libra_hpc.protocol.trainer import ENGINES

from .trajectory import Trajectory


class LenderTotals:
    """Seconds are those of engines."""

    def __init__(self, name: str, kind: LenderKind) -> None:
        self.name, self.kind = name, kind
        self.turns = self.tokens = 0
        self.shares: dict[str, float] = {}
        """Share of the time that each present engine can step."""
        self.present_s = 0.0
        self.paused: dict[str, float] = {}
        self.closed: dict[str, str] = {}
        """Why each engine that is paused now is."""

    def came(self, engine: str) -> None:
        self.shares[engine] = 1.0

    def passed(self, engine: str, seconds: float, closed_s: float, share: float, why: str) -> None:
        """An engine was there for so long, and could not step for a part of it."""
        self.present_s, self.shares[engine] = self.present_s + seconds, share
        if closed_s > 0.0:
            self.paused[why] = self.paused.get(why, 0.0) + closed_s

    def turned(self, engine: str, closed: bool, why: str) -> None:
        """Whether an engine is paused now."""
        self.closed.pop(engine, None)
        if closed:
            self.closed[engine] = why

    def gone(self, engine: str) -> None:
        self.shares.pop(engine, None)
        self.closed.pop(engine, None)

    def report(self) -> LenderReport:
        open_s = self.present_s - sum(self.paused.values())
        return LenderReport(
            name=self.name,
            kind=self.kind,
            engines=len(self.shares),
            share=fmean(self.shares.values()) if self.shares else 0.0,
            mean_share=open_s / self.present_s if self.present_s > 0.0 else 1.0,
            turns=self.turns,
            tokens=self.tokens,
            paused={why: round(seconds, 1) for why, seconds in self.paused.items()},
            now=next(iter(self.closed.values()), "") if len(self.closed) == len(self.shares) else "",
        )


SPEED_WINDOW_S = 10.0
"""Seconds of the window behind ``rollout_s`` (busy seconds per token): a few global batches."""


class OutstandingTurn(NamedTuple):
    """A turn in flight."""

    trajectory: Trajectory
    tokens: int
    """Tokens of its context, when it was sent."""


class EngineEntry:
    """One vLLM replica.  `inflight` maps a request id to the turn it runs."""

    def __init__(self, rank: int, ends: int, since: float, lender: LenderTotals | None = None) -> None:
        self.rank, self.ends, self.own = rank, ends, not is_guest(rank)
        """Tokens of its whole KV cache."""
        self.inflight: dict[str, OutstandingTurn] = {}
        self.draining = self.stands_still = self.paused = False
        """``paused``: no step since the report before the last one."""
        self.lender = lender
        self.availability, self.since = Availability(), since
        """Availability of a guest's engine, and when it was last counted."""
        self.stats: EngineStats | None = None


class EngineRegistry:
    def __init__(self, board: Board, deadlines: DeadlineLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._board, self._clock = board, clock
        self.turns = ProgressWatch(deadlines)
        """Turns in flight, by (engine, request)."""
        self.engines: dict[str, EngineEntry] = {}
        self.numbers: dict[str, int] = {}
        """Numbers by engine, which the tokens of a batch have; after many starts one that has ended may share one."""
        self.generated = self.prefilled = 0
        """Tokens since the start, of all own engines including lost ones."""
        self.lenders: dict[tuple[str, LenderKind], LenderTotals] = {}
        self.of_guests = dict[str, LenderKind]()
        """All engines that guests had, and of what kind these were."""
        self.busy_s = 0.0
        self._slow = SlowEngines()
        self.measured = MeasuredSteps()
        self._oldest = -1
        """Weight version below which an engine gets no turns."""
        self._window: deque[tuple[float, int, float]] = deque()

    def ready(
        self, rank: int, name: str, engine: ObservedEngine, capacity: EngineCapacity, whose: tuple[str, LenderKind]
    ) -> None:
        if name not in self.numbers and (number := self._free_number()):
            self.numbers[name] = number
        lender = None
        if is_guest(rank):
            self.of_guests[name] = whose[1]
            lender = self.lenders.setdefault(whose, LenderTotals(*whose))
            lender.came(name)
        self.engines[name] = EngineEntry(rank, engine.ends, self._clock(), lender)
        self._board.up(
            name,
            tp=capacity.tp,
            kv_capacity=capacity.kv_tokens,
            version=engine.version,
            warm_up=capacity.warm_up,
            borrowed=is_guest(rank),
        )

    def lost(self, name: str) -> EngineEntry | None:
        """Remove a lost engine; the returned entry has the turns that it still ran."""
        self._board.down(name)
        self.measured.lost(name)
        lost = self.engines.pop(name, None)
        if lost is not None and lost.lender is not None:
            lost.lender.gone(name)
        for rid in lost.inflight if lost is not None else ():
            self.turns.drop((name, rid))
        return lost

    def send(self, name: str, rid: str, trajectory: Trajectory) -> None:
        """Record a turn that the dispatcher has put on the board as in flight."""
        self.engines[name].inflight[rid] = OutstandingTurn(trajectory, trajectory.context_tokens)
        self.turns.begin((name, rid), TURN, self._clock())

    def take(self, name: str, rid: str, counts: bool = True) -> Trajectory | None:
        """Remove an answered turn; None when it is not in flight. ``counts``: the deadlines learn from its duration."""
        engine = self.engines.get(name)
        sent = engine.inflight.pop(rid, None) if engine else None
        if sent is None:
            return None
        self._board.answered(name, sent.tokens)
        if counts:
            self.turns.end((name, rid), self._clock())
            if engine is not None and engine.lender is not None:
                engine.lender.turns += 1
        self.turns.drop((name, rid))
        return sent.trajectory

    def drop(self, trajectory: Trajectory) -> list[tuple[str, str]]:
        """Drop the turns of an attempt that is over; returns (engine, request) of each."""
        found = [
            (name, rid)
            for name, engine in self.engines.items()
            for rid, sent in engine.inflight.items()
            if sent.trajectory is trajectory
        ]
        for name, rid in found:
            self.take(name, rid, counts=False)
        return found

    def _free_number(self) -> int:
        """The next one that no engine here has, whose gap would be the other's as well; 0: there is none."""
        taken = {self.numbers.get(name) for name in self.engines}
        turns = (2 + turn % (ENGINES - 2) for turn in range(len(self.numbers), len(self.numbers) + ENGINES - 2))
        return next((number for number in turns if number not in taken), 0)

    def request(self, name: str, episode: str) -> str:
        return next(rid for rid, sent in self.engines[name].inflight.items() if sent.trajectory.episode == episode)

    def judged(self, gaps: Mapping[int, Gap]) -> tuple[dict[str, Gap], dict[str, str]]:
        """What `EngineGaps.observe` needs: the gaps by engine, and every engine's lender."""
        found = {name: gaps[number] for name, number in self.numbers.items() if number in gaps}
        return found, {name: one.lender.name if one.lender else "" for name, one in self.engines.items()}

    def applied(self, name: str, version: int) -> bool:
        """Note the version of an engine; returns whether it had another one."""
        had = self._board.engines[name].version
        self._board.applied(name, version)
        return had != version

    def admit(self, oldest: int) -> None:
        """Give no turns to engines behind ``oldest``: their tokens would be beyond the staleness bound."""
        self._oldest = oldest
        for name in self.engines:
            self._set_open(name)

    def _set_open(self, name: str) -> None:
        engine = self.engines[name]
        closed = engine.draining or engine.stands_still or engine.paused
        self._board.set_open(name, not closed and self._board.engines[name].version >= self._oldest)

    def of(self, rank: int) -> list[str]:
        return [name for name, engine in self.engines.items() if engine.rank == rank]

    def drain(self, rank: int) -> None:
        for name in self.of(rank):
            self.engines[name].draining = True
            self._board.set_open(name, False)

    def empty(self, rank: int) -> bool:
        return not any(self.engines[name].inflight for name in self.of(rank))

    def running_on(self) -> tuple[tuple[int, int], ...]:
        """(rank, turns in flight) of the run's own nodes."""
        turns: dict[int, int] = {}
        for name in self.own:
            engine = self.engines[name]
            turns[engine.rank] = turns.get(engine.rank, 0) + len(engine.inflight)
        return tuple(turns.items())

    @property
    def inflight(self) -> int:
        return sum(view.inflight for view in self._board.engines.values())

    @property
    def joint_version(self) -> int | None:
        """The newest weights that every live engine of the run has, which count as published; None without an engine.

        An engine that cannot take a version is no live one: its node ends it, and another begins with the image.
        Nobody waits for a guest.
        """
        return min((self._board.engines[name].version for name in self.own), default=None)

    @property
    def own(self) -> list[str]:
        """Engines of the run's own nodes."""
        return [name for name, engine in self.engines.items() if engine.own]

    @property
    def lent_gpus(self) -> float:
        """GPUs of guests' engines, as in `RolloutReport.lent_gpus`."""
        lent = ((one, self._board.engines[name]) for name, one in self.engines.items() if not (one.own or one.draining))
        return sum(view.tp * one.availability.share for one, view in lent if view.version >= self._oldest)

    def load(self, name: str, stats: EngineStats) -> bool:
        """Take a report; returns whether the engine is paused, stands still, or goes on, since this one."""
        engine = self.engines.get(name)
        if engine is None:
            return False
        last = engine.stats
        if last is not None and stats.paused_s > last.paused_s:
            self.turns.discount(stats.paused_s - last.paused_s, [(name, rid) for rid in engine.inflight])
        before = engine.stands_still, engine.paused
        if engine.lender is not None:
            self._lent(name, engine, stats, engine.lender)
        engine.stands_still = stats.stands_still
        turned = before != (engine.stands_still, engine.paused)
        if turned:
            self._set_open(name)
        if last is not None and stats.steps >= last.steps:
            if engine.lender is None:
                self.generated += stats.generated_tokens - last.generated_tokens
                self.prefilled += stats.prefill_tokens - last.prefill_tokens
                self.busy_s += stats.busy_s - last.busy_s
            else:
                engine.lender.tokens += stats.generated_tokens - last.generated_tokens
        engine.stats = stats
        self._board.report(name, stats)
        if engine.own:
            view = self._board.engines[name]
            self.measured.observe(name, view.tp, view.kv_capacity, stats)
        now = time.monotonic()
        self._window.append((now, self.generated, self.busy_s))
        while len(self._window) > 2 and now - self._window[0][0] > SPEED_WINDOW_S:
            self._window.popleft()
        return turned

    def _lent(self, name: str, engine: EngineEntry, stats: EngineStats, lender: LenderTotals) -> None:
        """The share that a report has of a guest's engine; without turns it counts as open."""
        now, last, found = self._clock(), engine.stats or stats, engine.availability
        passed, paused_s = now - engine.since, max(0.0, stats.paused_s - last.paused_s)
        closed_s = passed if engine.stands_still and stats.stands_still else min(passed, paused_s)
        found.passed(passed - closed_s, True)
        found.passed(closed_s, False)
        engine.since = now
        engine.paused = not stats.stands_still and paused_s > 0.0 and stats.steps == last.steps
        lender.passed(name, passed, closed_s, found.share, stats.pause)
        lender.turned(name, stats.stands_still or engine.paused, stats.pause)
        self._board.lends(name, found.share)

    def busy_per_token(self) -> float:
        """Busy engine seconds per generated token in the last `SPEED_WINDOW_S`; 0.0 while unknown."""
        if len(self._window) < 2:
            return 0.0
        (_, tokens0, busy0), (_, tokens1, busy1) = self._window[0], self._window[-1]
        return (busy1 - busy0) / (tokens1 - tokens0) if tokens1 > tokens0 else 0.0

    def decode_s(self) -> float:
        """Seconds per decoded token of one sequence, mean over engines; 0.0 while unknown."""
        speeds = [speed for name in self.own if (speed := self._board.engines[name].decode_s) > 0.0]
        return sum(speeds) / len(speeds) if speeds else 0.0

    def slow(self) -> tuple[tuple[str, int, float, float], ...]:
        """Slow engines, as in `RolloutReport.slow`."""
        found = self._slow.update(self._board, time.time())
        ranks = {one.engine: self.engines[one.engine].rank for one in found if self.engines[one.engine].own}
        return tuple((one.engine, ranks[one.engine], one.ratio, one.since) for one in found if one.engine in ranks)

    def buckets(self, trajectories: Iterable[Trajectory]) -> tuple[tuple[int, int, int, int, float], ...]:
        """(tp, own engines, turns in flight, trajectories by last engine, largest KV use) per TP degree, ascending."""
        own, open_at = {self._board.engines[name] for name in self.own}, dict[int, int]()
        for trajectory in trajectories:
            view = self._board.engines.get(trajectory.engine)
            if view in own:
                open_at[view.tp] = open_at.get(view.tp, 0) + 1
        kinds = ((c.tp, [view for view in c.members if view in own]) for c in self._board.classes)
        return tuple(
            (
                tp,
                len(members),
                sum(view.inflight for view in members),
                open_at.get(tp, 0),
                max(view.kv_use for view in members),
            )
            for tp, members in kinds
            if members
        )
