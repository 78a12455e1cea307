"""Invariants of a trajectory record, checked for every format.

* At least one turn, and at least one generated token in each.
* No new tokens in the first turn (its context is the prompt), no tool in the last one.
* No negative number.

A violation is a `ValueError` with a fragment of a sentence; `libra_hpc.traces.read` adds file and line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from libra_hpc.protocol.trace import TrajectoryRecord, TurnRecord


def trajectory(
    prompt_id: str, sample: int, prompt_tokens: int, turns: Sequence[TurnRecord], reward: float | None = None
) -> TrajectoryRecord:
    """Build a checked trajectory without the tool of the last turn; raises `ValueError` with field, value and range."""
    if not turns:
        raise ValueError("turns = []: no turns; valid: at least one turn")
    at_least("prompt_tokens", prompt_tokens, 0)
    at_least("sample", sample, 0)
    if turns[0].new_tokens:
        raise ValueError(
            f"turns[0].new_tokens = {turns[0].new_tokens}: the context of the first turn is prompt_tokens; valid: 0"
        )
    if turns[0].new_sample:
        raise ValueError("turns[0].new_sample = true: the first sample begins with the prompt; valid: false")
    for index, turn in enumerate(turns):
        at_least(f"turns[{index}].new_tokens", turn.new_tokens, int(turn.new_sample))
        at_least(f"turns[{index}].gen_tokens", turn.gen_tokens, 1)
        if not (math.isfinite(turn.tool_s) and turn.tool_s >= 0):
            raise ValueError(f"turns[{index}].tool_s = {turn.tool_s:g}: out of range; valid: seconds >= 0")
        for name, count in (("passed", turn.passed), ("failed", turn.failed)):
            if count is not None:
                at_least(f"turns[{index}].{name}", count, 0)
    last = turns[-1]
    if last.tool is not None or last.outcome is not None or last.tool_s:
        turns = (*turns[:-1], without_tool(last))
    return TrajectoryRecord(
        prompt_id=prompt_id, sample=sample, prompt_tokens=prompt_tokens, turns=tuple(turns), reward=reward
    )


def without_tool(turn: TurnRecord) -> TurnRecord:
    """The turn as a trajectory's last one."""
    return TurnRecord(turn.new_tokens, turn.gen_tokens, new_sample=turn.new_sample)


def why(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "JSON is nested too deeply to be a trace"
    if not isinstance(error, msgspec.DecodeError):
        return str(error)
    text = str(error).rstrip(".")
    return text[0].lower() + text[1:] if isinstance(error, msgspec.ValidationError) else f"not JSON ({text})"


def at_least(field: str, value: int, least: int) -> None:
    if value < least:
        problem = "negative" if value < 0 else "too small"
        raise ValueError(f"{field} = {value}: {problem}; valid: an integer >= {least}")
