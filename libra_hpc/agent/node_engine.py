"""One engine of a rollout node: its process, its state, and how often it ended."""

from __future__ import annotations

from libra_hpc.process.budget import RestartBudget
from libra_hpc.process.child import Child
from libra_hpc.process.visible_devices import MAX_STARTS
from libra_hpc.protocol.rollout import EngineReady, EngineStats


class NodeEngine:
    """Outlives its processes: a restarted engine keeps its name and its budget."""

    def __init__(self, name: str, restarts: int) -> None:
        self.name = name
        self.child: Child | None = None
        self.state = "lost"
        """``starting`` | ``loading`` (waits for weights) | ``ready`` | ``standby`` | ``ending`` (was killed, its
        process lives) | ``lost``"""
        self.ready: EngineReady | None = None
        self.version = -1
        self.updating = -1
        """The newest version it was sent."""
        self.starts = 0
        """Since it was last ready."""
        self.hung = ""
        """Why it was ended; empty: it was not."""
        self.killed_at = self.logged_at = 0.0
        """When it was ended, and when an event last named it (monotonic seconds)."""
        self.reported: EngineStats | None = None
        """The counters that the rollout leader has."""
        self._budget = RestartBudget(restarts)

    def ended_too_often(self, now: float) -> str:
        """Note an end; returns how often it ended if that is too often for another start, else nothing."""
        if not self._budget.spend(now):
            return f"{self._budget.spent} times in {self._budget.window_s:.0f} s"
        return f"{self.starts} times before it was ready" if self.starts >= MAX_STARTS else ""
