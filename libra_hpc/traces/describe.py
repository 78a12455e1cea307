"""Describe a trace: counts, quantiles, tools, and the share of the longest trajectories."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from operator import attrgetter

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
    tool: str
    calls: int
    seconds: Spread
    outcomes: dict[str, int]


class Description(msgspec.Struct, frozen=True):
    trajectories: int
    prompts: int
    groups: int
    """Prompts with two samples or more."""
    turns_total: int
    generated_total: int
    turns: Spread
    generated: Spread
    generated_per_turn: Spread
    prompt_tokens: Spread
    context: Spread
    """At the end of a trajectory."""
    payload: Spread | None
    tool_s: Spread | None
    tail_share: float
    """Share of the generated tokens in the longest `TAIL` of the trajectories (at least one)."""
    tools: list[ToolUse]
    """Most called first."""
    mean_reward: float | None


def describe(trajectories: Sequence[TrajectoryRecord]) -> Description:
    turns = [turn for one in trajectories for turn in one.turns]
    calls = [turn for turn in turns if turn.tool is not None]
    generated = sorted(one.generated for one in trajectories)
    per_prompt = Counter(one.prompt_id for one in trajectories)
    return Description(
        trajectories=len(trajectories),
        prompts=len(per_prompt),
        groups=sum(count > 1 for count in per_prompt.values()),
        turns_total=len(turns),
        generated_total=sum(generated),
        turns=_some(float(len(one.turns)) for one in trajectories),
        generated=_some(generated),
        generated_per_turn=_some(map(attrgetter("gen_tokens"), turns)),
        prompt_tokens=_some(map(attrgetter("prompt_tokens"), trajectories)),
        context=_some(map(attrgetter("context"), trajectories)),
        payload=spread(turn.new_tokens for one in trajectories for turn in one.turns[1:] if not turn.new_sample),
        tool_s=spread(turn.tool_s for turn in calls),
        tail_share=tail_share(generated),
        tools=_tools(calls),
        mean_reward=_mean([one.reward for one in trajectories if one.reward is not None]),
    )


def _tools(calls: Sequence[TurnRecord]) -> list[ToolUse]:
    found = []
    for tool, count in Counter(turn.tool for turn in calls).most_common():
        own = [turn for turn in calls if turn.tool == tool]
        outcomes = Counter(turn.outcome for turn in own if turn.outcome is not None)
        found.append(ToolUse(str(tool), count, _some(turn.tool_s for turn in own), dict(outcomes.most_common())))
    return found


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _some(values: Iterable[float]) -> Spread:
    found = spread(values)
    if found is None:
        raise ValueError("a trace has at least one trajectory of at least one turn")
    return found


def tail_share(ordered: Sequence[float], tail: float = TAIL) -> float:
    """Share of the sum in the largest ``tail`` of ascending values (at least one)."""
    return sum(ordered[-max(round(tail * len(ordered)), 1) :]) / sum(ordered)


def spread(values: Iterable[float]) -> Spread | None:
    """Describe values; None if there are none."""
    ordered = sorted(values)
    if not ordered:
        return None
    p50, p90, p99 = (quantile(ordered, share) for share in (0.5, 0.9, 0.99))
    mean = math.fsum(ordered) / len(ordered)
    return Spread(p50=p50, p90=p90, p99=p99, most=ordered[-1], mean=mean)


def quantile(ordered: Sequence[float], share: float) -> float:
    """Quantile of sorted values, with linear interpolation (numpy's default)."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
