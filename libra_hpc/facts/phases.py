"""First and last reward of a run, and of every phase of a drifting task mix."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from . import series
from .rundir import RunDir

FIRST_AND_LAST = 0.2
"""Share of the steps averaged for first and last reward: one step is too noisy, a quarter hides a short warm-up."""


class PhaseReward(msgspec.Struct, frozen=True):
    """Reward within one phase of a drifting task mix."""

    phase: str
    steps: int
    reward_first: float | None
    reward_last: float | None


def first_and_last(values: Sequence[float], planned: int = 0) -> tuple[float | None, float | None]:
    """Means of the first and of the last fifth (at least one value each).

    ``planned`` steps of the run: the first fifth is of these, so that a run that trains on does not change it.
    """
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return None, None
    share = max(1, round(len(finite) * FIRST_AND_LAST))
    first = max(share, round(planned * FIRST_AND_LAST))
    return series.mean(finite[:first]), series.mean(finite[-share:])


def planned_steps(run: RunDir) -> int:
    """Steps of the run in its last snapshot; 0 without one."""
    planned = run.read_json(run.status).get("steps", 0)
    return planned if isinstance(planned, int) else 0


def phase_rewards(rows: Sequence[series.Record]) -> list[PhaseReward]:
    """First and last reward of every stretch of equal ``phase``; empty when the phase never changes."""
    stretches: list[tuple[str, list[series.Record]]] = []
    for row in rows:
        phase = series.phase(row)
        if not stretches or stretches[-1][0] != phase:
            stretches.append((phase, []))
        stretches[-1][1].append(row)
    if len(stretches) < 2:
        return []
    out = []
    for phase, part in stretches:
        first, last = first_and_last(series.column(part, "reward"))
        out.append(PhaseReward(phase=phase, steps=len(part), reward_first=first, reward_last=last))
    return out
