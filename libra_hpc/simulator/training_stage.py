"""The training stage of a simulation: admission of groups, batches, and training steps.

* The live `StalenessGate` admits groups and forms batches of finished ones.
* The trainer runs one batch at a time; each step makes the next weight version. Portions of it may go ahead.
* As in a live run, a group counts as sampled under the newest version that *every* engine has applied.
"""

from __future__ import annotations

import msgspec

from libra_hpc.policies.scheduling.staleness import StalenessGate

from .settings import SimulationSettings, Training
from .simulated_trajectory import SimulatedTrajectory


class SimulatedStep(msgspec.Struct):
    """One training step; times in seconds since the start."""

    step: int
    groups: int
    tokens: int
    """Context tokens of all its trajectories."""
    staleness: int
    """Largest staleness of its groups, in versions."""
    batch_at: float
    start_at: float = 0.0
    end_at: float = 0.0
    generated: int = 0
    """Tokens out of ``tokens`` that the policy generated."""


class TrainingStage:
    """Groups in, steps out."""

    def __init__(self, settings: SimulationSettings, training: Training | None) -> None:
        self.version = 0
        self.nodes = settings.train_nodes
        """Training nodes: the second argument of the training function."""
        self.steps: list[SimulatedStep] = []
        self._groups = dict[str, list[SimulatedTrajectory]]()
        self._order = list[str]()
        self._next = 0
        self._open = dict[str, int]()
        self._max_open = settings.max_open_groups or 1 << 30
        self._training = training or (lambda tokens, nodes: settings.train_s)
        self._batch: tuple[str, ...] = ()
        """The newest one."""
        size = settings.batch_groups
        self._gate = StalenessGate(settings.eta, size, self._max_open) if size else None
        self._unfinished = 0
        self._closed: dict[str, float] = {}
        self._portions = settings.portion_groups if not settings.eta else 0
        self._waiting: list[SimulatedStep] = []
        self._busy = False

    def add(self, groups: dict[str, list[SimulatedTrajectory]]) -> None:
        """Take the trajectories of further prompts, in data order."""
        self._groups |= groups
        self._order += groups
        self._open |= {name: len(trajectories) for name, trajectories in groups.items()}
        self._unfinished += len(groups)

    @property
    def done(self) -> bool:
        return not self._unfinished and not self._waiting and not self._busy

    @property
    def finished(self) -> int:
        return len(self._groups) - self._unfinished

    @property
    def idle(self) -> bool:
        return not self._busy

    @property
    def due(self) -> bool:
        """Whether a step begins as soon as its nodes are free."""
        return bool(self._waiting) and not self._busy

    def admit(self) -> list[str]:
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
        """One trajectory of a group ended; returns whether it was the last.  Complete batches wait for the trainer."""
        self._open[group] -= 1
        if self._open[group]:
            return False
        self._unfinished -= 1
        self._closed[group] = now
        if self._gate is not None:
            self._gate.finish(group)
            while names := self._gate.batch():
                tokens = sum(trajectory.spec.all_tokens for name in names for trajectory in self._groups[name])
                step = len(self.steps) + len(self._waiting) + 1
                self._batch = names
                generated = sum(trajectory.attained for name in names for trajectory in self._groups[name])
                self._waiting.append(
                    SimulatedStep(
                        step=step,
                        groups=len(names),
                        tokens=tokens,
                        staleness=self._gate.consume(names),
                        batch_at=now,
                        generated=generated,
                    )
                )
        return True

    def begin(self, now: float) -> float | None:
        """Start the next step when the trainer is free and a batch waits; returns its seconds."""
        if self._busy or not self._waiting:
            return None
        record = self._waiting.pop(0)
        record.start_at = now
        self.steps.append(record)
        self._busy = True
        seconds = self._training(record.tokens, self.nodes)
        return self._left_s(seconds, now) if self._portions else seconds

    def _left_s(self, seconds: float, now: float) -> float:
        """Return the seconds out of a whole batch's ``seconds`` that are left once its last group is complete."""
        free, size = 0.0, self._portions
        groups = [(self._closed[name], sum(one.spec.all_tokens for one in self._groups[name])) for name in self._batch]
        portions = [tuple(zip(*groups[at : at + size], strict=True)) for at in range(0, len(groups), size)]
        for complete, tokens in sorted((max(times), sum(counts)) for times, counts in portions):
            free = max(free, complete) + seconds * tokens / sum(count for _, count in groups)
        return free - now

    def end(self, now: float) -> int:
        self.steps[-1].end_at = now
        self._busy = False
        self.version += 1
        return self.version

    def applied(self, version: int) -> None:
        while self._gate is not None and self._gate.version < version:
            self._gate.publish(self._gate.version + 1)
