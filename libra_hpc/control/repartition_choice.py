"""The second tier: another layout of the core nodes, when the workload has changed for good and roles of hybrid nodes
no longer answer it.

The exact search (`search`) is asked for the best plan on all nodes with the lengths just observed.  Its cost models are
first put right: one factor for training and one for rollout, measured over predicted seconds *of the layout that runs*,
so that what the models get wrong about machine and engine is the same on both sides of the comparison.  What remains is
the ratio of two layouts under one model.

It is searched twice: with the parallelism that runs, where only numbers of nodes change and the models are off by
`MODEL_ERROR` = 5 %, and with any. Between different TP degrees `LAYOUT_ERROR` = 10 % was found (18 engines of TP2 were
up to 25 % slower in the simulator than the model's ratio to 9 of TP4 said, with long prompts that groups share); a
change of engines has to promise that much more.

A proposal goes through the test of every move: seconds saved over the horizon, less `ERRORS` = 1.645 standard errors of
the measured times and of the model, against ``margin`` times the cost.  That is the new start and what is lost by it:
trajectories that run begin again, so what they have generated so far is generated twice.  It is far higher than a
node's, so only a lasting shift pays; each proposal is made once.

`EVERY_S`: at most one in an hour, whatever it promises.  A new start costs minutes and, worse, what was measured: the
engines' costs, the factors of the cost models and the test for drift begin anew, and the next verdict should rest on
more than their first figures.  Where nodes can change places, a proposal also says what the run file would say
(`libra_hpc.planning.initial.run_file_values`), and `libra_hpc.runtime.repartitioner` can carry it out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import hypot
from typing import Any

import msgspec

from libra_hpc.config.rollout import PlannerSection
from libra_hpc.cost_models.factors import Factors
from libra_hpc.cost_models.rollout_by_nodes import MODEL_ERROR, NodeEngines, RolloutByNodes, batch_of
from libra_hpc.cost_models.rollout_time import RolloutOptions
from libra_hpc.cost_models.training_time import BatchWork, TrainCost
from libra_hpc.errors import UserError
from libra_hpc.hardware.lookup import StepLookup, lookup
from libra_hpc.hardware.models import ModelShape
from libra_hpc.protocol.plan import Candidate, PlanDecision, PlanSnapshot
from libra_hpc.search.best_plan import ROLLOUT_TP, DevicePool, PlanResult, PlanSearch, RunPlan
from libra_hpc.search.train_layout import TrainSearch, TrainSpace

from .stage_times import Estimate

EVERY_S = 3600.0
ERRORS = 1.645
LAYOUT_ERROR = 0.1
"""Relative standard error of the ratio of two layouts whose engines or replicas differ."""
KEPT = 5


class RunningLayout(msgspec.Struct, frozen=True):
    """The layout of a run: every training node alike."""

    tp: int
    pp: int
    """Of a training replica, which lies within a node."""
    recompute: bool
    engines: tuple[tuple[int, int], ...]
    """(TP, engines) of the nodes that may roll out, as `NodeEngines.engines`."""


class RepartitionAdvisor:
    """Asked by the planner; remembers what it answered.

    ``words`` says a result in keys and values of the run file, or raises `UserError` where it cannot; None: proposals
    are advice alone.
    """

    def __init__(
        self,
        shape: ModelShape,
        pool: DevicePool,
        running: RunningLayout,
        *,
        space: TrainSpace = TrainSpace(),  # noqa: B008
        options: RolloutOptions = RolloutOptions(),  # noqa: B008
        minibatches: int = 1,
        forwards: int = 0,
        steps: StepLookup = lookup,
        sorted_lengths: bool = True,
        words: Callable[[PlanResult], dict[str, Any]] | None = None,
    ) -> None:
        self._shape, self._pool, self._running = shape, pool, running
        self._space, self._options, self._steps = space, options, steps
        self._minibatches, self._forwards = minibatches, forwards
        self._sorted, self._words = sorted_lengths, words
        self._own = msgspec.structs.replace(space, tp=(running.tp,), pp=(running.pp,), cp=(1,), ep=(1,))
        self._model = RolloutByNodes(NodeEngines(shape, pool.device, running.engines, options), steps)
        self._proposed: set[str] = set()

    def advise(
        self, snapshot: PlanSnapshot, measured: Estimate, since: float, horizon: float, settings: PlannerSection
    ) -> PlanDecision | None:
        """A proposal that passes the test and was not made before, else None, also where a node is lost.

        ``since`` is when the present workload began; ``horizon`` in seconds.
        """
        done = [t for t in snapshot.trajectories if t.at > since and t.generated > 0]
        # A new start needs every node.
        if not done or any(node.role == "lost" for node in snapshot.nodes):
            return None
        batch = batch_of(snapshot, done, self._minibatches, self._forwards)
        self._model.observe(snapshot, since)
        factors = self._factors(measured, batch)
        if factors is None:
            return None
        try:
            found, share = self._best(snapshot, batch, factors, measured)
            changes = self._words(found) if self._words else {}
        except UserError:
            return None  # nothing fits these lengths: no advice, and the run itself will say so
        best, now = found.plans[0], measured.times.batch
        again = measured.times.rollout * sum(group.generated for group in snapshot.groups) / measured.rollout_tokens
        needed = settings.margin * (settings.repartition_cost_s + again)
        layout = describe(best, self._pool)
        if share < settings.min_gain or horizon * share <= needed or layout in self._proposed:
            return None
        self._proposed.add(layout)
        candidates = tuple(
            Candidate(
                p.nodes,
                self._pool.nodes - p.nodes,
                p.train.time.total,
                p.rollout.seconds,
                p.seconds,
                horizon * (1.0 - p.seconds / now),
                needed,
                describe(p, self._pool),
            )
            for p in found.plans
        )
        reason = (
            f"repartition: at the next step boundary, {layout} instead of"
            f" {measured.split.train}+{measured.split.rollout} nodes as they are laid out takes a batch from {now:.2f}"
            f" s to {best.seconds:.2f} s; that is {share:.0%} at least, and {horizon * share:.0f} s over the horizon,"
            f" more than {settings.margin:.1f} x {settings.repartition_cost_s + again:.1f} s:"
            f" {settings.repartition_cost_s:.1f} for a new start, {again:.1f} for what is generated again"
        )
        numbers = {
            "train_s": measured.times.train,
            "rollout_s": measured.times.rollout,
            "batch_s": now,
            "after_s": best.seconds,
            "pays_s": horizon * share,
            "again_s": again,
            "needed_s": needed,
            "train_factor": factors.compute,
            "rollout_factor": factors.decode,
        }
        return PlanDecision("repartition", -1, reason, numbers, candidates=candidates, layout=layout, changes=changes)

    def _best(
        self, snapshot: PlanSnapshot, batch: BatchWork, factors: Factors, measured: Estimate
    ) -> tuple[PlanResult, float]:
        """The plans whose best one surely saves the most, and the share of a batch that is at least.  Raises
        `UserError` when nothing fits."""

        def search(space: TrainSpace, degrees: Sequence[int], error: float) -> tuple[PlanResult, float]:
            found = PlanSearch(
                self._shape,
                [self._pool],
                batch,
                space=space,
                options=self._model.options(snapshot),
                factors=factors,
                steps=self._steps,
                sorted_lengths=self._sorted,
                whole_nodes=True,
                degrees=degrees,
            ).run(KEPT, trainers=(0,))
            errors = ERRORS * hypot(measured.train_error, measured.rollout_error, error)
            return found, 1.0 - found.plans[0].seconds / measured.times.batch - errors

        # Where nothing at all fits, this one says so.
        free = search(self._space, ROLLOUT_TP, LAYOUT_ERROR)
        try:
            same = search(self._own, sorted({tp for tp, _ in self._running.engines}), MODEL_ERROR)
        except UserError:
            return free
        return max(same, free, key=lambda pair: pair[1])

    def _factors(self, measured: Estimate, batch: BatchWork) -> Factors | None:
        """Measured over predicted seconds of the present layout; None when the models cannot hold it."""
        pool, running = self._pool, self._running
        own = msgspec.structs.replace(self._own, recompute=(running.recompute,))
        choice = TrainSearch(
            TrainCost(self._shape, pool.device, pool.node_devices, batch), pool.node_devices, own
        ).best(measured.split.train * pool.node_devices)
        rollout = self._model.seconds(measured.split.rollout)
        if choice is None or rollout is None:
            return None
        train, generate = measured.times.train / choice.time.total, measured.times.rollout / rollout
        return Factors(prefill=generate, decode=generate, tool=generate, compute=train, comm=train, optimizer=train)


def describe(plan: RunPlan, pool: DevicePool) -> str:
    """A plan in words: nodes, training layout, rollout classes."""
    engines = ", ".join(f"{s.replicas}xTP{s.tp}" for s in plan.rollout.segments)
    return (
        f"{plan.nodes} nodes of {pool.node_devices} train with {plan.train.layout}, {pool.nodes - plan.nodes} roll out"
        f" with {engines}"
    )
