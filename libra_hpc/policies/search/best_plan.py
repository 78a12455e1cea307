"""The best plan: how many nodes train, in which layout, and which TP classes roll out; exact for the cost models.

The objective is the seconds of one global batch: the slower stage with eta > 0, the sum with eta = 0. With eta > 0 new
prompts wait for a training step (``lag`` of `ReplicaCost.time`). The stages share the nodes and this wait, so each
number n of training nodes is searched per stage. Training uses nodes of one pool. New weights take the time of an
`UpdateTime`: diff is training, the pause is rollout, and what lies between is a wait for new weights.

- At most `ENUMERATED` nodes: every n is computed.
- More: branch and bound over intervals of n. The bound has the least training time there and rollout at its start.

`PlanResult.gap` is how far the best plan can be from the optimum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from libra_hpc.errors import UserError
from libra_hpc.models.devices import Device
from libra_hpc.models.host_memory import HostRoom, HostUse, node_memory
from libra_hpc.models.memory import Limit
from libra_hpc.models.shapes import ModelShape
from libra_hpc.models.step_times.lookup import StepLookup, lookup
from libra_hpc.models.update_time import NO_UPDATE, UpdateTime
from libra_hpc.policies.costs.factors import NONE, Factors
from libra_hpc.policies.costs.lengths import Lengths
from libra_hpc.policies.costs.rollout_time import ReplicaCost, RolloutOptions
from libra_hpc.policies.costs.training_time import BatchWork, TrainCost

from .even_rollout_layout import EvenRolloutSearch, homogeneous_layouts, layout_seconds
from .node_count import NodeCountSearch
from .rollout_layout import ReplicaClass, RolloutLayout, RolloutSearch
from .train_layout import NO_HYBRID, Excluded, Hybrid, TrainChoice, TrainSearch, TrainSpace

ENUMERATED = 12
"""Nodes up to which every number of training nodes is computed: bounds save nothing there."""
ROLLOUT_TP = (1, 2, 4, 8)


class DevicePool(msgspec.Struct, frozen=True):
    """Equal nodes, such as those of one component of a heterogeneous job."""

    device: Device
    nodes: int
    node_devices: int
    room: HostRoom = HostRoom()

    @property
    def devices(self) -> int:
        return self.nodes * self.node_devices


class RunPlan(msgspec.Struct, frozen=True):
    """A complete plan and its predicted cost."""

    pool: int
    """Index of the pool that trains."""
    nodes: int
    """Its training nodes; all other nodes roll out."""
    train: TrainChoice
    rollout: RolloutLayout
    rollout_s: float
    """Of one global batch: simulated, or of the cost models."""
    seconds: float
    """Of one global batch, with these rollout seconds."""
    model_s: float
    """Of one global batch, by the cost models."""
    hybrid: int
    """Hybrid nodes among those that roll out."""
    tokens_s: float
    """Tokens of finished trajectories, trained on, per second."""
    simulated: int = 0
    """Batches that were simulated."""
    snapshots: bool = True
    """Whether they fit in host memory."""
    update: UpdateTime = NO_UPDATE
    """Of its training processes, and an engine of one GPU."""

    @property
    def mixed(self) -> bool:
        """Whether a pool has engines of several TP degrees."""
        pools = [s.pool for s in self.rollout.segments]
        return len(set(pools)) < len(pools)


class PlanResult(msgspec.Struct, frozen=True):
    """Plans from best to worst, one for each evaluated number of training nodes."""

    plans: tuple[RunPlan, ...]
    bound: float
    """Seconds that no plan can beat."""
    excluded: tuple[Excluded, ...]
    """Impossible choices for the best plan's nodes, nearest to possible first; training comes before rollout."""
    alone: tuple[tuple[int, int, float], ...]
    """Rollout of the best plan's nodes with one class only: (pool, TP, seconds)."""
    spare: tuple[int, ...]
    """TP degree of each pool for nodes without a share of a plan's lengths; 0: none holds the longest."""
    straggler: float
    """Seconds of the longest trajectories alone; more rollout nodes do not shorten them."""
    sources: tuple[str, ...]
    """Where step times come from."""

    @property
    def gap(self) -> float:
        """Share by which the best plan can be off the optimum."""
        return max(0.0, 1.0 - self.bound / self.plans[0].seconds)


