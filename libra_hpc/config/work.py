"""Section of the run file about the work of a task: how long its trajectories are."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from .section import FilePath, Seconds, Section, Tokens, Unit, Valid


class WorkSection(Section, frozen=True):
    """``[task.work]``: means of the task's trajectories, to plan for and for dry runs. 0: what its class or its rows
    say, else assumed."""

    trace: FilePath = ""
    """Run directory or trace, instead of all other keys; empty: none."""
    turns: Annotated[float, Meta(ge=0), Valid("0, or a number >= 1")] = 0.0
    """Turns of a trajectory. Assumed: 8."""
    prompt_tokens: Annotated[Tokens, Meta(ge=0)] = 0
    """Length of a prompt. Assumed: 1/16 of ``rollout.max_model_len``."""
    answer_tokens: Annotated[float, Meta(ge=0), Unit("tokens")] = 0.0
    """Length of a turn of the policy. Assumed: 1/8 of ``rollout.max_model_len`` in all turns together."""
    observation_tokens: Annotated[float, Meta(ge=0), Unit("tokens")] = 0.0
    """Length of a tool's answer. Assumed: 1/256 of ``rollout.max_model_len``."""
    tool_s: Annotated[Seconds, Meta(ge=0)] = 0.0
    """Time of a tool call, one a turn. Assumed: 1."""
    spread: Annotated[float, Meta(ge=0, le=5)] = 1.0
    """Standard deviation of the log of a trajectory's generated tokens. At 1, the longest tenth has 39 % of them, in
    agentic coding 31 to 47 %."""


UNSAID = WorkSection()
