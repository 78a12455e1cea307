"""A synthetic asynchronous loop with hidden speeds, for tests of the planner."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from libra_hpc.config.rollout import PlannerSection
from libra_hpc.policies.control.decide import Planner
from libra_hpc.protocol.plan import (
    NodeFact,
    PlanDecision,
    PlanSnapshot,
    QueueFact,
    RolloutWindowFact,
    SwitchFact,
    TrainStepFact,
    TrajectoryFact,
)

Shape = Callable[[int, int, float], tuple[float, float]]
"""(training nodes, rollout nodes, mean length) -> true seconds per batch of (train, rollout)."""


NOTHING = PlanSnapshot(
    nodes=(),
    steps=(),
    windows=(),
    trajectories=(),
    switches=(),
    queue=QueueFact(0, 0, 0.0, 0.0),
    prompts_per_step=64,
    group_size=8,
    eta=1,
    steps_left=100,
)
"""A snapshot before anything was measured."""


@dataclass
class Plant:
    """One core node per stage and ``hybrids`` movable ones; runs batch by batch and carries out decisions."""

    shape: Shape
    hybrids: int = 1
    start: str = "rollout"
    noise: float = 0.1
    seed: int = 0
    eta: int = 1
    switch_s: float = 5.0
    length: float = 50.0
    prompts: int = 8
    group: int = 8
    now: float = 0.0
    decisions: list[PlanDecision] = field(default_factory=list)
    batch_times: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        kinds = ["train", "rollout"] + ["hybrid"] * self.hybrids
        self.nodes = [
            NodeFact(rank + 1, kind, self.start if kind == "hybrid" else kind, 0.0) for rank, kind in enumerate(kinds)
        ]
        self.steps: list[TrainStepFact] = []
        self.windows: list[RolloutWindowFact] = []
        self.done: list[TrajectoryFact] = []
        self.switches: list[SwitchFact] = []
        self.moving: tuple[int, str, float, float] | None = None
        self.count = 0
        self.waits: list[tuple[float, float]] = []

    @property
    def moves(self) -> list[str]:
        """Directions of all moves, in order."""
        return [d.action for d in self.decisions if d.action != "hold"]

    def run(self, batches: int, planner: Planner, interval: float = 5.0) -> None:
        """Train ``batches`` batches; the planner decides every ``interval`` seconds of the plant's time."""
        next_at = self.now + interval
        for number in range(batches):
            self.batch()
            self._finish_move()
            if self.now >= next_at:
                next_at = self.now + interval
                decision = planner.decide(self.snapshot(steps_left=batches - number - 1), self.now)
                self.decisions.append(decision)
                self._obey(decision)

    def snapshot(self, steps_left: int) -> PlanSnapshot:
        """The planner's snapshot."""
        recent = self.waits[-10:] or [(0.0, 0.0)]
        queue = QueueFact(0, 0, sum(w for w, _ in recent) / len(recent), sum(g for _, g in recent) / len(recent))
        return PlanSnapshot(
            nodes=tuple(self.nodes),
            steps=tuple(self.steps[-100:]),
            windows=tuple(self.windows[-100:]),
            trajectories=tuple(self.done[-2048:]),
            switches=tuple(self.switches),
            queue=queue,
            prompts_per_step=self.prompts,
            group_size=self.group,
            eta=self.eta,
            steps_left=steps_left,
        )

    def batch(self) -> None:
        """One global batch through both stages."""
        train = sum(n.role == "train" for n in self.nodes)
        rollout = sum(n.role == "rollout" for n in self.nodes)
        lengths = []
        for _ in range(self.prompts):
            # Half of the variance of log length is the prompt's: siblings are alike.
            prompt = self.random.gauss(0.0, 0.5)
            lengths += [
                max(1, round(self.length * math.exp(prompt + self.random.gauss(0.0, 0.5) - 0.25)))
                for _ in range(self.group)
            ]
        mean = sum(lengths) / len(lengths)
        train_s, rollout_s = (
            t * math.exp(self.random.gauss(0.0, self.noise)) for t in self.shape(train, rollout, mean)
        )
        period = train_s + rollout_s if self.eta == 0 else max(train_s, rollout_s)
        self.now += period
        self.batch_times.append(period)
        self.steps.append(
            TrainStepFact(at=self.now, tokens=3 * sum(lengths), loss_tokens=sum(lengths), nodes=train, seconds=train_s)
        )
        self.windows.append(
            RolloutWindowFact(
                at=self.now,
                seconds=period,
                nodes=rollout,
                generated_tokens=sum(lengths),
                prefilled_tokens=2 * sum(lengths),
                busy=rollout_s / period,
            )
        )
        self.waits.append((1.0 - train_s / period, 1.0 - rollout_s / period))
        for generated in lengths:
            self.done.append(
                TrajectoryFact(
                    index=self.count, at=self.now, generated=generated, context=3 * generated, turns=1 + generated // 20
                )
            )
            self.count += 1

    def _obey(self, decision: PlanDecision) -> None:
        if decision.action != "hold":
            self.moving = (decision.node, decision.action, self.now, self.now + self.switch_s)
            self._role(decision.node, decision.action)

    def _finish_move(self) -> None:
        if self.moving is not None and self.now >= self.moving[3]:
            node, action, ordered, _ = self.moving
            self.moving = None
            self._role(node, action.removeprefix("to_"))
            self.switches.append(
                SwitchFact(self.now, "to_train" if action == "to_train" else "to_rollout", self.now - ordered)
            )

    def _role(self, rank: int, role: str) -> None:
        self.nodes = [NodeFact(n.rank, n.component, role, self.now) if n.rank == rank else n for n in self.nodes]


def ideal(train_s: float, rollout_s: float, length: float = 50.0) -> Shape:
    """Perfect scaling: seconds of one node for a batch of mean length ``length``."""
    return lambda n, m, mean: (train_s * mean / length / n, rollout_s * mean / length / m)


SETTINGS = PlannerSection(switch_cost_s=5.0, min_dwell_s=10.0)