class PlanSearch:
    """Cost tables of one model, batch and set of device kinds; `run` searches, also for other numbers of nodes.

    ``sorted_lengths``: the scheduler sends long trajectories to large TP; otherwise every replica gets a fair sample.
    ``gated``: with eta > 0 new prompts wait for a training step. With ``whole_nodes``, all replicas of a node have one
    TP degree, as in a run file. ``degrees`` are the TP degrees of rollout. The core fits without hybrid nodes, and a
    hybrid node by itself. With ``hosts``, each node has enough host memory. ``update``: of one training process, and of
    an engine of one GPU.
    """

    def __init__(
        self,
        shape: ModelShape,
        pools: Sequence[DevicePool],
        batch: BatchWork,
        *,
        space: TrainSpace = TrainSpace(),  # noqa: B008
        options: RolloutOptions = RolloutOptions(),  # noqa: B008
        factors: Factors = NONE,
        sorted_lengths: bool = False,
        gated: bool = True,
        whole_nodes: bool = False,
        degrees: Sequence[int] = ROLLOUT_TP,
        hybrid: Hybrid = NO_HYBRID,
        hosts: HostUse = HostUse(),  # noqa: B008
        steps: StepLookup = lookup,
        update: UpdateTime = NO_UPDATE,
    ) -> None:
        self._pools, self._batch, self._gated, self._hybrid = list(pools), batch, gated, hybrid
        self._shape, self._hosts, self._update = shape, hosts, update
        self._arguments: dict[str, Any] = {
            "shape": shape,
            "pools": pools,
            "batch": batch,
            "space": space,
            "options": options,
            "factors": factors,
            "sorted_lengths": sorted_lengths,
            "gated": gated,
            "whole_nodes": whole_nodes,
            "degrees": degrees,
            "hybrid": hybrid,
            "hosts": hosts,
            "steps": steps,
            "update": update,
        }
        self._train = [
            TrainSearch(TrainCost(shape, p.device, p.node_devices, batch=batch, factors=factors), p.node_devices, space)
            for p in pools
        ]
        self._costs = [
            ReplicaClass(
                i,
                ReplicaCost(steps(p.device, shape, tp), batch, options, factors),
                p.node_devices // tp if whole_nodes else 1,
            )
            for i, p in enumerate(pools)
            for tp in degrees
            if p.node_devices % tp == 0 and shape.divides(tp) and self._rolls_limit(p, tp) is None
        ]
        self._widest = max((cost.tp for cost in self._costs), default=1)
        """Its engines have new weights first."""
        kind = RolloutSearch if sorted_lengths else EvenRolloutSearch
        self._bins = len(batch.lengths.bins)
        self._layouts: RolloutSearch | EvenRolloutSearch = kind(self._costs, self._bins)

    def with_lengths_sorted(self) -> PlanSearch:
        """The same search if the scheduler sends long trajectories to large TP."""
        return PlanSearch(**{**self._arguments, "sorted_lengths": True})

    def of_one_batch(self, lengths: Lengths) -> PlanSearch:
        """The same search for one batch of these lengths alone."""
        batch = msgspec.structs.replace(self._batch, eta=0, lengths=lengths)
        return PlanSearch(**{**self._arguments, "batch": batch})

    def run(
        self, keep: int = 5, nodes: Sequence[int] | None = None, trainers: Sequence[int] | None = None
    ) -> PlanResult:
        """The best plans with ``nodes[pool]`` nodes of each pool (default: all), those around the best one.

        Only pools in ``trainers`` may train (default: all). Raises `UserError` for too few nodes and when nothing fits,
        with the nearest limit.
        """
        have = list(nodes) if nodes is not None else [p.nodes for p in self._pools]
        if sum(have) < 2:
            raise UserError(f"nodes = {sum(have)}: each stage needs a node of its own; valid: at least 2 nodes.")
        found: dict[tuple[int, int], RunPlan] = {}
        pools = range(len(have)) if trainers is None else trainers
        bounds = [self._search(have, pool, keep, found) for pool in pools]
        if not found:
            raise self._impossible(have)
        plans = sorted(found.values(), key=lambda p: (p.seconds, p.train.time.total + p.rollout.seconds))
        best = plans[0]
        lag = self.lag(self._train_s(best))
        whole = self._alone([n * p.node_devices for n, p in zip(have, self._pools, strict=True)], lag)
        fastest = {pool: tp for _, pool, tp in sorted(((s, pool, tp) for pool, tp, s in whole), reverse=True)}
        return PlanResult(
            plans=tuple(plans[:keep]),
            bound=min(*bounds, best.seconds),
            excluded=(
                *self._train[best.pool].excluded(best.nodes * self._pools[best.pool].node_devices),
                *self.excluded_classes(),
            ),
            alone=tuple(self._alone(self.rest(have, best.pool, best.nodes), lag)),
            spare=tuple(fastest.get(pool, 0) for pool in range(len(have))),
            straggler=self._layouts.straggler(),
            sources=tuple(dict.fromkeys(c.replica.source for c in self._layouts.costs)),
        )

    def _search(self, have: Sequence[int], pool: int, keep: int, found: dict[tuple[int, int], RunPlan]) -> float:
        """Search one pool that trains, put plans into ``found``, and return what no plan of the pool is below."""
        most = self._most(have, pool)

        def seconds(nodes: int) -> float:
            plan = self.build(have, pool, nodes)
            if plan is None:
                return math.inf
            found[pool, nodes] = plan
            return plan.seconds

        search = NodeCountSearch(most, seconds, partial(self._bound, have, pool))
        if most <= ENUMERATED:
            bound = min(map(search.seconds, range(1, most + 1)), default=math.inf)
        else:
            bound = search.branch_and_bound()
        for nodes in search.around(keep):
            search.seconds(nodes)
        return bound

    def _most(self, have: Sequence[int], pool: int) -> int:
        """Nodes of a pool that can train: one of all rolls out."""
        return have[pool] - (sum(have) == have[pool])

    def _bound(self, have: Sequence[int], pool: int, low: int, high: int, best: float) -> float:
        """Seconds that no plan with ``low``..``high`` training nodes is below; of training alone from ``best`` on.

        Rollout is not faster with fewer nodes or a longer wait: its time at ``low`` after the least one bounds all.
        """
        train = min(self.train_seconds(have, pool, n) for n in range(low, high + 1))
        if (bound := self.batch_seconds(train, 0.0, self._widest)) >= best:
            return bound
        rollout = self.rollout_seconds(self.rest(have, pool, low), self.lag(train))
        return self.batch_seconds(train, rollout, self._widest)

    def _alone(self, devices: Sequence[int], lag: float) -> list[tuple[int, int, float]]:
        """(pool, TP, seconds) of every class that serves all trajectories alone, on so many devices of its pool."""
        found = [
            (c.pool, c.tp, self._layouts.only(c, c.most(devices[c.pool]), lag).seconds)
            for c in self._layouts.costs
            if c.most(devices[c.pool])
        ]
        return [entry for entry in found if entry[2] < math.inf]

    def train_seconds(self, have: Sequence[int], pool: int, nodes: int) -> float:
        """Seconds of the training layout that `build` takes, and of its diff; infinite without one."""
        choice, _ = self._trained(have, pool, nodes)
        return math.inf if choice is None else choice.time.total + self._update_of(pool, nodes).diff_s

    def _train_s(self, plan: RunPlan) -> float:
        return plan.train.time.total + plan.update.diff_s

    def _update_of(self, pool: int, nodes: int) -> UpdateTime:
        return self._update.by(nodes * self._pools[pool].node_devices)

    def _trained(self, have: Sequence[int], pool: int, nodes: int) -> tuple[TrainChoice | None, int]:
        """The best training layout, and how many of the pool's other nodes are hybrid."""
        if self._core_limit(pool, nodes)[0] is not None:
            return None, 0
        search, devices = self._train[pool], nodes * self._pools[pool].node_devices
        hybrid, world = self._hybrid.nodes(have[pool] - nodes), self._hybrid.world
        found = None if hybrid % world else search.best(devices, elastic=world if hybrid else 0)
        if found is None and hybrid and not self._hybrid.rest:
            return search.best(devices), 0
        return found, hybrid

    def _core_limit(self, pool: int, nodes: int) -> tuple[Limit | None, bool]:
        """Why a node of a core of so many lacks host memory, and whether it has enough for snapshots too."""
        work = msgspec.structs.replace(self._hosts.core, core_nodes=nodes)
        limit = self._pools[pool].room.limit(node_memory(self._shape, work))
        if limit is None or not (work.snapshots and self._hosts.optional):
            return limit, limit is None
        work = msgspec.structs.replace(work, snapshots=False)
        return self._pools[pool].room.limit(node_memory(self._shape, work)), False

    def _rolls_limit(self, pool: DevicePool, tp: int) -> Limit | None:
        """Why a node with engines of this degree lacks host memory."""
        work, devices = self._hosts.rolls, pool.node_devices
        own = msgspec.structs.replace(work, kv_bytes=work.kv_bytes * devices, engines=devices // tp)
        return pool.room.limit(node_memory(self._shape, own))

    def rest(self, have: Sequence[int], pool: int, nodes: int) -> list[int]:
        """Devices of each pool that roll out."""
        return [(n - (nodes if i == pool else 0)) * self._pools[i].node_devices for i, n in enumerate(have)]

    def lag(self, train_s: float) -> float:
        """Seconds that new prompts wait for the weights of a training step; 0 where they do not, or where measured
        times have it."""
        return train_s + self._update.way_s(self._widest) if self._gated and self._batch.eta > 0 else 0.0

    def batch_seconds(self, train_s: float, rollout_s: float, tp: int) -> float:
        """``train_s``: with the diff.  ``tp``: the least degree of the engines."""
        rollout_s += self._update.pause_s / tp
        return max(train_s, rollout_s) if self._batch.eta > 0 else train_s + self._update.way_s(tp) + rollout_s

    def rollout_seconds(self, devices: Sequence[int], lag: float) -> float:
        """Least seconds of rollout on so many devices of each pool; infinite when impossible."""
        layout = self._layouts.best(devices, lag=lag)
        return math.inf if layout is None else layout.seconds

    def build(self, have: Sequence[int], pool: int, nodes: int) -> RunPlan | None:
        """The best plan with ``nodes`` training nodes of ``pool``; None when a stage is impossible."""
        choice, hybrid = self._trained(have, pool, nodes)
        if choice is None:
            return None
        lag = self.lag(choice.time.total + self._update_of(pool, nodes).diff_s)
        rollout = self._layouts.best(self.rest(have, pool, nodes), lag=lag)
        return None if rollout is None else self._plan(pool, nodes, hybrid, choice, rollout)

    def homogeneous(self, plan: RunPlan) -> list[RunPlan]:
        """The plan's training nodes beside every homogeneous fleet: one TP degree on each pool."""
        rest = self.rest([p.nodes for p in self._pools], plan.pool, plan.nodes)
        layouts = homogeneous_layouts(self._costs, rest, self._bins, self.lag(self._train_s(plan)))
        return [self._plan(plan.pool, plan.nodes, plan.hybrid, plan.train, layout) for layout in layouts]

    def layout_seconds(self, layout: RolloutLayout) -> float:
        """Seconds of a given layout without a wait for training."""
        return layout_seconds(self._costs, layout, self._bins)

    def with_rollout_seconds(self, plan: RunPlan, seconds: float, simulated: int) -> RunPlan:
        """``plan`` with the rollout seconds that so many simulated batches had."""
        whole = self.batch_seconds(self._train_s(plan), seconds, plan.rollout.least_tp)
        return msgspec.structs.replace(
            plan, rollout_s=seconds, seconds=whole, tokens_s=self._batch.tokens / whole, simulated=simulated
        )

    def _plan(self, pool: int, nodes: int, hybrid: int, choice: TrainChoice, rollout: RolloutLayout) -> RunPlan:
        update = self._update_of(pool, nodes)
        seconds = self.batch_seconds(choice.time.total + update.diff_s, rollout.seconds, rollout.least_tp)
        return RunPlan(
            pool=pool,
            nodes=nodes,
            train=choice,
            rollout=rollout,
            rollout_s=rollout.seconds,
            seconds=seconds,
            model_s=seconds,
            hybrid=hybrid,
            tokens_s=self._batch.tokens / seconds,
            snapshots=self._core_limit(pool, nodes)[1],
            update=update,
        )

    def excluded_classes(self) -> list[Excluded]:
        """Rollout classes that cannot serve the longest trajectories, nearest first."""
        found = []
        last = len(self._batch.lengths.bins) - 1
        for cost in self._costs:
            what = f"rollout TP{cost.tp} on {self._pools[cost.pool].device.name}"
            limit = cost.replica.limit(last)
            if limit is not None:
                found.append(Excluded(what, limit))
        return sorted(found, key=lambda e: e.limit.over)

    def _impossible(self, have: Sequence[int]) -> UserError:
        """The error when nothing fits: which stage, and what comes nearest."""
        devices = [n * p.node_devices for n, p in zip(have, self._pools, strict=True)]
        hosts = [limit for p in self._pools if (limit := self._rolls_limit(p, p.node_devices)) is not None]
        if len(hosts) == len(self._pools):
            return UserError(f"No node holds what rollout keeps there: {hosts[0].reason}.")
        if self._layouts.best(devices) is None:
            nearest = self.excluded_classes()
            why = (
                f"nearest: {nearest[0].what}, {nearest[0].limit.reason}"
                if nearest
                else "no TP divides both the node and the model"
            )
            return UserError(
                f"No rollout layout holds trajectories of {self._batch.lengths.longest_context:,} tokens; {why}."
            )
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
