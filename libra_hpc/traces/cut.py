"""End trajectories where their context is full, as a run does at ``rollout.max_model_len``.

- An answer longer than the room -> it ends with the context.
- No room for a token behind a tool result -> the trajectory ends before that turn.
- No room for a token behind the prompt -> left out, as a run refuses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from libra_hpc.protocol.trace import TrajectoryRecord, TurnRecord

from .record import without_tool


class Cut(NamedTuple):
    """Trajectories within the limit, and how many were longer."""

    trajectories: list[TrajectoryRecord]
    shortened: int
    left_out: int


def cut_at(work: Sequence[TrajectoryRecord], max_context: int) -> Cut:
    """End every trajectory at ``max_context`` tokens."""
    kept: list[TrajectoryRecord] = []
    shortened = left_out = 0
    for one in work:
        if one.context <= max_context:
            kept.append(one)
        elif turns := _within(one, max_context):
            shortened += 1
            kept.append(replace(one, turns=turns, reward=0.0))
        else:
            left_out += 1
    return Cut(kept, shortened, left_out)


def _within(one: TrajectoryRecord, max_context: int) -> tuple[TurnRecord, ...]:
    turns: list[TurnRecord] = []
    room = max_context - one.prompt_tokens
    for turn in one.turns:
        room = (max_context if turn.new_sample else room) - turn.new_tokens
        if room < 1:
            break
        turns.append(replace(turn, gen_tokens=min(turn.gen_tokens, room)))
        room -= turn.gen_tokens
        if room < 0:
            break
    if turns:
        # Nothing follows the tool of the last turn.
        turns[-1] = without_tool(turns[-1])
    return tuple(turns)
