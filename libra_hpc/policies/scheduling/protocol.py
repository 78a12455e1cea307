"""What a rollout policy sees and what it answers: state in, decision out, time as an argument.

The rollout leader and the simulator run the same policy objects through the same `dispatch.Dispatcher`.  A policy has
statistics of its own.  It has no clock, no I/O and no randomness without a seed, and it never changes the board.
Units: tokens, seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from libra_hpc.protocol.env import Signal
from libra_hpc.protocol.trace import TrajectoryRecord, all_signals

if TYPE_CHECKING:
    from .board import Board


Wait = Literal["slot", "last", "room"]
"""What a waiting turn waits for.

- ``slot``: any free slot. It is offered again in the next pass, or behind the others where many refuse.
- ``last``: a slot at its last engine. It is offered again when that has one, gets new weights, or takes no turns.
- ``room``: room in any KV cache. Nobody behind it is offered until it has some.
"""


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
    """Finished turns; 0 at admission."""
    ready_at: float
    """When it became ready, on the clock of ``now``."""
    engine: str
    """Engine of the last turn, where the prefix may still be cached; empty at admission, and where a new sample shares
    less than half of its context with the one before.
    """
    signals: tuple[Signal, ...]
    max_context: int = 0
    """Context tokens at which the trajectory ends; 0 if unknown."""


class Decision(msgspec.Struct, frozen=True):
    """Where a turn goes and why; an empty ``engine`` means that it waits."""

    engine: str
    priority: int
    """vLLM priority, lower first."""
    level: int
    """Index of the TP class of the trajectory, in ascending TP."""
    template: str
    """The reason, with names of ``numbers`` in braces; `reason` fills them in, off the hot path."""
    numbers: Mapping[str, float | str]
    wait: Wait = "slot"
    """Without an engine: when the turn is offered again."""

    @property
    def reason(self) -> str:
        """The reason as a sentence."""
        return self.template.format(**self.numbers)


class Finished(msgspec.Struct, frozen=True):
    """A completed trajectory, for policies to learn from."""

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
    """Tokens of its longest context."""

    @classmethod
    def of(cls, one: TrajectoryRecord, trajectory: str, task: str = "") -> Finished:
        """What a trajectory teaches; ``trajectory``: as its turns named it, ``task``: of one that names none."""
        signals, at_signal = all_signals(one.turns)
        return cls(
            trajectory=trajectory,
            prompt_id=one.prompt_id,
            sample=one.sample,
            task=one.task or task,
            generated_tokens=one.generated,
            turns=len(one.turns),
            at_signal=tuple(at_signal),
            signals=tuple(signals),
            version=one.versions[-1][0] if one.versions else 0,
            context_tokens=one.context,
        )


class Policy(Protocol):
    """A rollout scheduling policy."""

    name: str

    def key(self, turn: TurnView, now: float) -> float:
        """Place of a ready turn in the queue, lowest first; ties go first come, first served.

        Called when the turn becomes ready, and again whenever a sibling ends.
        """

    def route(self, turn: TurnView, board: Board, now: float) -> Decision:
        """Choose an engine for a ready turn, or let it wait.

        Only engines with ``open`` true and ``inflight < cap`` may be chosen.
        """

    def finished(self, record: Finished, now: float) -> None:
        """Learn from a completed trajectory."""

    def forget(self, trajectory: str) -> None:
        """A trajectory was aborted; it will not finish."""
