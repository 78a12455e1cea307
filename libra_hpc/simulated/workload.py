"""The trajectories of a dry run, in the order of its prompts.

* One recorded trace is grouped by prompt; a longer run starts again at its beginning.
* Other work of the run file (`libra_hpc.traces.run_work`) is generated for the run.
* Presets follow one another, each for an equal share of the run (abrupt drift).
* All depend on the configuration alone, so every host has the same trajectories.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil

from msgspec.structs import replace

from libra_hpc.config.run import RunConfig
from libra_hpc.protocol.trace import TrajectoryRecord
from libra_hpc.traces.run_work import Work, run_work

Group = list[TrajectoryRecord]
"""The trajectories of one prompt."""


MOST_PROMPTS = 16_384
"""Prompts that are made of a preset, in two seconds and 150 MB; a longer run uses them again."""


class Groups:
    """Groups in the order of the run.  Raises `UserError` as `run_work` does, and where a prompt leaves no room."""

    def __init__(self, config: RunConfig) -> None:
        kinds = in_order(config, run_work(config))
        # A job that only evaluates trains none.
        self._prompts = max(len(kinds), config.run.steps * config.algorithm.prompts_per_step)
        count = min(ceil(self._prompts / len(kinds)), MOST_PROMPTS)
        # Batches of the planner have seeds from 0.
        self._parts = [_grouped(kind.recorded or kind.batch(count, -1 - config.run.seed)) for kind in kinds]

    def __getitem__(self, index: int) -> Group:
        """The group of a prompt; behind the end of the run it begins again."""
        part = self._parts[index * len(self._parts) // self._prompts % len(self._parts)]
        return part[index % len(part)]


def in_order(config: RunConfig, work: Work) -> list[Work]:
    """What the run plays, one after the other: presets alone, and tasks together."""
    return [replace(work, parts=(part,)) for part in work.parts] if config.simulated.presets else [work]


def _grouped(specs: Iterable[TrajectoryRecord]) -> list[Group]:
    found: dict[str, Group] = {}
    for spec in specs:
        found.setdefault(spec.prompt_id, []).append(spec)
    return list(found.values())
