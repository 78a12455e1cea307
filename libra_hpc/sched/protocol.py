"""What a rollout policy sees and what it answers: snapshot in, decision out, time as an argument.

The rollout leader and the simulator call the same policy objects.  A policy keeps statistics of its own, but no clock, no I/O and no randomness it was
not given a seed for.  Units: tokens, seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from libra_hpc.protocol.env import Signal


class EngineView(msgspec.Struct, frozen=True):
    """One vLLM replica as the leader knows it now."""

    engine: str
    tp: int
    kv_capacity: int
    """Tokens of KV cache."""
    inflight: int
    """Turns sent and not answered."""
    inflight_tokens: int
    """Context tokens of those turns (a turn whose tool runs is not in flight and holds no slot)."""
    max_inflight: int
    kv_use: float
    """Last reported, 0..1."""
    version: int
    decode_s: float
    """Measured seconds per decoded token of one sequence at the present batch; 0.0 while unknown."""
    prefill_s: float
    """Measured seconds per prefilled token; 0.0 while unknown."""


class TurnView(msgspec.Struct, frozen=True):
    """A turn that needs an engine."""

    trajectory: str
    prompt_id: str
    sample: int
    task: str
    context_tokens: int
    attained_tokens: int
    """Generated so far."""
    turns: int
    waited_s: float
    """Since this turn became ready."""
    engine: str
    """Where the last turn ran (its prefix may still be cached there); empty at admission."""
    signals: tuple[Signal, ...]


class Decision(msgspec.Struct, frozen=True):
    """Where a turn goes and why.  ``engine`` empty: wait, every admissible engine is full."""

    engine: str
    priority: int
    """vLLM priority, lower first."""
    level: int
    """Index of the TP class (ascending TP) the policy put the trajectory in."""
    reason: str
    numbers: dict[str, float]


class Finished(msgspec.Struct, frozen=True):
    """A completed trajectory, for learning: generated tokens in all, and before each tool return."""

    trajectory: str
    prompt_id: str
    sample: int
    task: str
    generated_tokens: int
    turns: int
    at_signal: tuple[int, ...]
    """Generated tokens when signal i arrived."""
    signals: tuple[Signal, ...]
    version: int


class Policy(Protocol):
    """A rollout scheduling policy."""

    name: str

    def route(self, turn: TurnView, engines: Sequence[EngineView], now: float) -> Decision:
        """Choose an engine for a ready turn, or ask it to wait."""

    def order(self, turns: Sequence[TurnView], now: float) -> list[int]:
        """Order in which waiting turns are offered free slots (indices into ``turns``)."""

    def finished(self, record: Finished, now: float) -> None:
        """Learn from a completed trajectory."""
