"""The trajectories of a dry run, in the order of its prompts: a trace or generated ones.

* A trace is grouped by prompt; a longer run starts again at its beginning.
* Generated trajectories fill the run; several presets follow one another, each for an equal share (abrupt drift).
* Both depend on the configuration alone, so every host has the same trajectories.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from libra_hpc.config.run import RunConfig
from libra_hpc.protocol.trace import TrajectoryRecord
from libra_hpc.traces.generate import Dials, generate
from libra_hpc.traces.read import read_trace

Group = list[TrajectoryRecord]
"""The trajectories of one prompt."""


MOST_PROMPTS = 16_384
"""Prompts that are made of a preset, in two seconds and 150 MB; a longer run uses them again."""


class Groups(Sequence[Group]):
    """Groups in the order of the run.  Raises `UserError` for an unreadable trace or dials out of range."""

    def __init__(self, config: RunConfig) -> None:
        self._stretched = config.simulated.drift != 1.0
        if trace := config.simulated.trace:
            self._parts = [_grouped(read_trace(Path(trace)).trajectories)]
            self._ends = [len(self._parts[0])]
        else:
            made = dials(config)
            self._parts = [_grouped(_generated(number, preset, part)) for number, (_, preset, part) in enumerate(made)]
            self._ends = [end for end, _, _ in made]

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Group:  # type: ignore[override]
        """Group of a prompt; a drift goes over the whole run, so there groups stay for several prompts."""
        if index >= len(self):
            raise IndexError(index)
        number = bisect_right(self._ends, index)
        begin = self._ends[number - 1] if number else 0
        part, size = self._parts[number], self._ends[number] - begin
        return part[(index - begin) * len(part) // size if self._stretched else (index - begin) % len(part)]


def _grouped(specs: Iterable[TrajectoryRecord]) -> list[Group]:
    found: dict[str, Group] = {}
    for spec in specs:
        found.setdefault(spec.prompt_id, []).append(spec)
    return list(found.values())


def dials(config: RunConfig) -> list[tuple[int, str, Dials]]:
    """The last prompt of each preset, exclusive, and what is generated for it."""
    simulated, group = config.simulated, config.algorithm.group_size
    parts = len(simulated.presets)
    # A job that only evaluates trains none.
    total = max(1, config.run.steps * config.algorithm.prompts_per_step)
    out = []
    for number, preset in enumerate(simulated.presets):
        end = total * (number + 1) // parts
        prompts = min(end - total * number // parts, MOST_PROMPTS)
        if prompts:
            mine = Dials(
                trajectories=prompts * group,
                group=group,
                seed=config.run.seed + number,
                sibling=simulated.sibling,
                outcome=simulated.outcome,
                drift=simulated.drift,
                max_context=config.rollout.max_model_len,
            )
            out.append((end, preset, mine))
    return out


def _generated(number: int, preset: str, mine: Dials) -> Iterator[TrajectoryRecord]:
    for spec in generate(preset, mine):
        yield msgspec.structs.replace(spec, prompt_id=f"{number}/{spec.prompt_id}")
