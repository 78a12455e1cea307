"""Seconds of a move of one node, from its order until it works in its new stage."""

from __future__ import annotations

from statistics import median
from typing import Literal

from libra_hpc.config.rollout import PlannerSection
from libra_hpc.protocol.plan import PlanSnapshot

SWITCHES = 3
"""Newest measured moves of a direction: the median of three ignores one outlier."""

Direction = Literal["to_train", "to_rollout"]


def switch_cost(settings: PlannerSection, direction: Direction, snapshot: PlanSnapshot) -> float:
    """Seconds of a move as measured, before that ``switch_cost_s``; nodes that move together take as long as one."""
    seen = [s.seconds for s in snapshot.switches if s.direction == direction][-SWITCHES:]
    return median(seen) if seen else settings.switch_cost_s


def pair_of_switches(settings: PlannerSection, snapshot: PlanSnapshot) -> float:
    """Seconds to training and back."""
    return switch_cost(settings, "to_train", snapshot) + switch_cost(settings, "to_rollout", snapshot)
