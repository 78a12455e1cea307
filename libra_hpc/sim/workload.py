"""A workload: trajectories as plain data, the common form of every trace reader and generator, and what the simulator plays."""

from __future__ import annotations

import msgspec


class TurnSpec(msgspec.Struct, frozen=True):
    """One turn: the environment adds ``new_tokens``, the policy generates ``gen_tokens``, then calls ``tool`` (None on the last turn)."""

    new_tokens: int
    """0 on the first turn, whose context is the prompt."""
    gen_tokens: int
    tool: str | None = None
    outcome: str | None = None
    """``ok`` | ``error`` | ``timeout`` | a task's own class; None when the trace does not say."""
    tool_s: float = 0.0
    exit_code: int | None = None
    passed: int | None = None
    failed: int | None = None


class TrajectorySpec(msgspec.Struct, frozen=True):
    """One trajectory."""

    prompt_id: str
    sample: int
    prompt_tokens: int
    turns: tuple[TurnSpec, ...]
    reward: float | None = None

    @property
    def generated(self) -> int:
        """Tokens generated over all turns."""
        return sum(turn.gen_tokens for turn in self.turns)

    @property
    def context(self) -> int:
        """Whole context at the end, tokens."""
        return self.prompt_tokens + sum(turn.new_tokens + turn.gen_tokens for turn in self.turns)
