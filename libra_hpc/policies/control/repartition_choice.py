"""Repartition: another layout of all nodes, for a lasting change that hybrid nodes cannot answer.

`policies.search` finds the best plan for the observed lengths. Both stages are first multiplied by measured over
predicted seconds of the running layout. Only the ratio of two layouts then rests on the models.

- The search runs twice: with the running parallelism (error `MODEL_ERROR`) and with any (error `LAYOUT_ERROR`).
- Gain over the horizon, less `ONE_SIDED_95` errors, at most ``margin`` times the cost -> no proposal.
- The cost is the restart plus the time to generate in-flight work again.
- A layout was proposed before, or a node is lost -> no proposal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import hypot
from typing import Any

import msgspec

from libra_hpc.config.rollout import PlannerSection
from libra_hpc.errors import UserError
from libra_hpc.models.memory import TrainLayout
from libra_hpc.models.shapes import ModelShape
from libra_hpc.models.step_times.lookup import StepLookup, lookup
from libra_hpc.models.train_seconds import HybridWorlds, TrainCost, hidden_seconds
from libra_hpc.policies.costs.factors import Factors
from libra_hpc.policies.costs.lengths import BatchWork
from libra_hpc.policies.costs.rollout_time import ReplicaCost, RolloutOptions
from libra_hpc.policies.search.layout_space import ROLLOUT_TP, LayoutSpace
from libra_hpc.policies.search.run_plan import DevicePool, RunPlan
from libra_hpc.policies.search.train_layout import NO_HYBRID, Hybrid, TrainSpace
from libra_hpc.protocol.plan import Candidate, PlanDecision, PlanSnapshot

from .rollout_by_nodes import MODEL_ERROR, NodeEngines, RolloutByNodes, batch_of
from .stage_times import ONE_SIDED_95, Estimate

EVERY_S = 3600.0
"""Seconds between two repartitions, at least. A restart costs minutes and all measurements; the next decision should
not rest on the first new ones."""
LAYOUT_ERROR = 0.1
"""Relative standard error of the model's ratio of two layouts whose engines or replicas differ. Measured in the
simulator: up to 25 % for long prompts that groups share."""
CANDIDATES = 5
"""Plans that a decision lists."""


class RunningLayout(msgspec.Struct, frozen=True):
    """The layout of a run."""

    core: TrainLayout
    core_nodes: int
    beside: int
    """Replicas of a world of hybrid nodes that trains."""
    engines: tuple[tuple[int, int], ...]
    """(TP, engines) of the nodes that may roll out, as `NodeEngines.engines`."""
    beside_nodes: int = 1
    """Nodes of that world."""


class RepartitionAdvisor:
    """Proposes layouts, each one once.

    ``run_file_values`` turns a plan into keys and values of the run file, or raises `UserError`. Without it, a
    proposal cannot be carried out.
    """

    def __init__(
        self,
        shape: ModelShape,
        pool: DevicePool,
        running: RunningLayout,
        *,
        space: TrainSpace = TrainSpace(),  # noqa: B008
        options: RolloutOptions = RolloutOptions(),  # noqa: B008
        hybrid: Hybrid = NO_HYBRID,
        minibatches: int = 1,
        forwards: int = 0,
        steps: StepLookup = lookup,
        run_file_values: Callable[[RunPlan], dict[str, Any]] | None = None,
    ) -> None:
        self._shape, self._pool, self._running = shape, pool, running
        self._space, self._options, self._hybrid, self._steps = space, options, hybrid, steps
        self._minibatches, self._forwards = minibatches, forwards
        self._run_file_values = run_file_values
        core = running.core
        self._own = msgspec.structs.replace(space, tp=(core.tp,), pp=(core.pp,), cp=(core.cp,), ep=(core.ep,))
        self._model = RolloutByNodes(NodeEngines(shape, pool.device, running.engines, options), steps)
        self._proposed: set[str] = set()

    def advise(
        self, snapshot: PlanSnapshot, estimate: Estimate, since: float, horizon: float, settings: PlannerSection
    ) -> PlanDecision | None:
        """A new proposal that passes the test, else None.

        ``since`` is when the present workload began; ``horizon`` is in seconds.
        """
        done = [t for t in snapshot.trajectories if t.at > since and t.generated > 0]
        # A restart needs every node.
        if not done or any(node.role == "lost" for node in snapshot.nodes):
            return None
        batch = batch_of(snapshot, done, self._minibatches, self._forwards)
        self._model.observe(snapshot, since)
        factors = self._factors(estimate, batch)
        if factors is None:
            return None
        try:
            found, share = self._best(snapshot, batch, factors, estimate)
            changes = self._run_file_values(found[0]) if self._run_file_values else {}
        except UserError:
            return None  # Nothing fits these lengths; the run itself reports it.
        best, now = found[0], estimate.times.batch
        again = estimate.times.rollout * sum(group.generated for group in snapshot.groups) / estimate.rollout_tokens
        needed = settings.margin * (settings.repartition_cost_s + again)
        layout = describe(best, self._pool)
        if share < settings.min_gain or horizon * share <= needed or layout in self._proposed:
            return None
        self._proposed.add(layout)
        candidates = tuple(
            Candidate(
                train=p.nodes,
                rollout=self._pool.nodes - p.nodes,
                train_s=p.train.time.total,
                rollout_s=p.rollout_s,
                batch_s=p.seconds,
                gain_s=horizon * (1.0 - p.seconds / now),
                needed_s=needed,
                layout=describe(p, self._pool),
            )
            for p in found
        )
        reason = (
            f"repartition: at the next step boundary, {layout} instead of"
            f" {estimate.split.train}+{estimate.split.rollout} nodes in the present layout takes a batch from {now:.2f}"
            f" s to {best.seconds:.2f} s; that is {share:.0%} at least, and {horizon * share:.0f} s over the horizon,"
            f" more than {settings.margin:.1f} x {settings.repartition_cost_s + again:.1f} s:"
            f" {settings.repartition_cost_s:.1f} for the restart, {again:.1f} to generate in-flight work again"
        )
        numbers = {
            "train_s": estimate.times.train,
            "rollout_s": estimate.times.rollout,
            "batch_s": now,
            "after_s": best.seconds,
            "pays_s": horizon * share,
            "again_s": again,
            "needed_s": needed,
            "train_factor": factors.train,
            "rollout_factor": factors.decode,
        }
        return PlanDecision("repartition", -1, reason, numbers, candidates=candidates, layout=layout, changes=changes)

    def _best(
        self, snapshot: PlanSnapshot, batch: BatchWork, factors: Factors, estimate: Estimate
    ) -> tuple[list[RunPlan], float]:
        """The plans with the largest sure gain, and that gain as a share of a batch. Raises `UserError` when nothing
        fits."""

        def search(space: TrainSpace, degrees: Sequence[int], error: float) -> tuple[list[RunPlan], float]:
            options = self._model.options(snapshot)
            layouts = LayoutSpace(
                self._shape,
                [self._pool],
                batch,
                group=options.group,
                longest=options.max_model_len,
                space=space,
                factors=factors,
                degrees=degrees,
                hybrid=self._hybrid,
                steps=self._steps,
            )
            costs = {
                kind.steps.tp: ReplicaCost(kind.steps, batch, options, factors)
                for kind in layouts.kinds
                if kind.limit is None
            }
            have = [self._pool.nodes]
            timed = (by_models(plan, batch, costs, layouts.portion(plan)) for plan in layouts.plans(have, 0))
            found = best_of_splits(timed)
            if not found:
                raise layouts.impossible(have)
            errors = ONE_SIDED_95 * hypot(estimate.train_error, estimate.rollout_error, error)
            return found, 1.0 - found[0].seconds / estimate.times.batch - errors

        # Raises `UserError` where nothing at all fits.
        free = search(self._space, ROLLOUT_TP, LAYOUT_ERROR)
        try:
            same = search(self._own, sorted({tp for tp, _ in self._running.engines}), MODEL_ERROR)
        except UserError:
            return free
        return max(same, free, key=lambda pair: pair[1])

    def _factors(self, estimate: Estimate, batch: BatchWork) -> Factors | None:
        """Measured over predicted seconds of the running layout; None when the models cannot hold it."""
        pool, running = self._pool, self._running
        cost = TrainCost(self._shape, pool.device, pool.node_devices, batch.training)
        others = max(0, estimate.split.train - running.core_nodes) // running.beside_nodes
        trains = cost.time(running.core, HybridWorlds(others, running.beside))
        rollout = self._model.seconds(estimate.split.rollout)
        if rollout is None:
            return None
        train, generate = estimate.times.train / trains.total, estimate.times.rollout / rollout
        return Factors(prefill=generate, decode=generate, tool=generate, train=train)


def by_models(plan: RunPlan, batch: BatchWork, costs: Mapping[int, ReplicaCost], portion: int) -> RunPlan:
    """``plan`` with its seconds by the cost models; ``costs``: by TP degree; ``portion``: groups."""
    (engines,), train_s, last = plan.engines, plan.train.time.total, len(batch.lengths.bins) - 1
    cost = costs[engines.tp]
    rollout_s, hidden_s = cost.time(0, last, engines.replicas), 0.0
    if portion:
        ends = cost.ends(0, last, engines.replicas)
        scale = rollout_s / ends[-1][0]
        ends = [(scale * end, share) for end, share in ends]
        hidden_s = hidden_seconds(train_s, rollout_s, ends, portion * cost.group)
    seconds = max(train_s, rollout_s) if batch.eta else train_s - hidden_s + rollout_s
    return msgspec.structs.replace(plan, rollout_s=rollout_s, hidden_s=hidden_s, seconds=seconds)


def best_of_splits(plans: Iterable[RunPlan]) -> list[RunPlan]:
    """The fastest plan of each number of training nodes, the best first; at most `CANDIDATES`."""
    found: dict[int, RunPlan] = {}
    for plan in sorted(plans, key=lambda plan: (plan.seconds, plan.train.time.total + plan.rollout_s)):
        found.setdefault(plan.nodes, plan)
    return list(found.values())[:CANDIDATES]


def describe(plan: RunPlan, pool: DevicePool) -> str:
    """A plan in words: nodes, training layout, rollout engines."""
    engines = ", ".join(f"{s.replicas}xTP{s.tp}" for s in plan.engines)
    return (
        f"{plan.nodes} nodes of {pool.node_devices} train with {plan.train.layout}, {pool.nodes - plan.nodes} roll out"
        f" with {engines}"
    )
