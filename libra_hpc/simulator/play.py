"""`Play`: batches of a fleet beside training, under the live scheduling policy; it can be continued.

The only place that turns nodes, engines, eta, portions and nodes in turn into seconds of a batch.

- The first batch never counts: it finds empty engines, and no switch is before it.
- Batches overlap with eta > 0 and end in waves of ``eta`` + 1, so a *round* has whole waves, and two batches at least.
- Further batches wait behind those of a round, as in a run that goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean

from libra_hpc.policies.scheduling.registry import make_policy
from libra_hpc.protocol.trace import TrajectoryRecord

from .settings import EngineSpec, SimulationSettings, Training
from .simulate import Simulation

Coming = Callable[[int, int], Sequence[TrajectoryRecord]]
"""(part, batches) -> so many further batches. Every part has prompts of its own; equal parts are equal."""


def round_batches(eta: int) -> int:
    """Batches of a round."""
    return max(2, eta + 1)


class Play:
    """Raises as `Simulation` does."""

    def __init__(
        self,
        coming: Coming,
        engines: Sequence[EngineSpec],
        policy: str,
        settings: SimulationSettings,
        training: Training | None = None,
    ) -> None:
        self._coming, self._settings, self._round = coming, settings, round_batches(settings.eta)
        self._rounds: list[float] = []
        first = coming(0, 1 + settings.eta)
        self._simulation = Simulation(first, engines, make_policy(policy), settings, training)

    def rounds(self, count: int) -> list[float]:
        """Seconds of a batch in each of so many rounds, or more where they were played."""
        simulation = self._simulation
        while len(self._rounds) < count:
            simulation.add(self._coming(len(self._rounds) + 1, self._round))
            simulation.until(1 + (len(self._rounds) + 1) * self._round)
            steps = simulation.training.steps
            begin, end = (steps[at * self._round].end_at for at in (len(self._rounds), len(self._rounds) + 1))
            self._rounds.append((end - begin) / self._round)
        return self._rounds

    @property
    def rollout_share(self) -> float:
        """Share of a batch's seconds until it is complete; of overlapping batches, in which engines compute; in turn,
        without training and switches."""
        settings, batch_s = self._settings, fmean(self._rounds)
        steps = self._simulation.training.steps[: 1 + len(self._rounds) * self._round]
        if settings.switch_s is not None:
            return 1.0 - (fmean(step.end_at - step.start_at for step in steps[1:]) + settings.switch_s) / batch_s
        if settings.eta:
            return self._simulation.busy_share
        return fmean(step.batch_at - before.end_at for before, step in pairwise(steps)) / batch_s
