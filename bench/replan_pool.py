"""The nodes of a simulated run: which train, which roll out, and what a move takes.

The first node only trains and the last one only rolls out; those between are hybrid.

- To rollout: the node leaves the trainers after the current step. Its engine accepts turns ``to_rollout_s`` later.
- To training: the engine finishes its turns. ``to_train_s`` later the node joins the next step to begin.
- The first step after a change of the training nodes takes ``regroup_s`` longer.

Training seconds do not use the planner's cost model: a fixed part, tokens at a rate, the table `EFFICIENCY`, log-normal
noise, and some slow steps.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec

from bench.controlled_simulation import ControlledSimulation
from bench.scheduling import Slow
from libra_hpc.models.step_times.lookup import lookup
from libra_hpc.models.step_times.steps import StepTimes
from libra_hpc.policies.scheduling.protocol import Policy
from libra_hpc.protocol.plan import NodeFact, SwitchFact
from libra_hpc.protocol.trace import TrajectoryRecord
from libra_hpc.simulator.settings import EngineSpec, SimulationSettings

EFFICIENCY = (1.0, 0.965, 0.94, 0.925, 0.90, 0.87, 0.855, 0.845, 0.82, 0.80, 0.785, 0.77)
"""Speed of n nodes over n times the speed of one, as in data-parallel scaling."""
SHAKEN = 0.02
"""Standard deviation of the table between seeds."""
REPORT_S = 5.0
"""Seconds between reports of an engine: batches take minutes, and the sticky policy does not read reports."""
NOISE = 0.03
"""Standard deviation of the log of a step's seconds."""
SLOW_SHARE, SLOW = 0.02, 1.3
"""One step in fifty takes this much longer, as with a checkpoint or network traffic of a neighbour."""


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """48 A800 as 12 nodes of 4, simulated with a sixteenth of the trajectories.

    The full size is batches of 256 prompts with 8 samples, and engines with 64 slots. Simulated are 16 prompts and 4
    slots. Each sequence stands for `stands_for` = 16 in step with it (`Grouped`), and a training token costs sixteen
    times its time. Engines are as full and as slow as at full size; single batches scatter more.
    """

    nodes: int = 12
    device: str = "a800"
    model: str = "qwen3-14b"
    tp: int = 4
    """GPUs of a node, all in one engine."""
    stands_for: int = 16
    """Sequences that one simulated sequence represents."""
    slots: int = 4
    """Most simulated sequences of an engine at once."""
    prompts: int = 16
    group: int = 8
    eta: int = 2
    """With 1, a reasoning batch waits for its longest trajectory at any split; with 2 or more, nodes decide."""
    sync_s: float = 2.0
    fixed_s: float = 6.0
    """Of a training step, whatever its tokens and nodes."""
    token_s: float = 16 * 0.9e-4
    """Seconds per simulated token on one node, for sixteen tokens: 14.8e9 weights, 6 FLOPs each at half the peak of 4
    A800, for the 60 % of the groups whose rewards differ."""
    to_rollout_s: float = 30.0
    """A standby engine wakes and loads weights."""
    to_train_s: float = 45.0
    """A replica starts and receives the state."""
    regroup_s: float = 5.0
    slow: bool = False
    """Whether the engines of the last node take twice as long, which nobody knows."""
    believed: float = 1.0
    """Step costs that the planner gets, over those that were measured."""

    def steps(self) -> StepTimes:
        """Step times of an engine."""
        return Grouped(lookup(self.device, self.model, self.tp), self.stands_for)


class Grouped:
    """Step times of an engine whose every sequence stands for ``size`` in step; counts are per sequence."""

    def __init__(self, steps: StepTimes, size: int) -> None:
        self.tp, self.source = steps.tp, steps.source
        self.kv_capacity = steps.kv_capacity // size
        self._steps, self._size = steps, size

    def step_s(self, decodes: int, kv_tokens: int, prefill: int = 0, context: int = 0) -> float:
        return self._steps.step_s(decodes * self._size, kv_tokens * self._size, prefill * self._size, context)


