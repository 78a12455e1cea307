"""Workloads that drift, so that the stage with the most work changes during the run.

A workload maps a step to the profiles of its batch. Each segment of `SEGMENT` global batches has one mixture, shuffled
by groups. `DOCUMENTS` are questions about 12,000 tokens of text with short answers, most work for training. `REASONING`
is a short question with thousands of tokens of thought, most work for rollout.

- ``curriculum``: documents and reasoning alternate every `PHASE` steps. Sudden.
- ``steady``: half of each, without drift.

The best split is 9 training nodes of 12 for documents and 3 for reasoning, on one seed. The constants were fixed before
the live planner ran.
"""

from __future__ import annotations

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
PHASE = 40
"""Steps."""

REASONING = msgspec.structs.replace(MATH, sigma=DOCUMENTS.sigma, generated=6000)

Workload = Callable[[float], list[tuple[Profile, float]]]
"""Step, from 0 -> profiles and their shares of the groups."""


def curriculum(step: float) -> list[tuple[Profile, float]]:
    return [(REASONING if step // PHASE % 2 else DOCUMENTS, 1.0)]


def steady(step: float) -> list[tuple[Profile, float]]:
    return [(REASONING, 0.5), (DOCUMENTS, 0.5)]


WORKLOADS: dict[str, Workload] = {"curriculum": curriculum, "steady": steady}


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
