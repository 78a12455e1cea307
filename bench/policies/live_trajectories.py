"""Where live trajectories are, for rules that count them and not their turns."""

from __future__ import annotations

from collections import Counter

from libra_hpc.policies.scheduling.board import EngineView


class LiveTrajectories:
    """The engine of each live trajectory, tool time included."""

    def __init__(self) -> None:
        self._at: dict[str, str] = {}
        self._count: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._at)

    def count(self, engine: EngineView) -> int:
        """Number of live trajectories at an engine."""
        return self._count[engine.engine]

    def put(self, trajectory: str, engine: str) -> None:
        """Count a trajectory at ``engine`` only."""
        self.drop(trajectory)
        self._at[trajectory] = engine
        self._count[engine] += 1

    def drop(self, trajectory: str) -> None:
        """A trajectory ended."""
        if engine := self._at.pop(trajectory, ""):
            self._count[engine] -= 1
