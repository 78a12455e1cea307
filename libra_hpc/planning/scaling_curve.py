"""The scaling curve: the best plan at several numbers of nodes, and its knee.

The knee is the point farthest above the line from the first to the last point, both axes scaled to 0..1. Before it, a
device brings more than average. Satopaa et al., "Finding a 'Kneedle' in a Haystack", 2011.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from libra_hpc.errors import UserError
from libra_hpc.models.step_times.lookup import StepLookup

from .best_plan import best_plans
from .request import PlanRequest, RunPlan

POINTS = 8
"""Most numbers of nodes in one sweep."""
BENT = 0.05
"""Least height above the line, as a share of the range; a flatter curve has no knee."""
FLAT = 0.02
"""Growth over the whole range below which the smallest number of devices is the knee."""


class ScalingPoint(msgspec.Struct, frozen=True):
    """One number of devices; ``plan`` is None where nothing fits."""

    devices: int
    plan: RunPlan | None
    why: str = ""
    """Why there is no plan."""


def sweep(asked: PlanRequest, steps: StepLookup, nodes: Sequence[int]) -> list[ScalingPoint]:
    """The best plan of the only pool at each number of nodes."""
    asked = replace(asked, in_turn=None)
    node_devices = asked.pools[0].node_devices
    points = []
    for n in nodes:
        try:
            points.append(ScalingPoint(n * node_devices, best_plans(asked, steps, nodes=[n]).plans[0]))
        except UserError as error:
            points.append(ScalingPoint(n * node_devices, None, str(error)))
    return points


def steps(low: int, high: int) -> list[int]:
    """At most `POINTS` numbers of nodes from ``low`` to ``high``, both included, evenly spread."""
    count = min(POINTS, high - low + 1)
    return sorted({round(low + (high - low) * i / max(1, count - 1)) for i in range(count)})


def knee(points: Sequence[ScalingPoint]) -> int | None:
    """Index of the knee in ``points``; None when the curve is straight, bends upwards or is too short."""
    known = [(i, p.devices, p.plan.tokens_s) for i, p in enumerate(points) if p.plan is not None]
    if len(known) < 3:
        return None
    (_, x0, y0), (_, x1, y1) = known[0], known[-1]
    if max(y for _, _, y in known) < (1.0 + FLAT) * y0:
        return known[0][0]
    if y1 <= y0:
        return max(known, key=lambda k: (k[2], -k[1]))[0]
    heights = [((y - y0) / (y1 - y0) - (x - x0) / (x1 - x0), i) for i, x, y in known]
    height, index = max(heights, key=lambda h: h[0])
    return index if height >= BENT else None
