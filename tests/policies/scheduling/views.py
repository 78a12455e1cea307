"""Short constructors of what policies see."""

from __future__ import annotations

from libra_hpc.policies.scheduling.board import Board
from libra_hpc.policies.scheduling.protocol import Finished, TurnView
from libra_hpc.protocol.engine_state import EngineStats
from libra_hpc.protocol.env import Signal

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
    return TurnView(
        trajectory=name,
        prompt_id=prompt,
        sample=sample,
        task="task",
        context_tokens=context,
        attained_tokens=attained,
        turns=turns,
        ready_at=ready,
        engine=at,
        signals=signals,
        max_context=limit,
    )


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
    return Finished(
        trajectory=name,
        prompt_id=prompt,
        sample=0,
        task=task,
        generated_tokens=total,
        turns=len(signals) + 1,
        at_signal=at,
        signals=signals,
        version=version,
    )


def stats(
    steps: int = 0, busy: float = 0.0, *, kv: float = 0.1, prefill: int = 0, waiting: int = 0, preemptions: int = 0
) -> EngineStats:
    """Counters of an engine."""
    return EngineStats(
        version=0,
        running=1,
        waiting=waiting,
        kv_use=kv,
        generated_tokens=steps,
        prefill_tokens=prefill,
        cached_tokens=0,
        preemptions=preemptions,
        steps=steps,
        busy_s=busy,
    )
