"""A trajectory in a simulation and its turn in flight; gives policies the same records as the live leader."""

from __future__ import annotations

import random
from collections.abc import Sequence

from msgspec.structs import replace

from libra_hpc.policies.scheduling.protocol import Finished, TurnView
from libra_hpc.protocol.env import Signal
from libra_hpc.protocol.trace import TrajectoryRecord, payload_of, signals_of
from libra_hpc.simulator.engine.simulated_engine import Engine
from libra_hpc.simulator.engine.simulated_request import SimulatedRequest

from .settings import SimulationSettings, trajectory_ids

TASK = "simulated"
"""Name of the task for policies."""


class SimulatedTrajectory:
    """Mutable state of one trajectory: what its environment holds in a live run."""

    __slots__ = (
        "asked_at",
        "attained",
        "context",
        "engine",
        "high",
        "name",
        "opened_at",
        "partial",
        "place",
        "ready_at",
        "sample",
        "shared",
        "signals",
        "spec",
        "turn",
        "version",
    )

    def __init__(self, name: str, spec: TrajectoryRecord) -> None:
        self.name, self.spec = name, spec
        self.shared = spec.prompt_tokens
        """Prompt tokens shared by all samples of the group."""
        self.version = self.high = 0
        self.opened_at = self.ready_at = self.asked_at = 0.0
        self.place = ""
        """``queue``, ``engine``, ``tool``, ``done``; empty before admission."""
        self.turn = self.attained = self.partial = self.sample = 0
        self.context = self.spec.prompt_tokens + self.spec.turns[0].new_tokens
        self.signals: tuple[Signal, ...] = ()
        self.engine = ""

    def ready(self, now: float) -> None:
        """The turn, or the rest of an aborted one, needs an engine."""
        self.ready_at, self.place = now, "queue"
        if not self.partial:
            self.asked_at = now

    @property
    def left(self) -> int:
        return self.spec.turns[self.turn].gen_tokens - self.partial

    def interrupted(self, generated: int, high: int, version: int) -> None:
        self.partial += generated
        self.attained += generated
        self.context += generated
        self.high, self.version = high, version

    def view(self, settings: SimulationSettings) -> TurnView:
        spec = self.spec
        return TurnView(
            trajectory=self.name,
            prompt_id=spec.prompt_id,
            sample=spec.sample,
            task=TASK,
            context_tokens=self.context,
            attained_tokens=self.attained,
            turns=self.turn,
            ready_at=self.ready_at,
            engine=self.engine,
            signals=self.signals,
            max_context=settings.max_model_len,
        )

    def answered(self, high: int, version: int) -> float:
        """Record a generated turn; returns the seconds of its tool, after which the next turn is ready."""
        turns = self.spec.turns
        turn = turns[self.turn]
        self.interrupted(self.left, high, version)
        self.partial = 0
        self.turn += 1
        last = self.turn == len(turns)
        if turn.tool is not None:
            found = signals_of(turn, payload_of(None if last else turns[self.turn]))
            self.signals = (*self.signals, *found)
        if not last:
            if turns[self.turn].new_sample:
                self.sample += 1
                self.context = self.high = 0
                self.engine = ""  # as if it shared nothing with the sample before
            self.context += turns[self.turn].new_tokens
        return turn.tool_s

    @property
    def last(self) -> bool:
        return self.turn == len(self.spec.turns)

    def finished(self) -> Finished:
        return replace(Finished.of(self.spec, self.name, TASK), version=self.version)


class SentTurn:
    """A turn in flight."""

    __slots__ = ("engine", "request", "trajectory", "turn")

    def __init__(
        self, trajectory: SimulatedTrajectory, turn: TurnView, engine: Engine, request: SimulatedRequest
    ) -> None:
        self.trajectory, self.turn, self.engine, self.request = trajectory, turn, engine, request


def grouped(work: Sequence[TrajectoryRecord], seed: int) -> dict[str, list[SimulatedTrajectory]]:
    """Trajectories by prompt id, in the order of their first one; shuffled unless ``seed`` is 0."""
    groups: dict[str, list[SimulatedTrajectory]] = {}
    for name, spec in zip(trajectory_ids(work), work, strict=True):
        groups.setdefault(spec.prompt_id, []).append(SimulatedTrajectory(name, spec))
    for trajectories in groups.values():
        shared = min(trajectory.spec.prompt_tokens for trajectory in trajectories)
        for trajectory in trajectories:
            trajectory.shared = shared
    if not seed:
        return groups
    order = list(groups)
    random.Random(seed).shuffle(order)
    return {name: groups[name] for name in order}
