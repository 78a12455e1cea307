"""Trajectories that a policy gave up for now, and when they start again: the long round of
`libra_hpc.simulator.abandon`."""

from __future__ import annotations

from collections.abc import Sequence

from .abandon import Abandons, OpenTrajectory
from .simulated_trajectory import SimulatedTrajectory


class Deferral:
    """Counts the groups of each round, asks the policy, and holds what it gave up.  For a policy without the
    capability it does nothing."""

    def __init__(self, policy: object) -> None:
        self._policy = policy if isinstance(policy, Abandons) else None
        self._rounds: dict[int, list[int]] = {}
        self._deferred: list[SimulatedTrajectory] = []

    def started(self, number: int) -> None:
        """A group of a round started."""
        self._rounds.setdefault(number, [0, 0])[0] += 1

    def finished(self, number: int, open_trajectories: Sequence[SimulatedTrajectory], now: float) -> Sequence[str]:
        """A group of a round ended; returns the trajectories to give up now."""
        if self._policy is None:
            return ()
        counts = self._rounds[number]
        counts[1] += 1
        views = [
            OpenTrajectory(
                trajectory.name,
                trajectory.spec.prompt_id,
                trajectory.spec.sample,
                trajectory.attained,
                trajectory.round,
            )
            for trajectory in open_trajectories
            if trajectory.place != "deferred"
        ]
        return self._policy.abandon(views, counts[1], counts[0], now)

    def add(self, trajectory: SimulatedTrajectory) -> None:
        """Hold a trajectory back."""
        trajectory.place = "deferred"
        self._deferred.append(trajectory)

    @property
    def holds(self) -> bool:
        """Whether anything is held back."""
        return bool(self._deferred)

    def due(self, open_trajectories: Sequence[SimulatedTrajectory]) -> list[SimulatedTrajectory]:
        """Those that start now, from their prompts: nothing else of their round, or of one before, is open."""
        oldest = min(
            (trajectory.round for trajectory in open_trajectories if trajectory.place != "deferred"), default=None
        )
        due = [trajectory for trajectory in self._deferred if oldest is None or trajectory.round < oldest]
        self._deferred = [trajectory for trajectory in self._deferred if trajectory not in due]
        return due
