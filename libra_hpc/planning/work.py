"""Trajectories to simulate plans with: drawn from a trace, else generated as the assumed distribution says.

- A trace -> whole groups of its prompts, drawn with replacement, cut to the run's group size.
- No trace -> `libra_hpc.traces.generate` with the assumed means and its measured correlation of siblings.

Every seed is another batch; equal seeds give equal batches.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import lru_cache
from statistics import fmean
from typing import NamedTuple

import msgspec
from msgspec.structs import asdict, replace

from libra_hpc.errors import invalid
from libra_hpc.protocol.trace import TrajectoryRecord
from libra_hpc.traces.generate import Dials, generate
from libra_hpc.traces.profiles import Lognormal, Profile, Tool

SAMPLED = 2048
"""Trajectories of an assumed distribution. Half: the longest one of a batch scatters; double: a plan takes longer."""
PROMPT_SIGMA = 0.4
"""Spread of assumed prompts and tool results, as in the presets of `libra_hpc.traces.profiles`."""
LEAST = {"generated": 1, "sigma": 0, "prompt": 1, "turns": 1, "new_tokens": 0, "tool_s": 0}
MAX_SIGMA = 5.0
"""Widest log-normal: at 5 half of the trajectories have less than a quarter of a millionth of the mean."""
MOST_OVER_MEAN = 8.0
"""Longest assumed tool call and tool result over the mean."""


class Assumed(msgspec.Struct, frozen=True):
    """A log-normal distribution of lengths; None stands for a share of the longest context."""

    generated: float | None = None
    """Mean generated tokens of a trajectory; None: 1/8."""
    sigma: float = 1.0
    """Shape. At 1, the longest tenth has 39 % of the tokens; in agentic coding sessions it has 31..47 %."""
    prompt: int | None = None
    """Prompt tokens; None: 1/16."""
    turns: float = 8.0
    new_tokens: float | None = None
    """Tokens of a tool result; None: 1/256."""
    tool_s: float = 1.0
    """Seconds of a tool call."""

    def profile(self, longest: int) -> Profile:
        """For contexts of at most ``longest`` tokens; raises `UserError` for a value out of range."""
        generated = self.generated if self.generated is not None else max(1.0, longest / 8)
        prompt = self.prompt if self.prompt is not None else max(1, longest // 16)
        new_tokens = self.new_tokens if self.new_tokens is not None else longest / 256
        values = {**asdict(self), "generated": generated, "prompt": prompt, "new_tokens": new_tokens}
        for name, least in LEAST.items():
            if not least <= values[name] < math.inf:
                raise invalid(name, values[name], "out of range", f"a number >= {least}")
        if self.sigma > MAX_SIGMA:
            raise invalid("sigma", self.sigma, "too wide for a stated mean", f"a number from 0 to {MAX_SIGMA:g}")
        room = longest - prompt
        if room <= 0:
            raise invalid("prompt", prompt, f"a context has {longest:,} tokens", f"an integer below {longest}")
        if generated > room:
            why = f"a context of {longest:,} has room for {room:,} after a prompt of {prompt:,}"
            raise invalid("generated", generated, why, f"a number from 1 to {room}")
        tool = Tool(
            name="tool",
            weight=1.0,
            seconds=_around(self.tool_s, MOST_OVER_MEAN * self.tool_s),
            payload=_around(max(1.0, new_tokens), max(1.0, MOST_OVER_MEAN * new_tokens)),
            error_rate=0.0,
        )
        return Profile(
            name="assumed",
            generated=generated * math.exp(-(self.sigma**2) / 2),
            sigma=self.sigma,
            turns=self.turns,
            turns_power=1.0,
            prompt=_around(prompt, min(longest - 1.0, MOST_OVER_MEAN * prompt)),
            tools=(tool,),
        )


def _around(mean: float, most: float) -> Lognormal:
    return Lognormal(mean * math.exp(-(PROMPT_SIGMA**2) / 2), PROMPT_SIGMA, most)


class WorkSummary(NamedTuple):
    """Means and extremes of trajectories; tokens, and seconds of tools."""

    generated: float
    most_generated: int
    longest_context: int
    turns: float
    tool_s: float

    def __str__(self) -> str:
        return (
            f"generated {self.generated:,.0f} tokens, longest {self.most_generated:,}; context up to"
            f" {self.longest_context:,}; {self.turns:.1f} turns, {self.tool_s:.1f} s of tools"
        )


class Work(msgspec.Struct, frozen=True):
    """Where batches come from."""

    recorded: tuple[TrajectoryRecord, ...]
    """Finished trajectories of a trace; empty: ``assumed``."""
    assumed: Assumed
    longest: int
    """Tokens at which a trajectory ends."""
    group: int
    """Trajectories of a prompt."""

    def sample(self, groups: int) -> Sequence[TrajectoryRecord]:
        """All recorded trajectories, else at least so many groups."""
        return self.recorded or self.batch(max(SAMPLED // self.group, groups), 0)

    def summary(self, groups: int) -> WorkSummary:
        """What the sample is like."""
        some = self.sample(groups)
        generated = [one.generated for one in some]
        return WorkSummary(
            generated=fmean(generated),
            most_generated=max(generated),
            longest_context=max(one.context for one in some),
            turns=fmean(len(one.turns) for one in some),
            tool_s=fmean(sum(turn.tool_s for turn in one.turns) for one in some),
        )

    def batch(self, groups: int, seed: int) -> list[TrajectoryRecord]:
        """So many groups."""
        if self.recorded:
            return _drawn(self.recorded, groups, self.group, seed)
        return _generated(self.assumed, self.longest, groups * self.group, self.group, seed)


def mean_context(work: Sequence[TrajectoryRecord]) -> float:
    """Tokens behind a generated one: of a trajectory half of those at its ends, weighted by what it generates."""
    generated = sum(one.generated for one in work)
    return sum(one.generated * (one.prompt_tokens + one.context) / 2 for one in work) / generated


@lru_cache(maxsize=8)
def _generated(assumed: Assumed, longest: int, trajectories: int, group: int, seed: int) -> list[TrajectoryRecord]:
    """Not to be changed: other plays have the same."""
    dials = Dials(trajectories=trajectories, group=group, seed=seed, max_context=longest)
    return generate(assumed.profile(longest), dials)


def _drawn(recorded: Sequence[TrajectoryRecord], count: int, group: int, seed: int) -> list[TrajectoryRecord]:
    groups: dict[str, list[TrajectoryRecord]] = {}
    for one in recorded:
        groups.setdefault(one.prompt_id, []).append(one)
    known, draw = list(groups.values()), random.Random(f"{seed}/batch")
    made: list[TrajectoryRecord] = []
    for number in range(count):
        members = draw.choice(known)
        # Fewer recorded samples than the run takes: some occur twice.
        chosen = draw.sample(members, group) if len(members) >= group else draw.choices(members, k=group)
        made += [replace(one, prompt_id=f"{number}", sample=sample) for sample, one in enumerate(chosen)]
    return made
