"""The engines that accept turns: their nodes, their turns in flight, and the totals of their counters.

Policies read load from the `libra_hpc.policies.scheduling.board.Board`; this module passes every change on to it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from libra_hpc.policies.scheduling.board import Board
from libra_hpc.policies.scheduling.protocol import TurnView
from libra_hpc.policies.scheduling.slow_engines import SlowEngines
from libra_hpc.policies.scheduling.turn_migration import Running
from libra_hpc.process.deadlines import DeadlineLimits
from libra_hpc.protocol.engine_state import EngineState, EngineStats

from .trajectory import Trajectory
from .turn_watch import TurnWatch

SPEED_WINDOW_S = 10.0
"""Seconds of the window behind ``rollout_s`` (busy seconds per token): a few global batches."""


class Held(NamedTuple):
    """A turn in flight."""

    trajectory: Trajectory
    tokens: int
    """Of its context, when it was sent."""
    steps: int
    """Of its engine, as reported when it was sent."""


class EngineEntry:
    """One vLLM replica.  `inflight` maps a request id to the turn it runs."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.inflight: dict[str, Held] = {}
        self.draining = False
        self.stats: EngineStats | None = None


class EngineRegistry:
    def __init__(self, board: Board, deadlines: DeadlineLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._board, self._clock = board, clock
        self.turns = TurnWatch(deadlines)
        self.engines: dict[str, EngineEntry] = {}
        self.generated = self.prefilled = 0
        """Tokens since the start, of all engines including lost ones."""
        self.busy_s = 0.0
        self._slow = SlowEngines()
        self._window: deque[tuple[float, int, float]] = deque()

    def ready(self, engine: EngineState) -> None:
        capacity = engine.capacity
        assert capacity is not None
        self.engines[engine.engine] = EngineEntry(engine.rank)
        self._board.up(
            engine.engine,
            tp=capacity.tp,
            kv_capacity=capacity.kv_tokens,
            version=engine.version,
            warm_up=capacity.warm_up,
            host_tokens=capacity.host_kv_tokens,
        )

    def lost(self, name: str) -> EngineEntry | None:
        """Remove a lost engine; the returned entry has the turns that it still ran."""
        self._board.down(name)
        lost = self.engines.pop(name, None)
        for rid in lost.inflight if lost is not None else ():
            self.turns.forget((name, rid))
        return lost

    def send(self, name: str, rid: str, trajectory: Trajectory) -> None:
        """Record a turn that the dispatcher has put on the board as in flight."""
        self.engines[name].inflight[rid] = Held(trajectory, trajectory.context_tokens, self._board.engines[name].steps)
        self.turns.sent((name, rid), self._clock())

    def take(self, name: str, rid: str, counts: bool = True) -> Trajectory | None:
        """Remove an answered turn; None when it is not in flight. ``counts``: the deadlines learn from its duration."""
        engine = self.engines.get(name)
        held = engine.inflight.pop(rid, None) if engine else None
        if held is None:
            return None
        self._board.answered(name, held.tokens)
        if counts:
            self.turns.answered((name, rid), self._clock())
        self.turns.forget((name, rid))
        return held.trajectory

    def drop(self, trajectory: Trajectory) -> list[tuple[str, str]]:
        """Forget the turns of an attempt that is over; returns (engine, request) of each."""
        found = [
            (name, rid)
            for name, engine in self.engines.items()
            for rid, held in engine.inflight.items()
            if held.trajectory is trajectory
        ]
        for name, rid in found:
            self.take(name, rid, counts=False)
        return found

    def running(self, view: Callable[[Trajectory], TurnView]) -> Iterator[Running]:
        """Every turn in flight with its tokens so far, estimated by the steps of its engine."""
        for name, engine in self.engines.items():
            steps = self._board.engines[name].steps
            for held in engine.inflight.values():
                yield Running(view(held.trajectory), steps - held.steps)

    def request(self, name: str, episode: str) -> str:
        return next(rid for rid, held in self.engines[name].inflight.items() if held.trajectory.episode == episode)

    def applied(self, name: str, version: int) -> None:
        self._board.applied(name, version)

    def admit(self, oldest: int) -> None:
        """Give no turns to engines behind ``oldest``: their tokens would be beyond the staleness bound."""
        for name, engine in self.engines.items():
            self._board.set_open(name, not engine.draining and self._board.engines[name].version >= oldest)

    def of(self, rank: int) -> list[str]:
        return [name for name, engine in self.engines.items() if engine.rank == rank]

    def drain(self, rank: int) -> None:
        for name in self.of(rank):
            self.engines[name].draining = True
            self._board.set_open(name, False)

    def empty(self, rank: int) -> bool:
        return not any(self.engines[name].inflight for name in self.of(rank))

    @property
    def inflight(self) -> int:
        return sum(view.inflight for view in self._board.engines.values())

    @property
    def oldest(self) -> int | None:
        """The lowest weight version any engine samples under; None without engines."""
        return min((view.version for view in self._board.engines.values()), default=None)

    def load(self, name: str, stats: EngineStats) -> None:
        engine = self.engines.get(name)
        if engine is None:
            return
        last = engine.stats
        if last is not None and stats.steps >= last.steps:
            self.generated += stats.generated_tokens - last.generated_tokens
            self.prefilled += stats.prefill_tokens - last.prefill_tokens
            self.busy_s += stats.busy_s - last.busy_s
        engine.stats = stats
        self._board.report(name, stats)
        now = time.monotonic()
        self._window.append((now, self.generated, self.busy_s))
        while len(self._window) > 2 and now - self._window[0][0] > SPEED_WINDOW_S:
            self._window.popleft()

    def busy_per_token(self) -> float:
        """Busy engine seconds per generated token in the last `SPEED_WINDOW_S`; 0.0 while unknown."""
        if len(self._window) < 2:
            return 0.0
        (_, tokens0, busy0), (_, tokens1, busy1) = self._window[0], self._window[-1]
        return (busy1 - busy0) / (tokens1 - tokens0) if tokens1 > tokens0 else 0.0

    def decode_s(self) -> float:
        """Seconds per decoded token of one sequence, mean over engines; 0.0 while unknown."""
        speeds = [view.decode_s for view in self._board.engines.values() if view.decode_s > 0.0]
        return sum(speeds) / len(speeds) if speeds else 0.0

    def slow(self) -> tuple[tuple[str, int, float, float], ...]:
        """See `RolloutReport.slow`."""
        found = self._slow.update(self._board, time.time())
        return tuple((one.engine, self.engines[one.engine].rank, one.ratio, one.since) for one in found)

    def buckets(self, trajectories: Iterable[Trajectory]) -> tuple[tuple[int, int, int, int, float], ...]:
        """(tp, engines, turns in flight, trajectories by last engine, largest KV use) per TP degree, ascending."""
        open_at: dict[int, int] = {}
        for trajectory in trajectories:
            view = self._board.engines.get(trajectory.engine)
            if view is not None:
                open_at[view.tp] = open_at.get(view.tp, 0) + 1
        return tuple(
            (
                c.tp,
                len(c.members),
                sum(view.inflight for view in c.members),
                open_at.get(c.tp, 0),
                max(view.kv_use for view in c.members),
            )
            for c in self._board.classes
        )
