"""Workloads that drift: what a policy in training makes of its tasks changes along the run, and with it which stage has
the most to do.

A law maps the number of a step to the profiles of its batch.  The run is cut into segments of `SEGMENT` = 8 global
batches with one mixture each, generated and shuffled by groups within the segment, so that batches differ from each
other as random draws do.  Two kinds of tasks are at the ends of what post-training meets: `DOCUMENTS`, questions about
12,000 tokens of text that a sentence answers (training reads all of it again for every sample; rollout has the engines'
prefix caches), and `REASONING`, a short question and thousands of tokens of thought (rollout decodes them one by one,
with long contexts to read).

* ``answers grow``: documents; the median answer doubles every `DOUBLING` = 30 steps, 16-fold in 120: slow, one-way.
  Answers of R1-Zero grew by that much.
* ``curriculum``: documents and reasoning take turns every `PHASE` = 40 steps: sudden changes, as between the phases of
  a staged curriculum.
* ``mixture``: the share of reasoning tasks swings between none and all as a cosine of `PERIOD` = 80 steps: slow, both
  ways, and batches are of both kinds.

The constants are round figures.  They were chosen by static splits and the clairvoyant on one seed: the best split is 9
training nodes of 12 for documents and 3 for reasoning, so that there is something to follow.  They were not changed
after the live planner had played them.
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
MAX_CONTEXT = 32_768
"""Tokens at which trajectories end."""
DOUBLING, PHASE, PERIOD = 30, 40, 80
"""Steps."""

REASONING = msgspec.structs.replace(MATH, sigma=DOCUMENTS.sigma, generated=6000)

Workload = Callable[[float], list[tuple[Profile, float]]]
"""Number of a step, from 0 -> profiles and their shares of the groups."""


def answers_grow(step: float) -> list[tuple[Profile, float]]:
    """Documents with longer and longer answers."""
    return [(msgspec.structs.replace(DOCUMENTS, generated=DOCUMENTS.generated * 2.0 ** (step / DOUBLING)), 1.0)]


def curriculum(step: float) -> list[tuple[Profile, float]]:
    """Documents, reasoning, documents, reasoning."""
    return [(REASONING if step // PHASE % 2 else DOCUMENTS, 1.0)]


def mixture(step: float) -> list[tuple[Profile, float]]:
    """Documents alone at first, reasoning alone half a period later."""
    share = 0.5 - 0.5 * math.cos(2.0 * math.pi * step / PERIOD)
    return [(REASONING, share), (DOCUMENTS, 1.0 - share)]


def steady(step: float) -> list[tuple[Profile, float]]:
    """No drift: half of each."""
    return [(REASONING, 0.5), (DOCUMENTS, 0.5)]


WORKLOADS: dict[str, Workload] = {"answers grow": answers_grow, "curriculum": curriculum, "mixture": mixture}


def drifting(law: Workload, batches: int, groups: int, group: int, seed: int) -> list[TrajectoryRecord]:
    """``batches`` global batches of ``groups`` groups of ``group`` trajectories, in data order."""
    work: list[TrajectoryRecord] = []
    rng = random.Random(f"{seed}/order")
    for index, first in enumerate(range(0, batches, SEGMENT)):
        count = min(SEGMENT, batches - first)
        wanted = count * groups
        parts = law(first + (count - 1) / 2.0)
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
