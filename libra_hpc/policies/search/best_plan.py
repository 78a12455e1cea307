"""The best plan: how many nodes train, in which layout, and which TP classes roll out; exact for the cost models.

The objective is the seconds of one global batch: the slower stage with eta > 0, the sum with eta = 0. With eta > 0 new
prompts wait for a training step (``lag`` of `ReplicaCost.time`). The stages share the nodes and this wait, so each
number n of training nodes is searched per stage. Training uses nodes of one pool. New weights take the time of an
`UpdateTime`: diff is training, the pause is rollout, and what lies between is a wait for new weights.

With `InTurn`, nodes may serve both stages of every step in turn. Then the objective is training + rollout + switches,
whatever eta is: with eta > 0 unfinished trajectories go on after training.

- At most `ENUMERATED` nodes: every n is computed.
- More: branch and bound over intervals of n. The bound has the least training time there and rollout at its start.

`PlanResult.gap` is how far the best plan can be from the optimum.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from libra_hpc.errors import UserError
from libra_hpc.models.host_memory import HostUse, node_memory
from libra_hpc.models.memory import Limit
from libra_hpc.models.shapes import ModelShape
from libra_hpc.models.step_times.lookup import StepLookup, lookup
from libra_hpc.models.train_seconds import TrainCost, hidden_seconds
from libra_hpc.models.update_time import NO_UPDATE, UpdateTime
from libra_hpc.policies.costs.factors import NONE, Factors
from libra_hpc.policies.costs.lengths import BatchWork, Lengths
from libra_hpc.policies.costs.rollout_time import ReplicaCost, RolloutOptions

from .even_rollout_layout import EvenRolloutSearch, homogeneous_layouts, layout_seconds
from .node_count import NodeCountSearch
from .rollout_layout import ReplicaClass, RolloutLayout, RolloutSearch
from .run_plan import DevicePool, InTurn, PlanResult, RunPlan
from .train_layout import NO_HYBRID, Excluded, Hybrid, TrainChoice, TrainSearch, TrainSpace

ENUMERATED = 12
"""Nodes up to which every number of training nodes is computed: bounds save nothing there."""
ROLLOUT_TP = (1, 2, 4, 8)


class PlanSearch:
    """Cost tables of one model, batch and set of device kinds; `run` searches, also for other numbers of nodes.

    ``sorted_lengths``: the scheduler sends long trajectories to large TP; otherwise every replica gets a fair sample.
    ``gated``: with eta > 0 new prompts wait for a training step. With ``whole_nodes``, all replicas of a node have one
    TP degree, as in a run file. ``degrees`` are the TP degrees of rollout. The core fits without hybrid nodes, and a
    hybrid node by itself. With ``hosts``, each node has enough host memory. ``update``: of one training process, and of
    an engine of one GPU. ``in_turn``: the ways in which nodes may serve both stages.
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
        in_turn: Sequence[InTurn] = (),
    ) -> None:
        self._arguments: dict[str, Any] = {key: value for key, value in locals().items() if key != "self"}
        self._pools, self._batch, self._gated, self._hybrid = list(pools), batch, gated, hybrid
        self._in_turn = in_turn
        self._shape, self._hosts, self._update, self._group = shape, hosts, update, options.group
        self._train = [
            TrainSearch(
                TrainCost(shape, p.device, p.node_devices, batch.training, factors.train), p.node_devices, space
            )
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
        shared = [plan for pool in pools for plan in self.in_turn(have, pool)]
        plans, study = _ranked((*found.values(), *shared))
        best = plans[0]
        lag = self._lag_of(best)
        whole = self._alone([n * p.node_devices for n, p in zip(have, self._pools, strict=True)], lag)
        fastest = {pool: tp for _, pool, tp in sorted(((s, pool, tp) for pool, tp, s in whole), reverse=True)}
        return PlanResult(
            plans=tuple(plans[:keep]),
            bound=min(*bounds, best.seconds),
            excluded=(
                *self._train[best.pool].excluded(best.nodes * self._pools[best.pool].node_devices),
                *self.excluded_classes(),
            ),
            alone=tuple(self._alone(self._rolling(have, best), lag)),
            spare=tuple(fastest.get(pool, 0) for pool in range(len(have))),
            straggler=self._layouts.straggler(),
            sources=tuple(dict.fromkeys(c.replica.source for c in self._layouts.costs)),
            study=study,
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
        # All of training but its last portion may be hidden.
        if (bound := self.batch_seconds(train, 0.0, self._widest)) >= best:
            return bound
        rollout = self.rollout_seconds(self.rest(have, pool, low), self.lag(train))
        hidden = min(train, rollout) if self._batch.streamed else 0.0
        return self.batch_seconds(train, rollout, self._widest, hidden)

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

    def _lag_of(self, plan: RunPlan) -> float:
        return 0.0 if plan.in_turn else self.lag(plan.train.time.total + plan.update.diff_s)

    def batch_seconds(
        self, train_s: float, rollout_s: float, tp: int, hidden_s: float = 0.0, in_turn: InTurn | None = None
    ) -> float:
        """``train_s``: with the diff.  ``tp``: the least degree of the engines.  ``hidden_s``: of training."""
        rollout_s += self._update.pause_s / tp
        if in_turn is not None:
            return train_s + rollout_s + in_turn.switch_s
        return max(train_s, rollout_s) if self._batch.eta else train_s - hidden_s + self._update.way_s(tp) + rollout_s

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

    def in_turn(self, have: Sequence[int], pool: int) -> list[RunPlan]:
        """The best plan of each way in which nodes of ``pool`` may serve both stages."""
        most, found = self._most(have, pool), list[RunPlan]()
        for way in self._in_turn:
            plans = (self._in_turn_with(have, pool, n, way) for n in {*range(1, min(most, ENUMERATED) + 1), most})
            found += sorted((p for p in plans if p is not None), key=lambda p: (p.seconds, p.nodes))[:1]
        return found

    def _in_turn_with(self, have: Sequence[int], pool: int, nodes: int, way: InTurn) -> RunPlan | None:
        """With a core of ``nodes``; all others train beside it, but one that rolls out only."""
        world = self._hybrid.world
        worlds = (self._most(have, pool) - nodes) // world
        if not (worlds or way.core_rolls) or self._core_limit(pool, nodes)[0] is not None:
            return None
        devices = nodes * self._pools[pool].node_devices
        choice = self._train[pool].best(devices, elastic=world if worlds else 0, worlds=worlds)
        rollout = self._layouts.best(self.rest(have, pool, 0 if way.core_rolls else nodes))
        if choice is None or rollout is None:
            return None
        return self._plan(pool, nodes, worlds * world, choice, rollout, way)

    def homogeneous(self, plan: RunPlan) -> list[RunPlan]:
        """The plan's training nodes beside every homogeneous fleet: one TP degree on each pool."""
        devices = self._rolling([p.nodes for p in self._pools], plan)
        layouts = homogeneous_layouts(self._costs, devices, self._bins, self._lag_of(plan))
        return [self._plan(plan.pool, plan.nodes, plan.hybrid, plan.train, layout, plan.in_turn) for layout in layouts]

    def _rolling(self, have: Sequence[int], plan: RunPlan) -> list[int]:
        """Devices of each pool that roll out."""
        return self.rest(have, plan.pool, have[plan.pool] - plan.rolls(have[plan.pool]))

    def layout_seconds(self, layout: RolloutLayout) -> float:
        """Seconds of a given layout without a wait for training."""
        return layout_seconds(self._costs, layout, self._bins)

    def portion(self, plan: RunPlan) -> int:
        """Groups that are trained together as soon as they are complete; 0: batches are trained whole."""
        groups = self._batch.trajectories // self._group
        length = math.ceil(self._train[plan.pool].portion(plan.train.layout) / self._group)
        return length if self._batch.streamed and not plan.in_turn and 2 * length <= groups else 0

    def with_rollout_seconds(self, plan: RunPlan, batches: Sequence[tuple[float, float]]) -> RunPlan:
        """``plan`` with the mean of simulated batches: seconds of rollout, and those of training beside it."""
        rollout_s, hidden_s = (statistics.fmean(column) for column in zip(*batches, strict=True))
        return self._timed(plan, rollout_s, hidden_s, simulated=len(batches))

    def _timed(self, plan: RunPlan, rollout_s: float, hidden_s: float, **changes: Any) -> RunPlan:
        train_s = plan.train.time.total + plan.update.diff_s
        seconds = self.batch_seconds(train_s, rollout_s, plan.rollout.least_tp, hidden_s, plan.in_turn)
        own = {"rollout_s": rollout_s, "hidden_s": hidden_s, "seconds": seconds, **changes}
        return msgspec.structs.replace(plan, tokens_s=self._batch.tokens / seconds, **own)

    def _plan(
        self,
        pool: int,
        nodes: int,
        hybrid: int,
        choice: TrainChoice,
        rollout: RolloutLayout,
        in_turn: InTurn | None = None,
    ) -> RunPlan:
        plan = RunPlan(
            pool=pool,
            nodes=nodes,
            train=choice,
            rollout=rollout,
            hybrid=hybrid,
            snapshots=self._core_limit(pool, nodes)[1],
            in_turn=in_turn,
        )
        plan = msgspec.structs.replace(plan, update=self._update_of(pool, plan.trains))
        plan = self._timed(plan, rollout.seconds, self._hidden_s(plan))
        return msgspec.structs.replace(plan, model_s=plan.seconds)

    def _hidden_s(self, plan: RunPlan) -> float:
        """Seconds of training beside rollout, by the cost models."""
        portion = self.portion(plan)
        if not portion:
            return 0.0
        costs = {(c.pool, c.tp): c.replica for c in self._costs}
        parts = [costs[s.pool, s.tp].ends(s.first, s.last, s.replicas) for s in plan.rollout.segments]
        slowest, whole = max(part[-1][0] for part in parts), sum(share for part in parts for _, share in part)
        scale = plan.rollout.seconds / slowest
        ends = sorted((scale * end, share / whole) for part in parts for end, share in part)
        return hidden_seconds(plan.train.time.total, plan.rollout.seconds, ends, portion * self._group)

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


def _ranked(plans: Sequence[RunPlan]) -> tuple[list[RunPlan], RunPlan | None]:
    """Return the plans that this version runs, best first, and the best of the others."""
    ordered = sorted(plans, key=lambda p: (p.seconds, p.train.time.total + p.rollout.seconds))
    return [plan for plan in ordered if plan.runs], next((plan for plan in ordered if not plan.runs), None)
