"""Workloads that drift, so that the stage with the most work changes during the run.

A workload maps a step to the profiles of its batch. Each segment of `SEGMENT` global batches has one mixture, shuffled
by groups. `DOCUMENTS` are questions about 12,000 tokens of text with short answers, most work for training. `REASONING`
is a short question with thousands of tokens of thought, most work for rollout.

- ``answers grow``: documents; the median answer doubles every `DOUBLING` steps. Slow, one way.
- ``curriculum``: documents and reasoning alternate every `PHASE` steps. Sudden.
- ``mixture``: the share of reasoning follows a cosine of `PERIOD` steps. Slow, both ways.
- ``jump n``: answers about documents are `JUMP` times as long for n steps from step `JUMP_AT` on. Prompts stay alike.
- ``jumps``: the same for 10 of every 30 steps. ``jump 10, reasoning``: the same with the thoughts of reasoning.
- ``detour n``: reasoning instead of documents for n steps from step `JUMP_AT` on. Prompts differ.

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
JUMP, JUMP_AT = 4.0, 40
"""Factor of the lengths, and the first step that has it."""

REASONING = msgspec.structs.replace(MATH, sigma=DOCUMENTS.sigma, generated=6000)
ANSWERS = msgspec.structs.replace(DOCUMENTS, generated=800)
THOUGHTS = msgspec.structs.replace(REASONING, generated=1500)

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


def jump(steps: int, every: int = 0, profile: Profile = ANSWERS) -> Workload:
    """Longer answers for ``steps`` steps; again ``every`` so many, if not 0."""

    def at(step: float) -> list[tuple[Profile, float]]:
        since = step - JUMP_AT
        long = 0 <= (since % every if every and since >= 0 else since) < steps
        return [(msgspec.structs.replace(profile, generated=profile.generated * (JUMP if long else 1.0)), 1.0)]

    return at


def detour(steps: int) -> Workload:
    return lambda step: [(REASONING if JUMP_AT <= step < JUMP_AT + steps else DOCUMENTS, 1.0)]


def steady(step: float) -> list[tuple[Profile, float]]:
    """No drift: half of each."""
    return [(REASONING, 0.5), (DOCUMENTS, 0.5)]


WORKLOADS: dict[str, Workload] = {"answers grow": answers_grow, "curriculum": curriculum, "mixture": mixture}
JUMPS: dict[str, Workload] = {
    "jump 3": jump(3),
    "jump 10": jump(10),
    "jump 30": jump(30),
    "jumps": jump(10, every=30),
    "jump 10, reasoning": jump(10, profile=THOUGHTS),
    "detour 10": detour(10),
}


def drifting(
    workload: Workload, batches: int, groups: int, group: int, seed: int, segment: int = SEGMENT
) -> list[TrajectoryRecord]:
    """``batches`` global batches of ``groups`` groups of ``group`` trajectories, in data order."""
    work: list[TrajectoryRecord] = []
    rng = random.Random(f"{seed}/order")
    for index, first in enumerate(range(0, batches, segment)):
        count = min(segment, batches - first)
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
