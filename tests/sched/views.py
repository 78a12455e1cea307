"""Short constructors of what policies see."""

from __future__ import annotations

from libra_hpc.protocol.env import Signal
from libra_hpc.protocol.rollout import EngineStats
from libra_hpc.sched.board import Board
from libra_hpc.sched.protocol import Finished, TurnView

OK, MISS = Signal("get", "ok", 5, 0.1), Signal("get", "miss", 5, 0.1)


def board(*engines: tuple[str, int], cap: int = 64, kv: int = 100_000) -> Board:
    """A board of idle engines (name, TP) with constant caps."""
    made = Board(cap, adaptive=False)
    for name, tp in engines:
        made.up(name, tp, kv, 0)
    return made


def turn(
    name: str = "t",
    prompt: str = "p",
    *,
    sample: int = 1,
    at: str = "",
    turns: int = 0,
    context: int = 500,
    attained: int = 0,
    ready: float = 0.0,
    signals: tuple[Signal, ...] = (),
    limit: int = 0,
) -> TurnView:
    """A turn of trajectory ``name``."""
    return TurnView(name, prompt, sample, "task", context, attained, turns, ready, at, signals, limit)


def finished(
    total: int,
    prompt: str = "p",
    name: str = "done",
    *,
    version: int = 0,
    signals: tuple[Signal, ...] = (),
    at: tuple[int, ...] = (),
    task: str = "task",
) -> Finished:
    """A completed trajectory."""
    return Finished(name, prompt, 0, task, total, len(signals) + 1, at, signals, version)


def stats(
    steps: int = 0, busy: float = 0.0, *, kv: float = 0.1, prefill: int = 0, waiting: int = 0, preemptions: int = 0
) -> EngineStats:
    """Counters of an engine."""
    return EngineStats(0, 1, waiting, kv, steps, prefill, 0, preemptions, steps, busy)
