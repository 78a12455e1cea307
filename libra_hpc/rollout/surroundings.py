"""Who calls whom around the rollout leader: what it needs of its agent, and what its parts need of it."""

from __future__ import annotations

from typing import Any, Protocol

from libra_hpc.protocol.agents import Group, MeshMessage
from libra_hpc.protocol.env import ToHost

from .trajectory import Routed, Trajectory


class Surroundings(Protocol):
    """The agent of the rollout leader."""

    def clock(self) -> float:
        """Seconds of a monotonic clock."""

    def send(self, rank: int, message: MeshMessage) -> None:
        """Send to a node."""

    def to_host(self, host: int, message: ToHost) -> None:
        """Send to an environment host."""

    def ended(self, trajectory: Trajectory) -> None:
        """Record a finished trajectory."""

    def failed(self, trajectory: Trajectory) -> None:
        """Record a failed attempt of a trajectory."""

    def composed(self, step: int, trajectories: list[Trajectory], groups: tuple[Group, ...]) -> None:
        """Record what a step is trained on."""

    def evaluated(self, line: dict[str, Any], trajectories: list[Trajectory]) -> None:
        """Record the result of an evaluation."""

    def routed(self, routed: Routed) -> None:
        """Record a turn that was sent to an engine."""

    def changed(self) -> None:
        """Send what the leader knows of nodes."""

    def log(self, kind: str, **fields: Any) -> None:
        """Write an event."""


class TrajectoryListener(Protocol):
    """The rollout leader, for the parts that carry out turns and environment steps."""

    def progress(self, index: int) -> float:
        """Position of a prompt in the run, 0..1."""

    def turn_wanted(self, trajectory: Trajectory) -> None:
        """Its environment has answered: it needs a turn."""

    def turn_complete(self, trajectory: Trajectory) -> None:
        """An engine has completed its turn."""

    def finish(self, trajectory: Trajectory) -> None:
        """The episode of a trajectory is over."""

    def restart(self, trajectory: Trajectory, reason: str) -> None:
        """Its episode is lost: sample it again from its prompt, through no fault of its own."""

    def failed(self, trajectory: Trajectory, kind: str, error: str) -> None:
        """An attempt of a trajectory failed."""

    def schedule_pass(self) -> None:
        """A turn may be routed, or a prompt admitted, now."""
