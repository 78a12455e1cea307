"""How rollout seconds change with nodes, by the cost model: for runs on devices the project knows.

Dividing a measured time evenly by nodes is right while every seat is taken.  Otherwise a batch waits for steps that
hardly get shorter with fewer sequences, and for its longest trajectories.  `rollout.ReplicaCost` knows that from
step-time tables and the lengths just seen; from it come

* the *ratio* of two numbers of nodes, which is applied to the measured time (`scaling`), so that the model's absolute
  error cancels;
* the seconds of a rollout that the trainers hold up.  Its engines run small batches and look as slow as the loop; what
  they could do shows only while trainers wait for them.  The quotient of measured and model seconds at such times is
  kept (median of `KEPT` = 8) and used when they do not; 1 before the first.

Unlike a plan before the run the model counts a group's prompt once per engine that gets some of the group, and the
contexts that every weight update has computed again: where prompts are long that is most of the work, three times as
much at nine nodes as at two.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import msgspec

from libra_hpc.hardware.devices import Device
from libra_hpc.hardware.lookup import StepLookup, lookup
from libra_hpc.hardware.models import ModelShape
from libra_hpc.protocol.plan import PlanSnapshot, TrajectoryFact

from .lengths import TrajectoryLengths, sketch
from .rollout_time import ReplicaCost, RolloutOptions
from .training_time import BatchWork

KEPT = 8
MODEL_ERROR = 0.05
"""Relative standard error of what comes from the model."""
CLOSE = 1e-3
SAME = 0.01
"""Relative difference of mean lengths that changes no decision."""


class NodeEngines(msgspec.Struct, frozen=True):
    """What runs on rollout nodes."""

    shape: ModelShape
    device: Device
    engines: tuple[tuple[int, int], ...]
    """(TP, engines) of every node that may roll out, in rank order, so that the last ones stay when others train;
    one entry stands for all of them."""
    options: RolloutOptions = RolloutOptions()

    def replicas(self, tp: int, nodes: int) -> int:
        """Engines of a TP degree when so many nodes roll out."""
        each = self.engines * nodes if len(self.engines) == 1 else self.engines[max(0, len(self.engines) - nodes) :]
        return sum(count for degree, count in each if degree == tp)


class RolloutByNodes:
    """`observe` the trajectories of the present workload, then ask for `seconds`."""

    def __init__(self, node: NodeEngines, steps: StepLookup = lookup) -> None:
        self._node, self._steps = node, steps
        self._classes: list[ReplicaCost] = []
        self._last = 0
        self._seen = (-1, -1)
        self._work = (0, 0, 0)
        self._cache: dict[int, float | None] = {}
        self._factors: list[float] = []

    def observe(self, snapshot: PlanSnapshot, since: float) -> None:
        """Take the lengths of the trajectories after ``since``; built anew once a batch of them came in."""
        size = snapshot.prompts_per_step * snapshot.group_size
        done = [t for t in snapshot.trajectories if t.at > since and t.generated > 0]
        mark = (done[0].index, done[-1].index // size) if done else (-1, -1)
        if not done or mark == self._seen:
            return
        self._build(snapshot, done)
        self._seen = mark

    def observe_work(self, snapshot: PlanSnapshot, done: Sequence[TrajectoryFact]) -> None:
        """Take the lengths of ``done``, not empty; built anew when their means moved by more than `SAME`."""
        mark = (len(done), sum(t.context for t in done), sum(t.generated for t in done))
        if all(abs(new - old) <= SAME * old for new, old in zip(mark, self._work, strict=True)):
            return
        self._build(snapshot, done)
        self._work = mark

    def _build(self, snapshot: PlanSnapshot, done: Sequence[TrajectoryFact]) -> None:
        self._seen, self._work, self._cache = (-1, -1), (0, 0, 0), {}
        batch = batch_of(snapshot, done)
        node = self._node
        options = self.options(snapshot)
        classes = [
            ReplicaCost(self._steps(node.device, node.shape, tp), batch, options)
            for tp in sorted({tp for tp, _ in node.engines})
        ]
        self._classes = sorted((c for c in classes if c.kv_capacity > 0), key=lambda c: c.latency)
        self._last = len(batch.lengths.bins) - 1

    def options(self, snapshot: PlanSnapshot) -> RolloutOptions:
        """How the engines run, with what only a run knows: groups share their prompts, and every step brings new
        weights."""
        return msgspec.structs.replace(self._node.options, group=snapshot.group_size, updates=1)

    def seconds(self, nodes: int) -> float | None:
        """Of a global batch on so many rollout nodes, by the model alone; None before trajectories were seen, or
        when none of the engines holds them."""
        if nodes not in self._cache:
            self._cache[nodes] = self._least(nodes)
        return self._cache[nodes]

    def ratio(self, now: int, to: int) -> float:
        """Seconds on ``to`` nodes over those on ``now``; even division where the model is silent."""
        here, there = self.seconds(now), self.seconds(to)
        return now / to if here is None or there is None else there / here

    def learn(self, nodes: int, measured: float) -> None:
        """``measured`` seconds while trainers waited."""
        model = self.seconds(nodes)
        if model:
            self._factors = [*self._factors, measured / model][-KEPT:]

    def unthrottled(self, nodes: int) -> float | None:
        """What rollout would need if nothing held it up."""
        model = self.seconds(nodes)
        return None if model is None else model * (median(self._factors) if self._factors else 1.0)

    def _least(self, nodes: int) -> float | None:
        """The least time in which the classes, the fastest with the longest trajectories, take all bins."""
        classes = [(cost, count) for cost in self._classes if (count := self._node.replicas(cost.tp, nodes))]
        if not any(cost.fits(self._last) for cost, _ in classes):
            return None
        if len(classes) == 1:
            cost, count = classes[0]
            return cost.time(0, self._last, count)
        high = 1.0
        while not self._within(high, classes):
            high *= 2.0
        low = 0.0
        while high - low > CLOSE * high:
            middle = (low + high) / 2.0
            low, high = (low, middle) if self._within(middle, classes) else (middle, high)
        return high

    def _within(self, seconds: float, classes: Sequence[tuple[ReplicaCost, int]]) -> bool:
        left = self._last
        for cost, count in classes:
            first = left + 1
            while first > 0 and cost.time(first - 1, left, count) <= seconds:
                first -= 1
            left = first - 1
        return left < 0


def batch_of(
    snapshot: PlanSnapshot, done: Sequence[TrajectoryFact], minibatches: int = 1, forwards: int = 0
) -> BatchWork:
    """The global batch that ``done``, not empty, says is being trained on."""
    observed = []
    for t in done:
        # Where the facts do not tell them apart, prompt and tool results count alike.
        prompt = t.prompt or max(1, (t.context - t.generated) // max(1, t.turns))
        observed.append(
            TrajectoryLengths(
                max(1, t.generated), max(t.context, prompt + t.generated), prompt, max(1, t.turns), max(0.0, t.tool_s)
            )
        )
    trajectories = snapshot.prompts_per_step * snapshot.group_size
    return BatchWork(trajectories, sketch(observed, trajectories), snapshot.eta, minibatches, forwards)
