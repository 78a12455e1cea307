"""The engines as the rollout leader knows them: what each holds, how fast it is, which weights it samples under."""

from __future__ import annotations

import time
from collections.abc import Iterable

from libra_hpc.protocol.mesh import EngineUp
from libra_hpc.protocol.rollout import EngineStats
from libra_hpc.sched.protocol import EngineView

from .speed import SpeedEstimate
from .trajectory import Trajectory

SPEED_WINDOW_S = 10.0
"""Window of the busy-seconds-per-token figure behind ``rollout_s``: a few global batches."""


class Engine:
    """One vLLM replica.  `inflight` maps request id to the trajectory whose turn it runs; `tokens` is the sum of their contexts."""

    __slots__ = ("draining", "inflight", "rank", "ready", "speed", "stats", "tokens", "version")

    def __init__(self, up: EngineUp) -> None:
        self.rank, self.ready, self.version = up.rank, up.ready, up.ready.version
        self.inflight: dict[str, Trajectory] = {}
        self.tokens = 0
        self.draining = False
        self.speed = SpeedEstimate()
        self.stats: EngineStats | None = None

    def send(self, rid: str, trajectory: Trajectory) -> None:
        """Note a turn as in flight."""
        self.inflight[rid] = trajectory
        self.tokens += len(trajectory.context)

    def take(self, rid: str) -> Trajectory | None:
        """Note a turn as answered; None when it is not (or no longer) ours.  Call it before the answer is added to the context."""
        trajectory = self.inflight.pop(rid, None)
        if trajectory is not None:
            self.tokens -= len(trajectory.context)
        return trajectory


class Fleet:
    """All engines that accept turns, by name."""

    def __init__(self, max_inflight: int) -> None:
        self._max_inflight = max_inflight
        self.engines: dict[str, Engine] = {}
        self.generated = self.prefilled = 0
        """Tokens since start, all engines, also those that are gone."""
        self.busy_s = 0.0
        self._window: list[tuple[float, int, float]] = []

    def view(self, name: str) -> EngineView:
        """One engine as the policies see it."""
        engine = self.engines[name]
        return EngineView(
            name, engine.ready.tp, engine.ready.kv_tokens, len(engine.inflight), engine.tokens, self._max_inflight,
            engine.stats.kv_use if engine.stats else 0.0, engine.version, engine.speed.decode_s, engine.speed.prefill_s,
        )  # fmt: skip

    def open(self, oldest: int) -> dict[str, EngineView]:
        """Engines that may get turns.

        One behind ``oldest``, the version that admission counts from, would sample tokens older than the staleness bound allows; it is left out until it
        caught up.
        """
        return {name: self.view(name) for name, engine in self.engines.items() if not engine.draining and engine.version >= oldest}

    def of(self, rank: int) -> list[str]:
        """Engines of one node."""
        return [name for name, engine in self.engines.items() if engine.rank == rank]

    def drain(self, rank: int) -> None:
        """Send no more turns to a node."""
        for name in self.of(rank):
            self.engines[name].draining = True

    def empty(self, rank: int) -> bool:
        """Whether nothing is in flight at a node."""
        return not any(self.engines[name].inflight for name in self.of(rank))

    @property
    def inflight(self) -> int:
        """Turns in flight, all engines."""
        return sum(len(engine.inflight) for engine in self.engines.values())

    @property
    def nodes(self) -> int:
        """Nodes with at least one engine."""
        return len({engine.rank for engine in self.engines.values()})

    @property
    def applied(self) -> int | None:
        """The lowest version any engine samples under; None without engines."""
        return min((engine.version for engine in self.engines.values()), default=None)

    def load(self, name: str, stats: EngineStats) -> None:
        """Take in an engine's counters."""
        engine = self.engines.get(name)
        if engine is None:
            return
        last = engine.stats
        if last is not None and stats.steps >= last.steps:
            self.generated += stats.generated_tokens - last.generated_tokens
            self.prefilled += stats.prefill_tokens - last.prefill_tokens
            self.busy_s += stats.busy_s - last.busy_s
        engine.stats = stats
        engine.speed.update(stats)
        now = time.monotonic()
        self._window.append((now, self.generated, self.busy_s))
        while len(self._window) > 2 and now - self._window[0][0] > SPEED_WINDOW_S:
            self._window.pop(0)

    def busy_per_token(self) -> float:
        """Busy engine seconds per generated token over the last `SPEED_WINDOW_S`; 0.0 while unknown."""
        if len(self._window) < 2:
            return 0.0
        (_, tokens0, busy0), (_, tokens1, busy1) = self._window[0], self._window[-1]
        return (busy1 - busy0) / (tokens1 - tokens0) if tokens1 > tokens0 else 0.0

    def decode_s(self) -> float:
        """Seconds per decoded token of one sequence, mean over engines; 0.0 while unknown."""
        speeds = [engine.speed.decode_s for engine in self.engines.values() if engine.speed.decode_s > 0.0]
        return sum(speeds) / len(speeds) if speeds else 0.0

    def buckets(self, trajectories: Iterable[Trajectory]) -> tuple[tuple[int, int, int, int, float], ...]:
        """(tp, engines, turns in flight, trajectories, largest KV use) per TP degree, ascending; a trajectory belongs to the engine of its last turn."""
        held = [trajectory.engine for trajectory in trajectories]
        out = []
        for tp in sorted({engine.ready.tp for engine in self.engines.values()}):
            members = {name: engine for name, engine in self.engines.items() if engine.ready.tp == tp}
            uses = [engine.stats.kv_use for engine in members.values() if engine.stats]
            turns = sum(len(engine.inflight) for engine in members.values())
            out.append((tp, len(members), turns, sum(name in members for name in held), max(uses, default=0.0)))
        return tuple(out)
