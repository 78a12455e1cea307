"""The work of a run, for the planner and for dry runs: the trajectories that ``[task.work]`` describes.

- A trace -> whole groups of its prompts, drawn with replacement, cut to the run's group size.
- Means -> `libra_hpc.traces.generate` with these and its measured correlation of siblings.
- Several tasks -> groups of each by its weight, spread evenly.
- A dry run with presets -> these, as if they were tasks of equal weight.

Every seed is another batch; equal seeds give equal batches.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from libra_hpc.config.run import RunConfig
from libra_hpc.config.work import WorkSection
from libra_hpc.errors import UserError, invalid
from libra_hpc.facts.rundir import RunDir
from libra_hpc.protocol.trace import TrajectoryRecord

from . import profiles
from .cut import cut_at
from .generate import Dials, generate
from .profiles import Lognormal, Profile, Tool
from .read import read_trace

SAMPLED = 2048
"""Trajectories of means. Half: the longest one of a batch scatters; double: a plan takes longer."""
PROMPT_SIGMA = 0.4
"""Spread of prompts and tool results around their means, as in the presets of `libra_hpc.traces.profiles`."""
MOST_OVER_MEAN = 8.0
"""Longest tool call and tool result over the mean."""
WORDS = {
    "turns": "{:g} turns",
    "prompt_tokens": "prompts of {:,} tokens",
    "answer_tokens": "{:,.0f} tokens a turn",
    "observation_tokens": "{:,.0f} of a tool",
    "tool_s": "{:g} s a tool call",
}
"""Each mean in words; the last two are of trajectories with several turns."""


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


class WorkPart(msgspec.Struct, frozen=True):
    """Where the groups of one task come from."""

    recorded: tuple[TrajectoryRecord, ...] = ()
    """Finished trajectories of a trace; empty: ``profile``."""
    profile: Profile | None = None
    weight: int = 1
    """Its groups among those of all tasks."""


class Work(msgspec.Struct, frozen=True):
    """Where batches come from."""

    parts: tuple[WorkPart, ...]
    group: int
    """Trajectories of a prompt."""
    longest: int = Dials().max_context
    """Tokens at which a generated trajectory ends."""
    source: str = ""
    """What was said and what is assumed, in words."""

    @property
    def recorded(self) -> tuple[TrajectoryRecord, ...]:
        """The trajectories of the only trace."""
        return self.parts[0].recorded if len(self.parts) == 1 else ()

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
        """So many groups, whose prompts no other seed has."""
        ends = list(accumulate(part.weight for part in self.parts))
        shares = [later - before for before, later in pairwise(round(groups * end / ends[-1]) for end in (0, *ends))]
        placed = [
            ((number + 0.5) / count, group)
            for place, (part, count) in enumerate(zip(self.parts, shares, strict=True))
            # Equal tasks have other trajectories.
            for number, group in enumerate(self._groups(part, count, seed + 1_000 * place))
        ]
        ordered = [group for _, group in sorted(placed, key=lambda pair: pair[0])]
        return [replace(one, prompt_id=f"{seed}/{one.prompt_id}") for group in ordered for one in group]

    def _groups(self, part: WorkPart, count: int, seed: int) -> Iterator[Sequence[TrajectoryRecord]]:
        if part.profile is None:
            return _drawn(part.recorded, count, self.group, seed)
        made = _generated(part.profile, self.longest, count * self.group, self.group, seed) if count else []
        return (made[begin : begin + self.group] for begin in range(0, len(made), self.group))


def run_work(config: RunConfig) -> Work:
    """The work of a run.

    Raises `UserError` for a trace that cannot be read, an unknown preset, and means that a context has no room for.
    """
    longest, group, simulated = config.rollout.max_model_len, config.algorithm.group_size, config.simulated
    if config.run.engine == "simulated" and simulated.presets:
        kinds = [profiles.profile(name) for name in simulated.presets]
        named = [replace(kind, name=f"{place}/{kind.name}") for place, kind in enumerate(kinds)]
        parts = tuple(WorkPart(profile=kind) for kind in named)
        return Work(parts, group, longest, f"presets {', '.join(simulated.presets)} (simulated.presets)")
    found, words = list[WorkPart](), list[str]()
    for field, (name, weight, work) in config.task.works.items():
        part, text = (
            _recorded(name, Path(work.trace), longest)
            if work.trace
            else _described(field, name or "task", work, longest)
        )
        found.append(replace(part, weight=weight))
        words.append(f"{name}: {text}" if name else text)
    return Work(tuple(found), group, longest, "; ".join(words))


def of_trace(config: RunConfig, trace: str = "") -> RunConfig:
    """``config`` with the work of a trace alone; empty: without anything that was said about it."""
    return config.changed(task={"work": WorkSection(trace=trace), "train": []})


def mean_context(work: Sequence[TrajectoryRecord]) -> float:
    """Tokens behind a generated one: of a trajectory half of those at its ends, weighted by what it generates."""
    generated = sum(one.generated for one in work)
    return sum(one.generated * (one.prompt_tokens + one.context) / 2 for one in work) / generated


def _recorded(name: str, trace: Path, longest: int) -> tuple[WorkPart, str]:
    """The trajectories of a trace, or of a run directory, and these in words."""
    file = RunDir(trace).trajectories if trace.is_dir() else trace
    cut = cut_at(read_trace(file).trajectories, longest)
    before = f"{name}/" if name else ""
    kept = tuple(replace(one, prompt_id=f"{before}{one.prompt_id}") for one in cut.trajectories if one.generated)
    if not kept:
        raise UserError(f"{trace}: no prompt leaves room for an answer within rollout.max_model_len = {longest}.")
    early = f", {cut.shortened:,} of which end early at rollout.max_model_len" if cut.shortened else ""
    beyond = f", without {cut.left_out:,} whose prompts leave no room" if cut.left_out else ""
    return WorkPart(kept), f"{len(kept):,} trajectories of {file.name}{early}{beyond}"


def _described(field: str, name: str, work: WorkSection, longest: int) -> tuple[WorkPart, str]:
    """Trajectories of means, and these in words."""
    turns, prompt = work.turns or 8.0, work.prompt_tokens or max(1, longest // 16)
    room = longest - prompt
    answer = work.answer_tokens or max(1.0, min(longest / 8, room)) / turns
    values = {
        "turns": turns,
        "prompt_tokens": prompt,
        "answer_tokens": answer,
        "observation_tokens": work.observation_tokens or longest / 256,
        "tool_s": work.tool_s or 1.0,
    }
    if turns < 1:
        raise invalid(f"{field}.turns", turns, "out of range", "0, or a number >= 1")
    if turns * answer > room:
        why = f"{turns:g} turns of them and a prompt of {prompt:,} are more than rollout.max_model_len = {longest:,}"
        raise invalid(f"{field}.answer_tokens", answer, why, "fewer tokens of either")
    profile = Profile(
        name=name,
        generated=turns * answer * math.exp(-(work.spread**2) / 2),
        sigma=work.spread,
        turns=turns,
        turns_power=1.0,
        prompt=_around(prompt, min(longest - 1.0, MOST_OVER_MEAN * prompt)),
        tools=(
            Tool(
                name="tool",
                weight=1.0,
                seconds=_around(values["tool_s"], MOST_OVER_MEAN * values["tool_s"]),
                payload=_around(max(1.0, values["observation_tokens"]), MOST_OVER_MEAN * values["observation_tokens"]),
                error_rate=0.0,
            ),
        ),
    )
    return WorkPart(profile=profile), _in_words(field, work, values)


def _in_words(field: str, work: WorkSection, values: dict[str, float]) -> str:
    words = {**WORDS, "turns": "1 turn"} if values["turns"] == 1 else WORDS
    shown = list(words)[: 3 if values["turns"] == 1 else None]
    known, assumed = (
        ", ".join(words[key].format(values[key]) for key in shown if bool(getattr(work, key)) == said)
        for said in (True, False)
    )
    guess = f"assumed: {assumed}; say it in [{field}]" if assumed else ""
    return "; ".join(filter(None, [known, guess]))


def _around(mean: float, most: float) -> Lognormal:
    return Lognormal(mean * math.exp(-(PROMPT_SIGMA**2) / 2), PROMPT_SIGMA, max(1.0, most))


@lru_cache(maxsize=8)
def _generated(profile: Profile, longest: int, trajectories: int, group: int, seed: int) -> list[TrajectoryRecord]:
    """Not to be changed: other plays have the same."""
    return generate(profile, Dials(trajectories=trajectories, group=group, seed=seed, max_context=longest))


def _drawn(recorded: Sequence[TrajectoryRecord], count: int, group: int, seed: int) -> Iterator[list[TrajectoryRecord]]:
    groups: dict[str, list[TrajectoryRecord]] = {}
    for one in recorded:
        groups.setdefault(one.prompt_id, []).append(one)
    known, draw = list(groups.values()), random.Random(f"{seed}/batch")
    for number in range(count):
        members = draw.choice(known)
        # Fewer recorded samples than the run takes: some occur twice.
        chosen = draw.sample(members, group) if len(members) >= group else draw.choices(members, k=group)
        yield [replace(one, prompt_id=f"{number}/{one.prompt_id}", sample=at) for at, one in enumerate(chosen)]
