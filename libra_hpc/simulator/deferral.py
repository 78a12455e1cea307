"""Trajectories that a policy aborted, and when they restart: the long round of `libra_hpc.simulator.abandon`."""

from __future__ import annotations

from collections.abc import Sequence

from .abandon import Abandons, UnfinishedTrajectory
from .simulated_trajectory import SimulatedTrajectory


class Deferral:
    """Counts the groups of each round, asks the policy what to abort, and holds it.

    For a policy without the capability it does nothing.
    """

    def __init__(self, policy: object) -> None:
        self._policy = policy if isinstance(policy, Abandons) else None
        self._rounds: dict[int, list[int]] = {}
        """Groups started and finished, by round."""
        self._deferred: list[SimulatedTrajectory] = []

    def started(self, number: int) -> None:
        self._rounds.setdefault(number, [0, 0])[0] += 1

    def finished(self, number: int, open_trajectories: Sequence[SimulatedTrajectory], now: float) -> Sequence[str]:
        if self._policy is None:
            return ()
        counts = self._rounds[number]
        counts[1] += 1
        views = [
            UnfinishedTrajectory(
                trajectory=trajectory.name,
                prompt_id=trajectory.spec.prompt_id,
                sample=trajectory.spec.sample,
                attained_tokens=trajectory.attained,
                step=trajectory.round,
            )
            for trajectory in open_trajectories
            if trajectory.place != "deferred"
        ]
        return self._policy.abandon(views, counts[1], counts[0], now)

    def add(self, trajectory: SimulatedTrajectory) -> None:
        trajectory.place = "deferred"
        self._deferred.append(trajectory)

    @property
    def holds(self) -> bool:
        return bool(self._deferred)

    def due(self, open_trajectories: Sequence[SimulatedTrajectory]) -> list[SimulatedTrajectory]:
        """Held trajectories that restart now: nothing else of their round or an earlier one is open."""
        oldest = min(
            (trajectory.round for trajectory in open_trajectories if trajectory.place != "deferred"), default=None
        )
        due = [trajectory for trajectory in self._deferred if oldest is None or trajectory.round < oldest]
        self._deferred = [trajectory for trajectory in self._deferred if trajectory not in due]
        return due
