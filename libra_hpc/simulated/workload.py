"""The trajectories a dry run replays, in the order of its prompts: a trace, or generated ones.

A trace is grouped by prompt and starts again when the run is longer.  Generated trajectories are as many as the run
has; several presets follow one another, each for an equal share of it, which is the sharpest drift there is.  Both are
functions of the settings alone, so every host has the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from libra_hpc.protocol.trace import TrajectoryRecord
from libra_hpc.traces.generate import Dials, generate
from libra_hpc.traces.read import read_trace

from .settings import Play

Group = list[TrajectoryRecord]
"""Trajectories of one prompt."""


def groups(play: Play) -> list[Group]:
    """Every prompt's trajectories, in the order of the run.  Raises `UserError` for a trace that cannot be read, and
    for dials out of range."""
    found: dict[str, Group] = {}
    for spec in read_trace(Path(play.trace)).trajectories if play.trace else _generated(play):
        found.setdefault(spec.prompt_id, []).append(spec)
    return list(found.values())


def dials(play: Play) -> list[tuple[str, Dials]]:
    """What is generated: preset and dials of each part of the run."""
    parts = len(play.presets)
    out = []
    for number, preset in enumerate(play.presets):
        prompts = play.prompts * (number + 1) // parts - play.prompts * number // parts
        if prompts:
            mine = Dials(
                trajectories=prompts * play.group,
                group=play.group,
                seed=play.seed + number,
                sibling=play.sibling,
                outcome=play.outcome,
                drift=play.drift,
                max_context=play.max_context,
            )
            out.append((preset, mine))
    return out


def _generated(play: Play) -> Iterator[TrajectoryRecord]:
    for number, (preset, mine) in enumerate(dials(play)):
        for spec in generate(preset, mine):
            yield TrajectoryRecord(
                f"{number}/{spec.prompt_id}", spec.sample, spec.prompt_tokens, spec.turns, spec.reward
            )
