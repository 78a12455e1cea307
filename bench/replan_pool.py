"""The pool of a simulated run: nodes that train or roll out, and what it takes to move one.

The first nodes train and the last ones roll out for ever (`Site.core`); those between are hybrid.  Nodes carry one
engine each, until they are repartitioned.

* *To rollout*: the node leaves the trainers when the step under way is over; its engine accepts turns ``to_rollout_s``
  later.
* *To training*: the engine gets no more turns, ends those it has, and is taken down; ``to_train_s`` later the node
  takes part in the next step to begin.
* *Repartitioned* (`ReplanPool.repartition`): no step begins after the one under way; when it is over
everything stops, trajectories that have not ended are lost,
  and ``restart_s`` later all nodes work again, as what the new layout says.
* The first step after a change of the training nodes takes ``regroup_s`` longer.

The seconds of a training step are the simulator's own and not a formula that the planner knows: a fixed part, tokens at
a rate, a table of how much of the added nodes' speed arrives (`EFFICIENCY`, in the form of data-parallel scaling,
shaken by the seed), log-normal noise, and now and then a slow step.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from math import inf

import msgspec

from libra_hpc.hardware.lookup import lookup
from libra_hpc.hardware.steps import StepTimes
from libra_hpc.protocol.plan import NodeFact, SwitchFact
from libra_hpc.protocol.trace import TrajectoryRecord
from libra_hpc.sched.protocol import Policy
from libra_hpc.simulator.settings import EngineSpec, SimSettings
from libra_hpc.simulator.simulate import Simulation

EFFICIENCY = (1.0, 0.965, 0.94, 0.925, 0.90, 0.87, 0.855, 0.845, 0.82, 0.80, 0.785, 0.77)
"""Speed of n nodes over n times the speed of one."""
SHAKEN = 0.02
"""Standard deviation of the table between machines (seeds)."""
REPORT_S = 5.0
"""Between two reports of an engine.  Batches take minutes, and the sticky policy reads nothing from reports: every
second of a live run would change nothing."""
NOISE = 0.03
SLOW_SHARE, SLOW = 0.02, 1.3
"""One step in fifty takes this much longer: a checkpoint, a neighbour on the network."""


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """48 A800 as 12 nodes of 4, with a sixteenth of the trajectories.

    What is meant: batches of 256 prompts with 8 samples each, engines with 64 seats.  Simulated: 16 prompts, 4 seats,
    and every sequence stands for `stands_for` = 16 that run in step with it: engines are as full, as slow and as short
    of KV cache as they would be (`Grouped`), a training token costs sixteen times its time, and a run takes seconds;
    single batches scatter more.
    """

    nodes: int = 12
    device: str = "a800"
    model: str = "qwen3-14b"
    tp: int = 4
    """GPUs of a node, all in one engine."""
    stands_for: int = 16
    """Sequences that one simulated sequence stands for."""
    seats: int = 4
    """Most simulated sequences of an engine at once."""
    max_model_len: int = 32_768
    """Longest context, tokens."""
    prompts: int = 16
    group: int = 8
    core: tuple[int, int] = (1, 1)
    """Nodes that only train, and that only roll out."""
    eta: int = 2
    """With 1, a reasoning batch waits for its longest trajectory at any split; with 2 or more, as asynchronous
    systems run, nodes decide."""
    sync_s: float = 2.0
    fixed_s: float = 6.0
    """Of a training step, whatever its tokens and nodes."""
    token_s: float = 16 * 0.9e-4
    """Per simulated token on one node, for sixteen tokens: 14.8e9 weights, 6 FLOPs each at half the peak of 4 A800,
    for the 60 % of the groups whose rewards differ; the others give no gradient and are skipped."""
    to_rollout_s: float = 30.0
    """A standby engine wakes and loads weights."""
    to_train_s: float = 45.0
    """A replica starts and receives the state."""
    regroup_s: float = 5.0
    restart_s: float = 240.0
    """A checkpoint is written, processes start, weights are loaded, engines compile and capture their graphs:
    minutes on any large run."""

    def steps(self, tp: int = 0) -> StepTimes:
        """Step times of an engine; by default that of a node at the start."""
        return Grouped(lookup(self.device, self.model, tp or self.tp), self.stands_for)


class Grouped:
    """Step times of an engine whose every sequence stands for ``size`` that run in step; tokens and capacity are
    counted per sequence simulated."""

    def __init__(self, steps: StepTimes, size: int) -> None:
        self.tp, self.source = steps.tp, steps.source
        self.kv_capacity = steps.kv_capacity // size
        self._steps, self._size = steps, size

    def step_s(self, decodes: int, kv_tokens: int, prefill: int = 0, context: int = 0) -> float:
        """Seconds of one step of all of them."""
        return self._steps.step_s(decodes * self._size, kv_tokens * self._size, prefill * self._size, context)


class StepTruth:
    """Seconds of training steps; keeps what it gave out."""

    def __init__(self, site: Site, seed: int) -> None:
        self._site = site
        self._rng = random.Random(f"{seed}/training")
        self._table = [e * (1.0 + SHAKEN * self._rng.gauss(0.0, 1.0)) for e in EFFICIENCY]
        self._nodes = 0
        self.replicas: list[int] = []
        """Nodes of each step so far."""

    def __call__(self, tokens: int, nodes: int) -> float:
        site = self._site
        seconds = site.fixed_s + tokens * site.token_s / (nodes * self._table[min(nodes, len(self._table)) - 1])
        seconds *= self._rng.lognormvariate(0.0, NOISE) * (SLOW if self._rng.random() < SLOW_SHARE else 1.0)
        if self._nodes not in (0, nodes):
            seconds += site.regroup_s
        self._nodes = nodes
        self.replicas.append(nodes)
        return seconds


class _Way(msgspec.Struct):
    """A node between two stages."""

    rank: int
    direction: str
    ordered: float
    step: int = 0
    """Step whose end releases the node."""
    free_at: float = -1.0


class Layout(msgspec.Struct, frozen=True):
    """What a new start of all ranks makes of the nodes."""

    core: tuple[int, int]
    """Nodes that only train, and that only roll out."""
    engines: tuple[tuple[int, int], ...]
    """(TP, engines) of each node that can roll out, hybrid nodes first."""


class ReplanPool:
    """Nodes of one `Simulation`, moved by `order` and `repartition`; call `advance` every few seconds."""

    def __init__(self, site: Site, train: int) -> None:
        self.site = site
        self.nodes: list[NodeFact] = []
        self.switches: list[SwitchFact] = []
        self.ordered: list[tuple[float, str, int]] = []
        """Every order: (time, direction, rank)."""
        self.repartitioned: list[float] = []
        """When all ranks worked again after a repartition."""
        self._engines_of: dict[int, tuple[int, int]] = {}
        self._ways: list[_Way] = []
        self._started = 0
        self._names: dict[int, list[str]] = {}
        self._next: Layout | None = None
        self._back_at = inf
        self._place(Layout(site.core, ((site.tp, 1),) * (site.nodes - site.core[0])), train, 0.0)

    def simulation(
        self,
        work: Sequence[TrajectoryRecord],
        policy: Policy,
        truth: StepTruth,
        control: Callable[[Simulation, float], None],
        look_s: float,
    ) -> Simulation:
        """A run on these nodes; ``control`` is called every ``look_s`` seconds, after the nodes advanced."""
        site = self.site
        settings = SimSettings(
            batch_groups=site.prompts,
            eta=site.eta,
            max_num_seqs=site.seats,
            max_inflight=site.seats * 3 // 2,
            sync_s=site.sync_s,
            report_s=REPORT_S,
            train_nodes=self.count("train"),
        )

        def step(sim: Simulation, now: float) -> None:
            self.advance(sim, now)
            control(sim, now)

        return Simulation(work, self._serving_engines(), policy, settings, truth, step, look_s)

    def count(self, role: str) -> int:
        """Nodes in a role."""
        return sum(node.role == role for node in self.nodes)

    @property
    def moving(self) -> bool:
        """Whether a node is on its way, or all of them are."""
        return bool(self._ways) or self._next is not None

    def serving(self) -> list[str]:
        """Engines of the nodes that roll out."""
        return [name for node in self.nodes if node.role == "rollout" for name in self._names[node.rank]]

    def engines(self, rank: int) -> list[EngineSpec]:
        """New engines of a node; every start has names of its own."""
        self._started += 1
        tp, count = self._engines_of[rank]
        self._names[rank] = [f"n{rank}.{self._started}" + (f".{i}" if count > 1 else "") for i in range(count)]
        return [EngineSpec(name, tp, self.site.steps(tp)) for name in self._names[rank]]

    def order(self, sim: Simulation, direction: str, rank: int, now: float) -> None:
        """Move a node."""
        way = _Way(rank, direction, now)
        self._ways.append(way)
        self.ordered.append((now, direction, rank))
        self._role(rank, direction, now)
        if direction == "to_train":
            names = list(self._names[rank])

            def drained() -> None:
                names.pop()
                if not names:
                    way.free_at = sim.now

            for name in tuple(names):
                sim.drain(name, drained)
            return
        sim.training.nodes -= 1
        way.step = 0 if sim.training.idle else len(sim.training.steps)

    def repartition(self, sim: Simulation, layout: Layout) -> None:
        """Start all ranks anew at the next step boundary; no node may be on its way."""
        self._next, self._back_at = layout, inf
        sim.hold_training(True)

    def advance(self, sim: Simulation, now: float) -> None:
        """Let nodes take the next part of their way when it is time."""
        if self._next is not None:
            self._repartition(sim, self._next, now)
        for way in list(self._ways):
            if way.direction == "to_rollout":
                if way.free_at < 0.0 and (way.step == 0 or sim.training.steps[way.step - 1].end_at > 0.0):
                    way.free_at = now
                    for spec in self.engines(way.rank):
                        sim.join(spec, self.site.to_rollout_s)
                done = way.free_at >= 0.0 and all(name in sim.engines for name in self._names[way.rank])
            else:
                done = way.free_at >= 0.0 and now >= way.free_at + self.site.to_train_s
                if done:
                    sim.training.nodes += 1
            if done:
                self._ways.remove(way)
                self._role(way.rank, way.direction.removeprefix("to_"), now)
                self.switches.append(
                    SwitchFact(now, "to_train" if way.direction == "to_train" else "to_rollout", now - way.ordered)
                )

    def _repartition(self, sim: Simulation, layout: Layout, now: float) -> None:
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
