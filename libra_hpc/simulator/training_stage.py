"""The training stage of a simulation: which groups may start, which finished ones form a batch, and when their step is
done.

The data order stands under the live `StalenessGate`.  A batch is taken as soon as the gate allows and waits for the
trainer, which does one at a time.  Its step makes the next weight version; groups count as sampled under the newest
version that *every* engine applied, as live.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from libra_hpc.sched.staleness import StalenessGate

from .settings import SimSettings, Training
from .simulated_trajectory import SimulatedTrajectory


class SimulatedStep(msgspec.Struct):
    """One training step; times in seconds since the start."""

    step: int
    groups: int
    tokens: int
    """Context tokens of all its trajectories."""
    staleness: int
    """Largest of its groups, in versions."""
    batch_at: float
    """When the batch was complete."""
    start_at: float = 0.0
    end_at: float = 0.0
    generated: int = 0
    """Of ``tokens``: those the policy generated."""


class TrainingStage:
    """Groups in, steps out.  ``groups`` maps prompt id to its trajectories, in data order."""

    def __init__(
        self, groups: dict[str, list[SimulatedTrajectory]], settings: SimSettings, training: Training | None
    ) -> None:
        self.version = 0
        """Steps done."""
        self.nodes = settings.train_nodes
        """Training nodes, handed to the training function."""
        self.held = False
        """Whether no step may start."""
        self.steps: list[SimulatedStep] = []
        self._groups = groups
        self._order: Sequence[str] = list(groups)
        self._next = 0
        self._open = {name: len(trajectories) for name, trajectories in groups.items()}
        self._max_open = settings.max_open_groups or len(groups)
        self._training = training or (lambda tokens, nodes: settings.train_s)
        size = settings.batch_groups
        self._gate = StalenessGate(settings.eta, size, self._max_open) if size else None
        self._unfinished = len(groups)
        self._waiting: list[SimulatedStep] = []
        self._busy = False

    @property
    def round(self) -> int:
        """The version new groups count as sampled under."""
        return self._gate.version if self._gate else 0

    @property
    def done(self) -> bool:
        """Whether every group ended and every whole batch is trained."""
        return not self._unfinished and not self._waiting and not self._busy

    @property
    def ready(self) -> int:
        """Groups in batches that wait for the trainer."""
        return sum(record.groups for record in self._waiting)

    @property
    def finished(self) -> int:
        """Groups whose trajectories all ended."""
        return len(self._groups) - self._unfinished

    @property
    def blocked(self) -> bool:
        """Whether the staleness bound alone keeps the next group out."""
        return self._gate is not None and self._gate.blocked and self._next < len(self._order)

    @property
    def idle(self) -> bool:
        """Whether the trainer has no step under way."""
        return not self._busy

    def admit(self) -> list[str]:
        """Groups that start now."""
        started = []
        while self._next < len(self._order):
            open_groups = self._next - (len(self._order) - self._unfinished)
            if open_groups >= self._max_open or (self._gate is not None and not self._gate.capacity):
                break
            name = self._order[self._next]
            self._next += 1
            if self._gate is not None:
                self._gate.admit(name)
            started.append(name)
        return started

    def close(self, group: str, now: float) -> bool:
        """One trajectory of a group ended; True when it was the last.  Batches that become complete by it wait for
        the trainer."""
        self._open[group] -= 1
        if self._open[group]:
            return False
        self._unfinished -= 1
        if self._gate is not None:
            self._gate.finish(group)
            while names := self._gate.batch():
                tokens = sum(trajectory.context for name in names for trajectory in self._groups[name])
                step = len(self.steps) + len(self._waiting) + 1
                generated = sum(trajectory.attained for name in names for trajectory in self._groups[name])
                self._waiting.append(
                    SimulatedStep(step, len(names), tokens, self._gate.consume(names), now, generated=generated)
                )
        return True

    def begin(self, now: float) -> float | None:
        """Start the next step when the trainer is free and a batch waits; returns its seconds."""
        if self._busy or self.held or not self._waiting:
            return None
        record = self._waiting.pop(0)
        record.start_at = now
        self.steps.append(record)
        self._busy = True
        return self._training(record.tokens, self.nodes)

    def end(self, now: float) -> int:
        """The step under way is done; returns the new version."""
        self.steps[-1].end_at = now
        self._busy = False
        self.version += 1
        return self.version

    def applied(self, version: int) -> None:
        """Every engine samples under ``version`` or a newer one."""
        while self._gate is not None and self._gate.version < version:
            self._gate.publish(self._gate.version + 1)
