"""What a rollout policy sees and what it answers: state in, decision out, time as an argument.

The rollout leader and the simulator call the same policy objects, through the same
`libra_hpc.sched.dispatch.Dispatcher`.  A policy keeps statistics of its own, but no clock, no I/O and no randomness it
was not given a seed for.  It reads the board, and never changes it.  Units: tokens, seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from libra_hpc.protocol.env import Signal

if TYPE_CHECKING:
    from .board import Board


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
    """Turns done before this one; 0 at admission."""
    ready_at: float
    """When it became ready (same clock as ``now``)."""
    engine: str
    """Where the last turn ran (its prefix may still be cached there); empty at admission."""
    signals: tuple[Signal, ...]
    max_context: int = 0
    """Tokens of context at which its trajectory is ended; 0: not known."""


class Decision(msgspec.Struct, frozen=True):
    """Where a turn goes and why.  ``engine`` empty: it waits."""

    engine: str
    priority: int
    """vLLM priority, lower first."""
    level: int
    """Index of the TP class (ascending TP) the policy put the trajectory in."""
    template: str
    """The reason in words, with the names of ``numbers`` in braces; rendered by `reason` off the hot path."""
    numbers: Mapping[str, float | str]
    keep_s: float = 0.0
    """How long after this turn its KV cache is worth keeping for the next one (0: leave it to the engine's own
    eviction)."""
    wait: Literal["slot", "sibling", "engine"] = "slot"
    """What a waiting turn waits for: any free slot, the end of a trajectory of the same prompt, or a free slot of
    the engine ``wanted``."""
    wanted: str = ""
    """The engine a turn waits for (its prefix is cached there and costs more to compute again than the wait)."""

    @property
    def reason(self) -> str:
        """The reason as a sentence."""
        return self.template.format(**self.numbers)


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
    context_tokens: int = 0
    """Whole context at the end."""


class Policy(Protocol):
    """A rollout scheduling policy."""

    name: str

    def key(self, turn: TurnView, now: float) -> float:
        """Place of a ready turn in the queue, lowest first.

        Asked when the turn becomes ready and again whenever a trajectory of its prompt finishes; ties go first come,
        first served.
        """

    def route(self, turn: TurnView, board: Board, now: float) -> Decision:
        """Choose an engine for a ready turn, or let it wait.  Only engines with ``open`` true and ``inflight < cap``
        may be chosen."""

    def finished(self, record: Finished, now: float) -> None:
        """Learn from a completed trajectory."""

    def forget(self, trajectory: str) -> None:
        """A trajectory was given up; it will not finish."""
