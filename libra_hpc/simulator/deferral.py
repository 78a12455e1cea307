"""Trajectories that a policy gave up for now, and when they start again: the long round of
`libra_hpc.simulator.abandon`."""

from __future__ import annotations

from collections.abc import Sequence

from .abandon import Abandons, OpenTrajectory
from .simulated_run import Run


class Deferral:
    """Counts the groups of each round, asks the policy, and holds what it gave up.  For a policy without the
    capability it does nothing."""

    def __init__(self, policy: object) -> None:
        self._policy = policy if isinstance(policy, Abandons) else None
        self._rounds: dict[int, list[int]] = {}
        self._deferred: list[Run] = []

    def started(self, number: int) -> None:
        """A group of a round started."""
        self._rounds.setdefault(number, [0, 0])[0] += 1

    def finished(self, number: int, open_runs: Sequence[Run], now: float) -> Sequence[str]:
        """A group of a round ended; returns the trajectories to give up now."""
        if self._policy is None:
            return ()
        counts = self._rounds[number]
        counts[1] += 1
        views = [
            OpenTrajectory(run.name, run.spec.prompt_id, run.spec.sample, run.attained, run.round)
            for run in open_runs
            if run.place != "deferred"
        ]
        return self._policy.abandon(views, counts[1], counts[0], now)

    def add(self, run: Run) -> None:
        """Hold a trajectory back."""
        run.place = "deferred"
        self._deferred.append(run)

    @property
    def holds(self) -> bool:
        """Whether anything is held back."""
        return bool(self._deferred)

    def due(self, open_runs: Sequence[Run]) -> list[Run]:
        """Those that start now, from their prompts: nothing else of their round, or of one before, is open."""
        oldest = min((run.round for run in open_runs if run.place != "deferred"), default=None)
        due = [run for run in self._deferred if oldest is None or run.round < oldest]
        self._deferred = [run for run in self._deferred if run not in due]
        return due
