"""Workloads that drift, so that the stage with the most work changes during the run.

A workload maps a step to the profiles of its batch. Each segment of `SEGMENT` global batches has one mixture, shuffled
by groups. `DOCUMENTS` are questions about 12,000 tokens of text with short answers, most work for training. `REASONING`
is a short question with thousands of tokens of thought, most work for rollout.

- ``answers grow``: documents; the median answer doubles every `DOUBLING` steps. Slow, one way.
- ``curriculum``: documents and reasoning alternate every `PHASE` steps. Sudden.
- ``steady``: half of each, without drift.
- ``mixture``: the share of reasoning follows a cosine of `PERIOD` steps. Slow, both ways.

The best split is 9 training nodes of 12 for documents and 3 for reasoning, on one seed. The constants were fixed before
the live planner ran.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import msgspec

from libra_hpc.protocol.trace import TrajectoryRecord
from libra_hpc.traces.generate import Dials, generate
from libra_hpc.traces.profiles import DOCUMENTS, MATH, Profile

SEGMENT = 8
"""Global batches with one mixture."""
MAX_CONTEXT = 32_768
"""Tokens at which trajectories end."""
DOUBLING, PHASE, PERIOD = 30, 40, 80
"""Steps."""

REASONING = msgspec.structs.replace(MATH, sigma=DOCUMENTS.sigma, generated=6000)

Workload = Callable[[float], list[tuple[Profile, float]]]
"""Step, from 0 -> profiles and their shares of the groups."""


def answers_grow(step: float) -> list[tuple[Profile, float]]:
    return [(msgspec.structs.replace(DOCUMENTS, generated=DOCUMENTS.generated * 2.0 ** (step / DOUBLING)), 1.0)]


def curriculum(step: float) -> list[tuple[Profile, float]]:
    return [(REASONING if step // PHASE % 2 else DOCUMENTS, 1.0)]


def mixture(step: float) -> list[tuple[Profile, float]]:
    """Documents alone at first, reasoning alone half a period later."""
    share = 0.5 - 0.5 * math.cos(2.0 * math.pi * step / PERIOD)
    return [(REASONING, share), (DOCUMENTS, 1.0 - share)]


def steady(step: float) -> list[tuple[Profile, float]]:
    return [(REASONING, 0.5), (DOCUMENTS, 0.5)]


WORKLOADS: dict[str, Workload] = {
    "answers grow": answers_grow,
    "curriculum": curriculum,
    "mixture": mixture,
    "steady": steady,
}


def drifting(workload: Workload, batches: int, groups: int, group: int, seed: int) -> list[TrajectoryRecord]:
    """``batches`` global batches of ``groups`` groups of ``group`` trajectories, in data order."""
    work: list[TrajectoryRecord] = []
    rng = random.Random(f"{seed}/order")
    for index, first in enumerate(range(0, batches, SEGMENT)):
        count = min(SEGMENT, batches - first)
        wanted = count * groups
        parts = workload(first + (count - 1) / 2.0)
        found: list[list[TrajectoryRecord]] = []
        for number, (profile, share) in enumerate(parts):
            took = wanted - len(found) if number == len(parts) - 1 else round(wanted * share)
            if took > 0:
                made = generate(
                    profile, Dials(took * group, group, seed * 1000 + index * 10 + number, max_context=MAX_CONTEXT)
                )
                named = [msgspec.structs.replace(t, prompt_id=f"{index}/{t.prompt_id}") for t in made]
                found += [named[i : i + group] for i in range(0, len(named), group)]
        rng.shuffle(found)
        work += [t for one in found for t in one]
    return work
