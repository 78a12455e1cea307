"""A trajectory as plain numbers: what a line of ``trajectories.jsonl`` or of a trace says, whoever wrote it, and what replays and policies make of it.

The rollout leader writes one line per finished trajectory; the simulator, the rehearsal and the planner read them as workloads, and a scheduling policy
learns from them.  A line may have further fields (engine, versions, times), which are for people; readers ignore what they do not know.
"""

from __future__ import annotations

from typing import Any

import msgspec

from .env import Signal

WHERE_KNOWN = ("exit_code", "passed", "failed")
"""Fields of a turn that a line has only where the tool said so."""


class TurnRecord(msgspec.Struct, frozen=True):
    """One turn: the environment adds ``new_tokens``, the policy generates ``gen_tokens``, then calls ``tool`` (None on the last turn)."""

    new_tokens: int
    """0 on the first turn, whose context is the prompt."""
    gen_tokens: int
    tool: str | None = None
    outcome: str | None = None
    """``ok`` | ``error`` | ``timeout`` | a task's own class; None when the trace does not say."""
    tool_s: float = 0.0
    """Seconds the tool took."""
    exit_code: int | None = None
    passed: int | None = None
    failed: int | None = None

    def line(self) -> dict[str, Any]:
        """The turn as it stands in a line."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None or name not in WHERE_KNOWN}


class TrajectoryRecord(msgspec.Struct, frozen=True):
    """One trajectory."""

    prompt_id: str
    """Same prompt, same id."""
    sample: int
    """Which of the prompt's group."""
    prompt_tokens: int
    turns: tuple[TurnRecord, ...]
    reward: float | None = None

    @property
    def generated(self) -> int:
        """Tokens generated over all turns."""
        return sum(turn.gen_tokens for turn in self.turns)

    @property
    def context(self) -> int:
        """Whole context at the end, tokens."""
        return self.prompt_tokens + sum(turn.new_tokens + turn.gen_tokens for turn in self.turns)


def signal_of(turn: TurnRecord, payload_tokens: int) -> Signal:
    """What the tool at the end of ``turn`` said; its answer adds ``payload_tokens``.  An outcome that is not known counts as ``ok``."""
    return Signal(turn.tool or "", turn.outcome or "ok", payload_tokens, turn.tool_s, turn.exit_code, turn.passed, turn.failed)
