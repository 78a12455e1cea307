"""Step times, policies and work small enough to compute by hand.

All figures are sums of powers of two, hence exact in floating point.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from bench.controlled_simulation import ControlledSimulation
from libra_hpc.models.step_times.steps import StepTimes
from libra_hpc.policies.scheduling.board import Board, EngineView
from libra_hpc.policies.scheduling.protocol import Decision, Finished, TurnView
from libra_hpc.protocol.trace import TrajectoryRecord, TurnRecord
from libra_hpc.simulator.engine.simulated_engine import IDLE, Engine
from libra_hpc.simulator.engine.simulated_request import SimulatedRequest
from libra_hpc.simulator.settings import EngineSpec, SimulationSettings


class Linear:
    """A step lasts base + kv * tokens + prefill * chunk seconds, over ``tp``."""

    source = "a formula of the test"

    def __init__(self, capacity: int, base: float = 1.0, kv: float = 0.0, prefill: float = 0.0, tp: int = 1) -> None:
        self.tp, self.kv_capacity = tp, capacity
        self.base, self.kv, self.prefill = base, kv, prefill
        self.calls: list[tuple[int, int, int, int]] = []

    def step_s(self, decodes: int, kv_tokens: int, prefill: int = 0, context: int = 0) -> float:
        self.calls.append((decodes, kv_tokens, prefill, context))
        return (self.base + self.kv * kv_tokens + self.prefill * prefill) / self.tp


class Spread:
    """Back to the engine of the last turn while it has a slot, else the emptiest."""

    name = "spread"

    def __init__(self) -> None:
        self.turns: list[TurnView] = []
        self.records: list[Finished] = []

    def key(self, turn: TurnView, now: float) -> float:
        return turn.ready_at

    def route(self, turn: TurnView, board: Board, now: float) -> Decision:
        self.turns.append(turn)
        able = [view for view in board.engines.values() if view.open and view.inflight < view.cap]
        if not able:
            return Decision("", 0, 0, "wait: all full", {})
        best = self.best(turn, able)
        return Decision(best.engine, 0, best.level, "{tokens} in flight", {"tokens": best.inflight_tokens})

    def best(self, turn: TurnView, able: list[EngineView]) -> EngineView:
        return min(able, key=lambda view: (view.engine != turn.engine, view.inflight_tokens, view.engine))

    def finished(self, record: Finished, now: float) -> None:
        self.records.append(record)

    def forget(self, trajectory: str) -> None:
        pass


def exchange(leave: str, join: EngineSpec, delay_s: float) -> Callable[[ControlledSimulation, float], None]:
    """A controller that drains ``leave`` at its first call; ``delay_s`` after its last turn ``join`` is up."""
    calls = itertools.count()

    def control(sim: ControlledSimulation, now: float) -> None:
        if not next(calls):
            sim.drain(leave, lambda: sim.join(join, delay_s))

    return control


def engine(steps: StepTimes, **settings: object) -> Engine:
    """One engine with blocks of 4 tokens."""
    limits = SimulationSettings(**{"block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64, **settings})  # type: ignore[arg-type]
    return Engine(name="e", tp=steps.tp, steps=steps, settings=limits, number=1, version=0, now=0.0)


def request(
    name: str,
    tokens: int,
    left: int,
    prompt: str = "",
    prompt_tokens: int | None = None,
    priority: int = 0,
    high: int = 0,
) -> SimulatedRequest:
    """A turn; its prompt is its whole context unless given."""
    return SimulatedRequest(
        trajectory=name,
        prompt=prompt or name,
        prompt_blocks=(tokens if prompt_tokens is None else prompt_tokens) // 4,
        tokens=tokens,
        left=left,
        priority=priority,
        high=high,
        again="eviction",
    )


def play(
    engine: Engine, *at: tuple[float, Callable[[Engine, float], object] | SimulatedRequest]
) -> list[tuple[float, str]]:
    """Submit requests and do other things at their times, and run the engine until it is idle; returns who ended
    when."""
    todo, done = sorted(at, key=lambda item: item[0]), []
    while todo or engine.next_at != IDLE:
        if todo and todo[0][0] <= engine.next_at:
            now, act = todo.pop(0)
            _ = engine.submit(act, now) if isinstance(act, SimulatedRequest) else act(engine, now)
            continue
        now = engine.next_at
        done += [(now, ended.trajectory) for ended in engine.advance(now)]
        engine.report(now)
    return done


def turn(
    gen: int, new: int = 0, tool: str | None = "tool", tool_s: float = 0.0, outcome: str | None = "ok"
) -> TurnRecord:
    """One turn."""
    return TurnRecord(new, gen, tool, outcome, tool_s)


def single(prompt: str, tokens: int, gen: int, sample: int = 0) -> TrajectoryRecord:
    """A trajectory of one turn."""
    return TrajectoryRecord(prompt, sample, tokens, (turn(gen, tool=None),))


def spec(name: str, steps: StepTimes) -> EngineSpec:
    """One engine."""
    return EngineSpec(name, steps.tp, steps)
