"""A synthetic asynchronous loop with hidden speeds, for tests of the planner."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

from libra_hpc.config.rollout import PlannerSection
from libra_hpc.policies.control.player import Player
from libra_hpc.policies.control.plays import PlayWork, State
from libra_hpc.protocol.engine_state import StepCosts
from libra_hpc.protocol.plan import (
    BorrowFact,
    NodeFact,
    PlanDecision,
    PlanSnapshot,
    SwitchFact,
    TrainStepFact,
    TrajectoryFact,
)

Shape = Callable[[int, float, float], tuple[float, float]]
"""(training nodes, rollout nodes, mean length) -> true seconds per batch of (train, rollout)."""


NOTHING = PlanSnapshot(
    nodes=(), steps=(), trajectories=(), switches=(), prompts_per_step=64, group_size=8, eta=1, steps_left=100
)
"""A snapshot before anything was measured."""


class Known(NamedTuple):
    """A play whose rounds are all alike."""

    batch_s: float
    rollout_share: float

    def rounds(self, count: int) -> list[float]:
        return [self.batch_s] * count


@dataclass
class Plant:
    """One core node per stage and ``hybrids`` movable ones; runs batch by batch and carries out decisions."""

    shape: Shape
    hybrids: int = 1
    train: int = 0
    """The first hybrid nodes, which train at the start."""
    noise: float = 0.1
    seed: int = 0
    eta: int = 1
    switch_s: float = 5.0
    length: float = 50.0
    prompts: int = 8
    group: int = 8
    lent: float = 0.0
    """Own nodes that guests stand for."""
    spot: BorrowFact | None = None
    believed: Shape | None = None
    """What plays know of rollout, beside the measured seconds of training; None: the truth of both."""
    now: float = 0.0
    decisions: list[PlanDecision] = field(default_factory=list)
    batch_times: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        roles = ["train"] * self.train + ["rollout"] * (self.hybrids - self.train)
        hybrids = [NodeFact(rank, "hybrid", role, 0.0) for rank, role in enumerate(roles, 3)]
        self.nodes = [NodeFact(1, "train", "train", 0.0), NodeFact(2, "rollout", "rollout", 0.0), *hybrids]
        self.steps: list[TrainStepFact] = []
        self.done: list[TrajectoryFact] = []
        self.switches: list[SwitchFact] = []
        self.ordered: list[tuple[float, int]] = []
        """(time, node) of every move."""
        self.moving: list[tuple[int, str, float]] = []

    @property
    def moves(self) -> list[str]:
        """Directions of all moves, in order."""
        return [d.action for d in self.decisions if d.action != "hold"]

    def run(self, batches: int, planner: Player, interval: float = 5.0) -> None:
        """Train ``batches`` batches; the planner decides every ``interval`` seconds of the plant's time."""
        next_at = self.now + interval
        for number in range(batches):
            self.batch()
            if self.now >= next_at:
                next_at = self.now + interval
                self.evaluate(planner, batches - number - 1)

    def evaluate(self, planner: Player, steps_left: int = 500) -> PlanDecision:
        """Let the planner decide, and begin what it decided."""
        decision = planner.decide(self.snapshot(steps_left), self.now)
        self.decisions.append(decision)
        for node in decision.nodes:
            self.ordered.append((self.now, node))
            self.moving.append((node, decision.action, self.now))
            self._role(node, decision.action)
        return decision

    def planner(self, settings: PlannerSection | None = None, **more: Any) -> Player:
        """A planner whose plays are the truth, without its noise."""
        return Player(settings or SETTINGS, self.play, **more)

    def play(self, work: PlayWork, state: State) -> Known:
        mean = fmean(record.generated for record in work.records)
        train_s, rollout_s = (self.believed or self.shape)(state.train, state.rollout + state.lent, mean)
        tokens = round(3 * mean * self.group * work.groups)
        train_s *= work.train_seconds(tokens, state.train) / train_s if self.believed else 1.0
        batch_s = train_s + rollout_s if self.eta == 0 else max(train_s, rollout_s)
        return Known(batch_s, rollout_s / batch_s)

    def snapshot(self, steps_left: int) -> PlanSnapshot:
        """The planner's snapshot."""
        return PlanSnapshot(
            nodes=tuple(self.nodes),
            steps=tuple(self.steps[-100:]),
            trajectories=tuple(self.done[-2048:]),
            switches=tuple(self.switches),
            prompts_per_step=self.prompts,
            group_size=self.group,
            eta=self.eta,
            steps_left=steps_left,
            borrow=self.spot,
            lent=self.lent,
            step_costs=(StepCosts(1, 1 << 20, 0.01, 0.0, 0.0),),
        )

    def batches(self, count: int) -> Plant:
        """Train ``count`` batches without a planner."""
        for _ in range(count):
            self.batch()
        return self

    def batch(self) -> None:
        """One global batch through both stages; then moves end that have lasted `switch_s`."""
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
            t * math.exp(self.random.gauss(0.0, self.noise)) for t in self.shape(train, rollout + self.lent, mean)
        )
        period = train_s + rollout_s if self.eta == 0 else max(train_s, rollout_s)
        self.now += period
        self.batch_times.append(period)
        tokens = sum(lengths)
        self.steps.append(TrainStepFact(self.now, 3 * tokens, nodes=train, seconds=train_s))
        for generated in lengths:
            index, turns = len(self.done), 1 + generated // 20
            group = index // self.group
            self.done.append(TrajectoryFact(index, self.now, generated, 3 * generated, turns=turns, group=group))
        for move in [move for move in self.moving if self.now >= move[2] + self.switch_s]:
            self.moving.remove(move)
            node, action, ordered = move
            self._role(node, action.removeprefix("to_"))
            self.switches.append(SwitchFact(self.now, action, self.now - ordered))  # type: ignore[arg-type]

    def _role(self, rank: int, role: str) -> None:
        self.nodes = [NodeFact(n.rank, n.component, role, self.now) if n.rank == rank else n for n in self.nodes]


def ideal(train_s: float, rollout_s: float, length: float = 50.0) -> Shape:
    """Perfect scaling: seconds of one node for a batch of mean length ``length``."""
    return lambda n, m, mean: (train_s * mean / length / n, rollout_s * mean / length / m)


SETTINGS = PlannerSection(switch_cost_s=5.0, min_dwell_s=10.0)