class StepTruth:
    """Seconds of training steps; records the nodes of each."""

    def __init__(self, site: Site, seed: int) -> None:
        self._site = site
        self._rng = random.Random(f"{seed}/training")
        self._table = [e * (1.0 + SHAKEN * self._rng.gauss(0.0, 1.0)) for e in EFFICIENCY]
        self._nodes = 0
        self.train_nodes: list[int] = []
        """Nodes of each step so far."""

    def __call__(self, tokens: int, nodes: int) -> float:
        site = self._site
        seconds = site.fixed_s + tokens * site.token_s / (nodes * self._table[min(nodes, len(self._table)) - 1])
        seconds *= self._rng.lognormvariate(0.0, NOISE) * (SLOW if self._rng.random() < SLOW_SHARE else 1.0)
        if self._nodes not in (0, nodes):
            seconds += site.regroup_s
        self._nodes = nodes
        self.train_nodes.append(nodes)
        return seconds


class _Moving(msgspec.Struct):
    rank: int
    direction: str
    ordered: float
    step: int = 0
    """Step after which the node is released."""
    free_at: float = -1.0


class ReplanPool:
    """Nodes of one `ControlledSimulation`; call `advance` every few seconds."""

    def __init__(self, site: Site, train: int) -> None:
        self.site = site
        kinds = ["train", *["hybrid"] * (site.nodes - 2), "rollout"]
        self.nodes = [
            NodeFact(rank, kind, "train" if rank < train else "rollout", 0.0) for rank, kind in enumerate(kinds)
        ]
        self.switches: list[SwitchFact] = []
        self.moves = 0
        """Moves that were ordered."""
        self._moving: list[_Moving] = []
        self._started = 0
        self._engine_of: dict[int, str] = {}

    def simulation(
        self, work: Sequence[TrajectoryRecord], policy: Policy, truth: StepTruth, **control: Any
    ) -> ControlledSimulation:
        """A run on these nodes; ``control``: the simulation's controller, which calls `advance`, and its period."""
        site, engines = self.site, [self.engine(node.rank) for node in self.nodes if node.role == "rollout"]
        settings = SimulationSettings(
            batch_groups=site.prompts,
            eta=site.eta,
            max_num_seqs=site.slots,
            max_inflight=site.slots * 3 // 2,
            sync_s=site.sync_s,
            report_s=REPORT_S,
            train_nodes=sum(node.role == "train" for node in self.nodes),
        )
        return ControlledSimulation(work, engines, policy, settings, training=truth, **control)

    @property
    def moving(self) -> bool:
        """Whether a node is moving."""
        return bool(self._moving)

    def serving(self) -> list[str]:
        return [self._engine_of[node.rank] for node in self.nodes if node.role == "rollout"]

    def engine(self, rank: int) -> EngineSpec:
        """The new engine of a node; each start has its own name."""
        self._started += 1
        self._engine_of[rank] = f"n{rank}.{self._started}"
        steps = self.site.steps()
        is_slow = self.site.slow and rank == self.site.nodes - 1
        return EngineSpec(self._engine_of[rank], self.site.tp, Slow(steps) if is_slow else steps)

    def order(self, sim: ControlledSimulation, direction: str, rank: int, now: float) -> None:
        node = _Moving(rank, direction, now)
        self._moving.append(node)
        self.moves += 1
        self._role(rank, direction, now)
        if direction == "to_train":

            def drained() -> None:
                node.free_at = sim.now

            sim.drain(self._engine_of[rank], drained)
        else:
            sim.training.nodes -= 1
            node.step = 0 if sim.training.idle else len(sim.training.steps)

    def advance(self, sim: ControlledSimulation, now: float) -> None:
        """Advance every moving node whose time has come."""
        for node in list(self._moving):
            if node.direction == "to_rollout":
                if node.free_at < 0.0 and (node.step == 0 or sim.training.steps[node.step - 1].end_at > 0.0):
                    node.free_at = now
                    sim.join(self.engine(node.rank), self.site.to_rollout_s)
                done = node.free_at >= 0.0 and self._engine_of[node.rank] in sim.engines
            else:
                done = node.free_at >= 0.0 and now >= node.free_at + self.site.to_train_s
                sim.training.nodes += done
            if done:
                self._moving.remove(node)
                self._role(node.rank, node.direction.removeprefix("to_"), now)
                is_train, took_s = node.direction == "to_train", now - node.ordered
                self.switches.append(SwitchFact(now, "to_train" if is_train else "to_rollout", took_s))

    def _role(self, rank: int, role: str, now: float) -> None:
        self.nodes[rank] = NodeFact(rank, self.nodes[rank].component, role, now)
