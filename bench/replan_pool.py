"""The nodes of a simulated run: which train, which roll out, and what a move takes.

The first nodes only train and the last ones only roll out (`Site.core`); those between are hybrid.

- To rollout: the node leaves the trainers after the current step. Its engine accepts turns ``to_rollout_s`` later.
- To training: the engine finishes its turns. ``to_train_s`` later the node joins the next step to begin.
- Repartition: no step begins after the current one. Unfinished trajectories are lost; all nodes work in the new layout
  ``restart_s`` later.
- The first step after a change of the training nodes takes ``regroup_s`` longer.

Training seconds do not use the planner's cost model: a fixed part, tokens at a rate, the table `EFFICIENCY`, log-normal
noise, and some slow steps.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import inf
from typing import Any

import msgspec

from bench.controlled_simulation import ControlledSimulation
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
    max_model_len: int = 32_768
    """Longest context, tokens."""
    prompts: int = 16
    group: int = 8
    core: tuple[int, int] = (1, 1)
    """Nodes that only train, and that only roll out."""
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
    restart_s: float = 240.0
    """Checkpoint, process start, weights, compilation and graph capture: minutes on any large run."""

    def steps(self, tp: int = 0) -> StepTimes:
        """Step times of an engine; by default that of a node at the start."""
        return Grouped(lookup(self.device, self.model, tp or self.tp), self.stands_for)


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


class Layout(msgspec.Struct, frozen=True):
    """The layout after a restart of all ranks."""

    core: tuple[int, int]
    """Nodes that only train, and that only roll out."""
    engines: tuple[tuple[int, int], ...]
    """(TP, engines) of each node that can roll out, hybrid nodes first."""


class ReplanPool:
    """Nodes of one `ControlledSimulation`; call `advance` every few seconds."""

    def __init__(self, site: Site, train: int) -> None:
        self.site = site
        self.nodes: list[NodeFact] = []
        self.switches: list[SwitchFact] = []
        self.ordered: list[tuple[float, str, int]] = []
        """Every order: (time, direction, rank)."""
        self.repartitioned: list[float] = []
        """When all ranks worked again after each repartition."""
        self._engines_of: dict[int, tuple[int, int]] = {}
        self._moving: list[_Moving] = []
        self._started = 0
        self._names: dict[int, list[str]] = {}
        self._next: Layout | None = None
        self._back_at = inf
        self._place(Layout(site.core, ((site.tp, 1),) * (site.nodes - site.core[0])), train, 0.0)

    def simulation(
        self, work: Sequence[TrajectoryRecord], policy: Policy, truth: StepTruth, **control: Any
    ) -> ControlledSimulation:
        """A run on these nodes; ``control``: the simulation's controller, which calls `advance`, and its period."""
        site, engines = self.site, self._serving_engines()
        settings = SimulationSettings(
            batch_groups=site.prompts,
            eta=site.eta,
            max_num_seqs=site.slots,
            max_inflight=site.slots * 3 // 2,
            sync_s=site.sync_s,
            report_s=REPORT_S,
            train_nodes=self.count("train"),
        )
        return ControlledSimulation(work, engines, policy, settings, training=truth, **control)

    def count(self, role: str) -> int:
        return sum(node.role == role for node in self.nodes)

    @property
    def moving(self) -> bool:
        """Whether a node is moving, or all of them restart."""
        return bool(self._moving) or self._next is not None

    def serving(self) -> list[str]:
        return [name for node in self.nodes if node.role == "rollout" for name in self._names[node.rank]]

    def engines(self, rank: int) -> list[EngineSpec]:
        """New engines of a node; each start has its own names."""
        self._started += 1
        tp, count = self._engines_of[rank]
        self._names[rank] = [f"n{rank}.{self._started}" + (f".{i}" if count > 1 else "") for i in range(count)]
        return [EngineSpec(name, tp, self.site.steps(tp)) for name in self._names[rank]]

    def order(self, sim: ControlledSimulation, direction: str, rank: int, now: float) -> None:
        node = _Moving(rank, direction, now)
        self._moving.append(node)
        self.ordered.append((now, direction, rank))
        self._role(rank, direction, now)
        if direction == "to_train":
            names = list(self._names[rank])

            def drained() -> None:
                names.pop()
                if not names:
                    node.free_at = sim.now

            for name in tuple(names):
                sim.drain(name, drained)
            return
        sim.training.nodes -= 1
        node.step = 0 if sim.training.idle else len(sim.training.steps)

    def repartition(self, sim: ControlledSimulation, layout: Layout) -> None:
        """Restart all ranks at the next step boundary; no node may be moving."""
        self._next, self._back_at = layout, inf
        sim.hold_training(True)

    def advance(self, sim: ControlledSimulation, now: float) -> None:
        """Advance every moving node whose time has come."""
        if self._next is not None:
            self._repartition(sim, self._next, now)
        for node in list(self._moving):
            if node.direction == "to_rollout":
                if node.free_at < 0.0 and (node.step == 0 or sim.training.steps[node.step - 1].end_at > 0.0):
                    node.free_at = now
                    for spec in self.engines(node.rank):
                        sim.join(spec, self.site.to_rollout_s)
                done = node.free_at >= 0.0 and all(name in sim.engines for name in self._names[node.rank])
            else:
                done = node.free_at >= 0.0 and now >= node.free_at + self.site.to_train_s
                if done:
                    sim.training.nodes += 1
            if done:
                self._moving.remove(node)
                self._role(node.rank, node.direction.removeprefix("to_"), now)
                is_train, took_s = node.direction == "to_train", now - node.ordered
                self.switches.append(SwitchFact(now, "to_train" if is_train else "to_rollout", took_s))

    def _repartition(self, sim: ControlledSimulation, layout: Layout, now: float) -> None:
        if self._back_at == inf and sim.training.idle:
            self._back_at = now + self.site.restart_s
            self._place(layout, layout.core[0], now)
            sim.training.nodes = layout.core[0]
            sim.restart(self._serving_engines(), self.site.restart_s)
        if now >= self._back_at:
            self._next = None
            self.repartitioned.append(now)
            sim.hold_training(False)

    def _place(self, layout: Layout, train: int, now: float) -> None:
        """Give every node its component, role and engines; ``train`` nodes train."""
        first, last = layout.core[0], self.site.nodes - layout.core[1]
        kinds = ["train" if rank < first else "hybrid" if rank < last else "rollout" for rank in range(self.site.nodes)]
        self.nodes = [
            NodeFact(rank, kind, "train" if rank < train else "rollout", now) for rank, kind in enumerate(kinds)
        ]
        self._engines_of = {first + i: engines for i, engines in enumerate(layout.engines)}

    def _serving_engines(self) -> list[EngineSpec]:
        return [spec for node in self.nodes if node.role == "rollout" for spec in self.engines(node.rank)]

    def _role(self, rank: int, role: str, now: float) -> None:
        self.nodes[rank] = NodeFact(rank, self.nodes[rank].component, role, now)
