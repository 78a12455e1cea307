"""Workloads that drift: the generator's presets, with a profile that changes along the run.

A shape maps the position in the run, 0..1, to a profile.  The run is cut into segments of `SEGMENT` = 8 global batches with one profile each, generated and
shuffled by groups within the segment, so that batches differ from each other as random draws do.

* ``search, longer answers``: the tokens a search agent generates grow thirtyfold over the run, what tools return stays: slow, one-way.
* ``r2e, curriculum``: issues that take much reading and little writing, then the reverse, then the first again: two sudden changes.
* ``math and search``: the tasks swing from search to mathematics and back, with mixtures in between: a cosine that is cut at both ends.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import msgspec

from libra_hpc.sim.traces.generate import Dials, generate
from libra_hpc.sim.traces.profiles import MATH, R2E, SEARCH, Profile, Tool
from libra_hpc.sim.workload import TrajectorySpec

SEGMENT = 8
MAX_CONTEXT = 16_384
"""Tokens at which trajectories end; the KV caches of all engines hold several of these."""

SIGMA = 0.8
"""Of log lengths: the longest tenth then has 32 % of the tokens, the lower end of measured agentic sessions (31 to 47 %)."""

Shape = Callable[[float], list[tuple[Profile, float]]]
"""Position 0..1 -> profiles and their shares of the groups."""


def longer_answers(position: float) -> list[tuple[Profile, float]]:
    """Search agents that think more and more: 200 to 6,000 tokens in the median."""
    return [(msgspec.structs.replace(SEARCH, sigma=SIGMA, turns=2.0, turns_power=0.0, generated=200.0 * 30.0**position), 1.0)]


def curriculum(position: float) -> list[tuple[Profile, float]]:
    """Reading (short answers to long files), writing, reading."""
    writing = 1.0 / 3.0 <= position < 2.0 / 3.0
    tools = _payload(R2E, 0.25 if writing else 2.0)
    return [(msgspec.structs.replace(R2E, sigma=SIGMA, turns=3.0, turns_power=0.3, generated=6000.0 if writing else 300.0, tools=tools), 1.0)]


def mixture(position: float) -> list[tuple[Profile, float]]:
    """Search at both ends, mathematics in the middle, either alone for a third of the time."""
    share = min(1.0, max(0.0, 0.5 - math.cos(2.0 * math.pi * position)))
    return [(msgspec.structs.replace(MATH, sigma=SIGMA), share), (msgspec.structs.replace(SEARCH, sigma=SIGMA, turns=3.0), 1.0 - share)]


def steady(position: float) -> list[tuple[Profile, float]]:
    """No drift."""
    return [(msgspec.structs.replace(SEARCH, sigma=SIGMA, turns=3.0), 1.0)]


SHAPES: dict[str, Shape] = {"search, longer answers": longer_answers, "r2e, curriculum": curriculum, "math and search": mixture}


def drifting(shape: Shape, batches: int, groups: int, group: int, seed: int) -> list[TrajectorySpec]:
    """``batches`` global batches of ``groups`` groups of ``group`` trajectories, in data order."""
    work: list[TrajectorySpec] = []
    segments = max(1, round(batches / SEGMENT))
    bounds = [round(i * batches / segments) for i in range(segments + 1)]
    rng = random.Random(f"{seed}/order")
    for index in range(segments):
        position = index / max(1, segments - 1)
        wanted = (bounds[index + 1] - bounds[index]) * groups
        parts = shape(position)
        found: list[list[TrajectorySpec]] = []
        for number, (profile, share) in enumerate(parts):
            count = wanted - len(found) if number == len(parts) - 1 else round(wanted * share)
            if count > 0:
                made = generate(profile, Dials(count * group, group, seed * 1000 + index * 10 + number, max_context=MAX_CONTEXT))
                named = [msgspec.structs.replace(t, prompt_id=f"{index}/{t.prompt_id}") for t in made]
                found += [named[i : i + group] for i in range(0, len(named), group)]
        rng.shuffle(found)
        work += [t for one in found for t in one]
    return work


def _payload(profile: Profile, factor: float) -> tuple[Tool, ...]:
    return tuple(
        msgspec.structs.replace(tool, payload=msgspec.structs.replace(tool.payload, median=tool.payload.median * factor)) for tool in profile.tools
    )
