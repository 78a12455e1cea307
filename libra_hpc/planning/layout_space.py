"""What fits: training layouts and engines on the nodes of each pool, in device and host memory.

- Training uses nodes of one pool. A core of n nodes -> its fastest layout (`TrainSearch`); hybrid nodes hold whole
  replicas of it.
- Engines of one TP degree on all nodes of a pool that roll out; each holds the longest trajectory.
- With `InTurn`, nodes may serve both stages of every step in turn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import msgspec

from libra_hpc.errors import UserError
from libra_hpc.models.host_memory import node_memory
from libra_hpc.models.memory import Limit
from libra_hpc.models.step_times.lookup import StepLookup, lookup
from libra_hpc.models.step_times.steps import StepTimes
from libra_hpc.models.train_seconds import TrainCost, portion

from .request import DevicePool, InTurn, PlanRequest, PoolEngines, RunPlan
from .train_layout import Excluded, TrainChoice, TrainSearch

ROLLOUT_TP = (1, 2, 4, 8)


class EngineKind(NamedTuple):
    """Engines of one TP degree on a pool's devices."""

    pool: int
    steps: StepTimes
    limit: Limit | None
    """Why they do not hold the longest trajectory."""


class LayoutSpace:
    """All layouts of a question that fit, with the step times of ``steps``.

    The core fits without hybrid nodes, and a hybrid node by itself; each node has enough host memory.
    """

    def __init__(self, asked: PlanRequest, steps: StepLookup = lookup) -> None:
        self._asked, self._pools, shape = asked, asked.pools, asked.shape
        self._train = [
            TrainSearch(
                TrainCost(shape, p.device, p.node_devices, asked.batch, asked.train_factor), p.node_devices, asked.space
            )
            for p in asked.pools
        ]
        self._longest = max(asked.settings.max_model_len, int(asked.batch.longest))
        self.kinds = [
            EngineKind(i, found, _cache_limit(found.kv_capacity, self._longest))
            for i, p in enumerate(asked.pools)
            for tp in ROLLOUT_TP
            if p.node_devices % tp == 0 and shape.divides(tp) and self._rolls_limit(p, tp) is None
            for found in [steps(p.device, shape, tp)]
        ]

    def plans(self, have: Sequence[int], pool: int) -> Iterator[RunPlan]:
        """Every plan with a core of ``pool``, ``have[pool]`` nodes of each pool in all; without seconds."""
        for nodes in range(1, self._most(have, pool) + 1):
            choice, hybrid = self._trained(have, pool, nodes)
            if choice is not None:
                yield from self._beside(have, pool, nodes, hybrid, choice, None)
            for way in self._asked.in_turn:
                worlds, choice = self._trained_in_turn(have, pool, nodes, way)
                if choice is not None:
                    yield from self._beside(have, pool, nodes, worlds * self._asked.hybrid.world, choice, way)

    def _beside(
        self, have: Sequence[int], pool: int, nodes: int, hybrid: int, choice: TrainChoice, way: InTurn | None
    ) -> Iterator[RunPlan]:
        """The plans with each fleet of the nodes that roll out."""
        core = 0 if way is not None and way.core_rolls else nodes
        devices = [(n - core * (i == pool)) * self._pools[i].node_devices for i, n in enumerate(have)]
        able = [[k for k in self.kinds if k.pool == i and k.limit is None] for i, n in enumerate(devices) if n]
        for fleet in product(*able):
            engines = tuple(PoolEngines(k.pool, k.steps.tp, devices[k.pool] // k.steps.tp) for k in fleet)
            plan = RunPlan(
                pool=pool,
                nodes=nodes,
                train=choice,
                engines=engines,
                hybrid=hybrid,
                snapshots=self._core_limit(pool, nodes)[1],
                in_turn=way,
            )
            update = self._asked.update.by(plan.trains * self._pools[pool].node_devices)
            yield msgspec.structs.replace(plan, update=update)

    def _trained_in_turn(
        self, have: Sequence[int], pool: int, nodes: int, way: InTurn
    ) -> tuple[int, TrainChoice | None]:
        """Worlds that train beside a core of so many nodes, all but one node that rolls out only, and their layout."""
        world = self._asked.hybrid.world
        worlds = (self._most(have, pool) - nodes) // world
        if not (worlds or way.core_rolls) or self._core_limit(pool, nodes)[0] is not None:
            return 0, None
        devices = nodes * self._pools[pool].node_devices
        return worlds, self._train[pool].best(devices, elastic=world if worlds else 0, worlds=worlds)

    def steps_of(self, pool: int, tp: int) -> StepTimes:
        """Step times of its engines of that degree."""
        return next(kind.steps for kind in self.kinds if (kind.pool, kind.steps.tp) == (pool, tp))

    def excluded(self, best: RunPlan) -> list[Excluded]:
        """What does not fit beside the nodes of ``best``: training layouts, then engines, nearest first."""
        devices = best.nodes * self._pools[best.pool].node_devices
        return [*self._train[best.pool].excluded(devices), *self.excluded_kinds()]

    def _most(self, have: Sequence[int], pool: int) -> int:
        """Nodes of a pool that can train: one of all rolls out."""
        return have[pool] - (sum(have) == have[pool])

    def _trained(self, have: Sequence[int], pool: int, nodes: int) -> tuple[TrainChoice | None, int]:
        """The best training layout, and how many of the pool's other nodes are hybrid."""
        if self._core_limit(pool, nodes)[0] is not None:
            return None, 0
        search, devices = self._train[pool], nodes * self._pools[pool].node_devices
        hybrid, world = self._asked.hybrid.nodes(have[pool] - nodes), self._asked.hybrid.world
        found = None if hybrid % world else search.best(devices, elastic=world if hybrid else 0)
        if found is None and hybrid and not self._asked.hybrid.rest:
            return search.best(devices), 0
        return found, hybrid

    def _core_limit(self, pool: int, nodes: int) -> tuple[Limit | None, bool]:
        """Why a node of a core of so many lacks host memory, and whether it has enough for snapshots too."""
        work = msgspec.structs.replace(self._asked.hosts.core, core_nodes=nodes)
        limit = self._pools[pool].room.limit(node_memory(self._asked.shape, work))
        if limit is None or not (work.snapshots and self._asked.hosts.optional):
            return limit, limit is None
        work = msgspec.structs.replace(work, snapshots=False)
        return self._pools[pool].room.limit(node_memory(self._asked.shape, work)), False

    def _rolls_limit(self, pool: DevicePool, tp: int) -> Limit | None:
        """Why a node with engines of this degree lacks host memory."""
        work, devices = self._asked.hosts.rolls, pool.node_devices
        own = msgspec.structs.replace(work, engines=devices // tp)
        return pool.room.limit(node_memory(self._asked.shape, own))

    def portion(self, plan: RunPlan) -> int:
        """Groups that are trained together as soon as they are complete; 0: batches are trained whole."""
        asked = self._asked
        length = math.ceil(portion(plan.train.layout, asked.batch.mean) / asked.work.group)
        streamed = asked.settings.eta == 0 and asked.batch.minibatches == 1 and not plan.in_turn
        return length if streamed and 2 * length <= asked.settings.batch_groups else 0

    def excluded_kinds(self) -> list[Excluded]:
        """Engines that cannot hold the longest trajectories, nearest first."""
        found = [
            Excluded(f"rollout TP{kind.steps.tp} on {self._pools[kind.pool].device.name}", kind.limit)
            for kind in self.kinds
            if kind.limit is not None
        ]
        return sorted(found, key=lambda e: e.limit.over)

    def impossible(self, have: Sequence[int]) -> UserError:
        """The error when nothing fits: which stage, and what comes nearest."""
        hosts = [limit for p in self._pools if (limit := self._rolls_limit(p, p.node_devices)) is not None]
        if hosts:
            return UserError(f"No node holds what rollout keeps there: {hosts[0].reason}.")
        if not all(any(k.pool == i and k.limit is None for k in self.kinds) for i, n in enumerate(have) if n):
            nearest = self.excluded_kinds()
            why = (
                f"nearest: {nearest[0].what}, {nearest[0].limit.reason}"
                if nearest
                else "no TP divides both the node and the model"
            )
            return UserError(f"No rollout layout holds trajectories of {self._longest:,} tokens; {why}.")
        options = self._impossible_cores(have)
        if not options:
            return UserError("No training layout divides both the model and the nodes, hybrid ones among them.")
        near = min(options, key=lambda e: e.limit.over)
        return UserError(f"No training layout fits beside a rollout node; nearest: {near.what}, {near.limit.reason}.")

    def _impossible_cores(self, have: Sequence[int]) -> list[Excluded]:
        """What excludes cores; host memory alone, where no number of nodes has enough of it."""
        cores = [(i, k) for i in range(len(have)) for k in range(1, self._most(have, i) + 1)]
        limits = {(i, k): limit for i, k in cores if (limit := self._core_limit(i, k)[0]) is not None}
        lacking = [Excluded(f"training on {k} node{'s' if k > 1 else ''}", limit) for (_, k), limit in limits.items()]
        if len(limits) == len(cores):
            return lacking
        return lacking + [e for i, k in cores for e in self._train[i].excluded(k * self._pools[i].node_devices)]


def _cache_limit(capacity: int, need: int) -> Limit | None:
    """Why a KV cache of so many tokens does not hold a trajectory."""
    if capacity >= need:
        return None
    if capacity <= 0:
        return Limit(float(need), "the weights leave no room for a KV cache")
    why = f"its KV cache holds {capacity:,} tokens, trajectories may have {need:,}"
    return Limit(float(need - capacity), why)
