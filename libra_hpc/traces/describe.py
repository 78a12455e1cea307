"""Describe a trace: counts, quantiles, tools, and the share of the longest trajectories."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from libra_hpc.protocol.trace import TrajectoryRecord, TurnRecord

TAIL = 0.1
"""Share of the trajectories that counts as the tail."""


class Spread(msgspec.Struct, frozen=True):
    p50: float
    p90: float
    p99: float
    most: float
    mean: float


class ToolUse(msgspec.Struct, frozen=True):
    calls: int
    seconds: Spread
    outcomes: dict[str, int]


class Description(msgspec.Struct, frozen=True):
    trajectories: int
    prompts: int
    groups: int
    """Prompts with two samples or more."""
    turns: int
    generated: int
    spreads: dict[str, Spread]
    """Quantiles by what they are of; without those that have no values."""
    tail_share: float
    """Share of the generated tokens in the longest `TAIL` of the trajectories (at least one)."""
    tools: dict[str, ToolUse]
    """Most called first."""
    mean_reward: float | None


def describe(trajectories: Sequence[TrajectoryRecord]) -> Description:
    turns = [turn for one in trajectories for turn in one.turns]
    generated = sorted(one.generated for one in trajectories)
    per_prompt = Counter(one.prompt_id for one in trajectories)
    rewards = [one.reward for one in trajectories if one.reward is not None]
    return Description(
        trajectories=len(trajectories),
        prompts=len(per_prompt),
        groups=sum(count > 1 for count in per_prompt.values()),
        turns=len(turns),
        generated=sum(generated),
        spreads=_spreads(trajectories, turns),
        tail_share=tail_share(generated),
        tools=_tools(turns),
        mean_reward=sum(rewards) / len(rewards) if rewards else None,
    )


def _spreads(trajectories: Sequence[TrajectoryRecord], turns: Sequence[TurnRecord]) -> dict[str, Spread]:
    values: dict[str, Iterable[float]] = {
        "turns": (len(one.turns) for one in trajectories),
        "generated tokens": (one.generated for one in trajectories),
        "generated tokens of a turn": (turn.gen_tokens for turn in turns),
        "prompt tokens": (one.prompt_tokens for one in trajectories),
        "context at the end": (one.context for one in trajectories),
        "tokens a tool returns": (t.new_tokens for one in trajectories for t in one.turns[1:] if not t.new_sample),
        "seconds of a tool call": (turn.tool_s for turn in turns if turn.tool is not None),
    }
    return {name: spread(found) for name, each in values.items() if (found := list(each))}


def _tools(turns: Sequence[TurnRecord]) -> dict[str, ToolUse]:
    tools = {}
    for tool, count in Counter(turn.tool for turn in turns if turn.tool is not None).most_common():
        own = [turn for turn in turns if turn.tool == tool]
        outcomes = Counter(turn.outcome for turn in own if turn.outcome is not None)
        tools[tool] = ToolUse(count, spread([turn.tool_s for turn in own]), dict(outcomes.most_common()))
    return tools


def tail_share(ordered: Sequence[float]) -> float:
    """Share of the sum in the largest `TAIL` of ascending values (at least one)."""
    return sum(ordered[-max(round(TAIL * len(ordered)), 1) :]) / sum(ordered)


def spread(values: Iterable[float]) -> Spread:
    """Quantiles with linear interpolation (numpy's default), and the mean."""
    ordered = sorted(values)
    places = [share * (len(ordered) - 1) for share in (0.5, 0.9, 0.99)]
    ends = [(ordered[math.floor(place)], ordered[math.ceil(place)], place % 1) for place in places]
    p50, p90, p99 = (low + (high - low) * part for low, high, part in ends)
    return Spread(p50=p50, p90=p90, p99=p99, most=ordered[-1], mean=math.fsum(ordered) / len(ordered))
