"""Short constructors of what policies see."""

from __future__ import annotations

from libra_hpc.protocol.env import Signal
from libra_hpc.sched.protocol import EngineView, Finished, TurnView

OK, MISS = Signal("get", "ok", 5, 0.1), Signal("get", "miss", 5, 0.1)


def engine(
    name: str, tp: int = 1, inflight: int = 0, tokens: int = 0, *, kv: int = 100_000, most: int = 64, version: int = 0,
    decode: float = 0.0, prefill: float = 0.0,
) -> EngineView:  # fmt: skip
    """An engine, idle unless told otherwise."""
    return EngineView(name, tp, kv, inflight, tokens, most, 0.0, version, decode, prefill)


def turn(
    name: str = "t", prompt: str = "p", *, at: str = "", turns: int = 0, context: int = 500, attained: int = 0, waited: float = 0.0,
    signals: tuple[Signal, ...] = (),
) -> TurnView:  # fmt: skip
    """A turn of trajectory ``name``."""
    return TurnView(name, prompt, 0, "task", context, attained, turns, waited, at, signals)


def finished(
    total: int, prompt: str = "p", name: str = "done", *, version: int = 0, signals: tuple[Signal, ...] = (), at: tuple[int, ...] = ()
) -> Finished:
    """A completed trajectory."""
    return Finished(name, prompt, 0, "task", total, len(signals) + 1, at, signals, version)
