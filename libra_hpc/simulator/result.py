"""The result of a simulation, and the recorder that collects it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from libra_hpc.simulator.engine.simulated_engine import Engine

from .training_stage import SimulatedStep


class Quantiles(msgspec.Struct, frozen=True):
    """Quantiles (nearest rank) and mean; all 0.0 without values."""

    p50: float
    p95: float
    p99: float
    mean: float


def quantiles(values: Sequence[float]) -> Quantiles:
    if not values:
        return Quantiles(0.0, 0.0, 0.0, 0.0)
    ordered = sorted(values)
    last = len(ordered) - 1
    p50, p95, p99 = (ordered[min(last, int(q * len(ordered)))] for q in (0.5, 0.95, 0.99))
    return Quantiles(p50, p95, p99, sum(ordered) / len(ordered))


class EngineResult(msgspec.Struct, frozen=True):
    engine: str
    tp: int
    busy_s: float
    paused_s: float
    """Seconds out of ``busy_s`` in weight updates."""
    steps: int
    generated_tokens: int
    preemptions: int
    segments: list[tuple[float, float, float]]
    """(start, end, mean number of running sequences), at most `timeline.BINS`."""


class SimulationResult(msgspec.Struct, frozen=True):
    """Totals, quantiles and time series of one simulation; seconds count from its start."""

    policy: str
    makespan_s: float
    """Seconds until the last trajectory ended and the last whole batch was trained."""
    trajectories: int
    turns: int
    generated_tokens: int
    prefilled_tokens: int
    """Computed in prefill, repetitions included."""
    cached_tokens: int
    """Found in prefix caches instead."""
    reprefilled_tokens: int
    """Tokens out of ``prefilled_tokens`` at positions that had been computed for their trajectory before."""
    reprefilled_by: dict[str, int]
    """``reprefilled_tokens`` by cause (`SimulatedRequest.again`)."""
    tokens_per_s: float
    completion: Quantiles
    seat_wait_s: float
    """Mean seconds out of a trajectory's ``completion`` until it had a seat."""
    turn_latency: Quantiles
    """Seconds from a ready turn to its answer: queues, prefill, decoding, hops."""
    moves: int
    """Turns, or rests of aborted ones, sent to another engine than the one before."""
    preemptions: int
    recomputed: int
    idle_share: float
    """Share of the engines' device-seconds without a step or a weight update."""
    decisions: int
    finish_s: list[float]
    steps: list[SimulatedStep]
    engines: list[EngineResult]


class Recorder:
    """Collects events of a run and turns them into a `SimulationResult`."""

    def __init__(self) -> None:
        self.turn_s: list[float] = []
        self.completion_s: list[float] = []
        self.finish_s: list[float] = []
        self.generated = self.moves = self.decisions = 0
        self.seat_s = 0.0
        """Seconds of all trajectories without a seat."""
        self._gone: list[EngineResult] = []
        self._again: dict[str, int] = {}
        self._prefilled = self._cached = self._preemptions = self._recomputed = 0
        self._present_s = self._busy_s = 0.0

    def gone(self, engine: Engine, now: float) -> None:
        counters, present = engine.counters, now - engine.up_at
        for cause, tokens in counters.again.items():
            self._again[cause] = self._again.get(cause, 0) + tokens
        self._prefilled += counters.prefilled
        self._cached += counters.cached
        self._preemptions += counters.preemptions
        self._recomputed += counters.recomputed
        self._present_s += present * engine.tp
        self._busy_s += min(present, counters.busy_s) * engine.tp
        self._gone.append(
            EngineResult(
                engine=engine.name,
                tp=engine.tp,
                busy_s=counters.busy_s,
                paused_s=counters.paused_s,
                steps=counters.steps,
                generated_tokens=counters.generated,
                preemptions=counters.preemptions,
                segments=engine.timeline.segments(),
            )
        )

    def result(self, policy: str, makespan: float, steps: list[SimulatedStep]) -> SimulationResult:
        """The result, once all engines are `gone`."""
        return SimulationResult(
            policy=policy,
            makespan_s=makespan,
            trajectories=len(self.finish_s),
            turns=len(self.turn_s),
            generated_tokens=self.generated,
            prefilled_tokens=self._prefilled,
            cached_tokens=self._cached,
            reprefilled_tokens=sum(self._again.values()),
            reprefilled_by=dict(sorted(self._again.items())),
            tokens_per_s=self.generated / makespan if makespan > 0.0 else 0.0,
            completion=quantiles(self.completion_s),
            seat_wait_s=self.seat_s / max(1, len(self.finish_s)),
            turn_latency=quantiles(self.turn_s),
            moves=self.moves,
            preemptions=self._preemptions,
            recomputed=self._recomputed,
            idle_share=1.0 - self._busy_s / self._present_s if self._present_s > 0.0 else 0.0,
            decisions=self.decisions,
            finish_s=sorted(self.finish_s),
            steps=steps,
            engines=sorted(self._gone, key=lambda engine: (engine.tp, engine.engine)),
        )
