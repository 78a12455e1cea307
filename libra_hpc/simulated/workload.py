"""The trajectories of a dry run, in the order of its prompts: a trace or generated ones.

* A trace is grouped by prompt; a longer run starts again at its beginning.
* Generated trajectories fill the run; several presets follow one another, each for an equal share (abrupt drift).
* Both depend on the settings alone, so every host has the same trajectories.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from libra_hpc.protocol.trace import TrajectoryRecord
from libra_hpc.traces.generate import Dials, generate
from libra_hpc.traces.read import read_trace

from .settings import Workload

Group = list[TrajectoryRecord]
"""The trajectories of one prompt."""


def groups(workload: Workload) -> list[Group]:
    """Groups in the order of the run.  Raises `UserError` for an unreadable trace or dials out of range."""
    found: dict[str, Group] = {}
    for spec in read_trace(Path(workload.trace)).trajectories if workload.trace else _generated(workload):
        found.setdefault(spec.prompt_id, []).append(spec)
    return list(found.values())


def dials(workload: Workload) -> list[tuple[str, Dials]]:
    parts = len(workload.presets)
    out = []
    for number, preset in enumerate(workload.presets):
        prompts = workload.prompts * (number + 1) // parts - workload.prompts * number // parts
        if prompts:
            mine = Dials(
                trajectories=prompts * workload.group,
                group=workload.group,
                seed=workload.seed + number,
                sibling=workload.sibling,
                outcome=workload.outcome,
                drift=workload.drift,
                max_context=workload.max_context,
            )
            out.append((preset, mine))
    return out


def _generated(workload: Workload) -> Iterator[TrajectoryRecord]:
    for number, (preset, mine) in enumerate(dials(workload)):
        for spec in generate(preset, mine):
            yield msgspec.structs.replace(spec, prompt_id=f"{number}/{spec.prompt_id}")
