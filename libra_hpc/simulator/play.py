"""`play`: the seconds of a batch on a fleet beside training, by playing batches under the live scheduling policy.

The only place that turns nodes, engines, eta, portions and nodes in turn into seconds of a batch.

- eta = 0: batches follow each other; the mean of all.
- eta > 0: batches overlap; the mean of all but the first, which finds empty engines. They end in waves of ``eta`` + 1,
  so a play has whole waves (`batches_of`).
- Nodes in turn: the mean of all but the first, before which there is no switch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from libra_hpc.policies.scheduling.registry import make_policy
from libra_hpc.protocol.trace import TrajectoryRecord

from .result import SimulationResult
from .settings import EngineSpec, SimulationSettings, Training
from .simulate import Simulation


class Played(NamedTuple):
    """Means over the batches that count."""

    batch_s: float
    """Seconds from the end of a training step to that of the next; infinite where the play was stopped."""
    rollout_s: float
    """Seconds out of these until a batch is complete; of overlapping batches, in which engines compute; in turn,
    all but training and switches."""
    hidden_s: float
    """Seconds of training before its batch is complete, because groups are trained as they are."""


STOPPED = Played(math.inf, math.inf, 0.0)


def batches_of(rounds: int, settings: SimulationSettings) -> int:
    """Batches to play so that all open ones are renewed ``rounds`` times."""
    return rounds * (settings.eta + 1) + _first(settings)


def _first(settings: SimulationSettings) -> int:
    """Batches that do not count."""
    return int(settings.eta > 0 or settings.switch_s is not None)


class _TooLongError(Exception):
    pass


def play(
    work: Sequence[TrajectoryRecord],
    engines: Sequence[EngineSpec],
    policy: str,
    settings: SimulationSettings,
    training: Training | None = None,
    *,
    most_s: float = math.inf,
) -> Played:
    """Play ``work``: whole batches of ``settings.batch_groups`` groups.

    ``most_s``: a play whose mean batch becomes longer is stopped. Raises as `Simulation` does.
    """
    simulation = Simulation(work, engines, make_policy(policy), settings, training)
    first = _first(settings)
    batches = len({record.prompt_id for record in work}) // settings.batch_groups

    def look(ended: int) -> None:
        steps = simulation.training.steps
        begin = steps[0].end_at if first and steps else 0.0
        if (begin or not first) and simulation.now - begin > most_s * (batches - first):
            raise _TooLongError

    try:
        return played(simulation.run(look), settings)
    except _TooLongError:
        return STOPPED


def played(result: SimulationResult, settings: SimulationSettings) -> Played:
    """The means of a simulation; of one that trains nothing, all of it."""
    if not result.steps:
        return Played(result.makespan_s, result.makespan_s, 0.0)
    ends = [0.0, *(step.end_at for step in result.steps)]
    first = min(_first(settings), len(ends) - 2)
    batch_s = (ends[-1] - ends[first]) / (len(ends) - 1 - first)
    if settings.switch_s is not None:
        return Played(batch_s, batch_s - settings.train_s - settings.switch_s, 0.0)
    if settings.eta:
        return Played(batch_s, batch_s * (1.0 - result.idle_share), 0.0)
    spans = list(zip(ends, result.steps, strict=False))
    complete_s = fmean(step.batch_at - begin for begin, step in spans)
    hidden_s = fmean(settings.train_s + settings.update.diff_s - (step.end_at - step.batch_at) for _, step in spans)
    # Rounded: a sum of times leaves something of none.
    return Played(batch_s, complete_s, round(hidden_s, 6) if settings.portion_groups else 0.0)
