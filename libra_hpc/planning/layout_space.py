"""What fits: training layouts and engines on the nodes of each pool, in device and host memory.

- Training uses nodes of one pool. A core of n nodes -> its fastest layout (`TrainSearch`); hybrid nodes hold whole
  replicas of it.
- Engines of one TP degree on all nodes of a pool that roll out; each holds the longest trajectory.
- With `InTurn`, all nodes of that pool may serve both stages of every step in turn, as one core where that can.
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
        way, world = self._asked.in_turn, self._asked.hybrid.world
        for nodes in range(1, have[pool] + 1):
            left, others = have[pool] - nodes, sum(have) - have[pool]
            if left or others:
                yield from self._beside(have, pool, nodes, *self._trained(left, pool, nodes), None)
            if way is not None and (not left if way.core_rolls else left >= world):
                yield from self._beside(have, pool, nodes, *self._best(pool, nodes, world, left // world), way)

    def _beside(
        self, have: Sequence[int], pool: int, nodes: int, choice: TrainChoice | None, hybrid: int, way: InTurn | None
    ) -> Iterator[RunPlan]:
        """The plans with each fleet of the nodes that roll out, where host memory and the layout of training fit."""
        if choice is None:
            return
        core = 0 if way is not None and way.core_rolls else nodes
        devices = [(n - core * (i == pool)) * self._pools[i].node_devices for i, n in enumerate(have)]
        able = [[k for k in self.kinds if k.pool == i and k.limit is None] for i, n in enumerate(devices) if n]
        for fleet in product(*able):
            engines = tuple(PoolEngines(k.pool, k.steps.tp, devices[k.pool] // k.steps.tp) for k in fleet)
            limit, snapshots = self._core_limit(pool, nodes, 0 if core else engines[0].replicas // nodes)
            if limit is not None:
                continue
            plan = RunPlan(
                pool=pool, nodes=nodes, train=choice, engines=engines, hybrid=hybrid, snapshots=snapshots, in_turn=way
            )
            update = self._asked.update.by(plan.trains * self._pools[pool].node_devices)
            yield msgspec.structs.replace(plan, update=update)

    def _best(self, pool: int, nodes: int, world: int, worlds: int) -> tuple[TrainChoice | None, int]:
        """The best layout of a core with so many worlds that train beside it in turn, and their nodes."""
        devices = nodes * self._pools[pool].node_devices
        return self._train[pool].best(devices, elastic=world if worlds else 0, worlds=worlds), worlds * world

    def steps_of(self, pool: int, tp: int) -> StepTimes:
        """Step times of its engines of that degree."""
        return next(kind.steps for kind in self.kinds if (kind.pool, kind.steps.tp) == (pool, tp))

    def excluded(self, best: RunPlan) -> list[Excluded]:
        """What does not fit beside the nodes of ``best``: training layouts, then engines, nearest first."""
        devices = best.nodes * self._pools[best.pool].node_devices
        return [*self._train[best.pool].excluded(devices), *self.excluded_kinds()]

    def _trained(self, left: int, pool: int, nodes: int) -> tuple[TrainChoice | None, int]:
        """The best training layout, and how many of the pool's ``left`` other nodes are hybrid."""
        search, devices = self._train[pool], nodes * self._pools[pool].node_devices
        hybrid, world = self._asked.hybrid.nodes(left), self._asked.hybrid.world
        found = None if hybrid % world else search.best(devices, elastic=world if hybrid else 0)
        if found is None and hybrid and not self._asked.hybrid.rest:
            return search.best(devices), 0
        return found, hybrid

    def _core_limit(self, pool: int, nodes: int, engines: int = 0) -> tuple[Limit | None, bool]:
        """Why a node of a core of so many lacks host memory, and whether it has enough for snapshots too.

        ``engines``: on each of its nodes.
        """
        rolls = {"rolls": True, "engines": engines} if engines else {}
        work = msgspec.structs.replace(self._asked.hosts.core, core_nodes=nodes, **rolls)
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
        cores = [(i, k) for i, n in enumerate(have) for k in range(1, n + (sum(have) > n))]
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
