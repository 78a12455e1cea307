"""Rollout seconds by number of nodes, from the cost model and the lengths of the running workload.

Even division by nodes is right only while every slot is in use. Otherwise a batch waits for steps that hardly get
shorter, and for its longest trajectories. `RolloutByNodes` gives

- `ratio`: seconds on one number of nodes over another; the model's absolute error cancels.
- `unthrottled`: seconds of a rollout that trainers hold up, times the median of measured over model seconds while
  trainers waited.

Unlike a plan before the run, it counts two more terms. A shared prompt costs once per engine that gets some of its
group. Each weight update computes the running contexts again.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import msgspec

from libra_hpc.models.devices import Device
from libra_hpc.models.shapes import ModelShape
from libra_hpc.models.step_times.lookup import StepLookup, lookup
from libra_hpc.policies.costs.lengths import BatchWork, TrajectoryLengths, sketch
from libra_hpc.policies.costs.rollout_time import ReplicaCost, RolloutOptions
from libra_hpc.policies.search.rollout_layout import ReplicaClass, assign
from libra_hpc.protocol.plan import PlanSnapshot, TrajectoryFact

from .stage_times import Correction, Split

MAX_FACTORS = 8
"""Newest measured factors; their median counts."""
MODEL_ERROR = 0.05
"""Relative standard error of the model's result."""
SAME_LENGTHS = 0.01
"""Relative difference of mean lengths that changes no decision."""


class NodeEngines(msgspec.Struct, frozen=True):
    shape: ModelShape
    device: Device
    engines: tuple[tuple[int, int], ...]
    """(TP, engines) of each node that may roll out, in rank order; the last nodes stay when others train. One entry
    stands for all nodes."""
    options: RolloutOptions = RolloutOptions()

    def replicas(self, tp: int, nodes: int) -> int:
        """Engines of a TP degree when so many nodes roll out."""
        each = self.engines * nodes if len(self.engines) == 1 else self.engines[max(0, len(self.engines) - nodes) :]
        return sum(count for degree, count in each if degree == tp)


class RolloutByNodes:
    """Observe the trajectories of the present workload, then read `seconds`."""

    def __init__(self, node: NodeEngines, steps: StepLookup = lookup) -> None:
        self._node, self._steps = node, steps
        self._classes: list[ReplicaClass] = []
        self._bins = 0
        self._newest = (-1, -1)
        self._totals = (0, 0, 0)
        self._cache: dict[int, float | None] = {}
        self._factors: list[float] = []

    def observe(self, snapshot: PlanSnapshot, since: float) -> None:
        """Take the trajectories after ``since``; rebuild the model per batch of them."""
        size = snapshot.prompts_per_step * snapshot.group_size
        done = [t for t in snapshot.trajectories if t.at > since and t.generated > 0]
        mark = (done[0].index, done[-1].index // size) if done else (-1, -1)
        if not done or mark == self._newest:
            return
        self._build(snapshot, done)
        self._newest = mark

    def observe_trajectories(self, snapshot: PlanSnapshot, done: Sequence[TrajectoryFact]) -> None:
        """Take ``done``, not empty; rebuild the model when their means change by more than `SAME_LENGTHS`."""
        mark = (len(done), sum(t.context for t in done), sum(t.generated for t in done))
        if all(abs(new - old) <= SAME_LENGTHS * old for new, old in zip(mark, self._totals, strict=True)):
            return
        self._build(snapshot, done)
        self._totals = mark

    def _build(self, snapshot: PlanSnapshot, done: Sequence[TrajectoryFact]) -> None:
        self._newest, self._totals, self._cache = (-1, -1), (0, 0, 0), {}
        batch, node, options = batch_of(snapshot, done), self._node, self.options(snapshot)
        self._classes = [
            ReplicaClass(0, ReplicaCost(self._steps(node.device, node.shape, tp), batch, options))
            for tp in sorted({tp for tp, _ in node.engines})
        ]
        self._bins = len(batch.lengths.bins)

    def options(self, snapshot: PlanSnapshot) -> RolloutOptions:
        """Engine options of a run: groups share prompts."""
        return msgspec.structs.replace(self._node.options, group=snapshot.group_size)

    def seconds(self, nodes: int) -> float | None:
        """Model seconds of a global batch on so many nodes.

        None before trajectories were observed, and when no engine can hold them.
        """
        if nodes not in self._cache:
            self._cache[nodes] = self._least(nodes)
        return self._cache[nodes]

    def ratio(self, now: int, to: int) -> float:
        """Seconds on ``to`` nodes over those on ``now``; even division without a model."""
        here, there = self.seconds(now), self.seconds(to)
        return now / to if here is None or there is None else there / here

    def correction(self, there: Split, to: Split) -> Correction:
        """The model's seconds over those of even division, from one split to another."""
        return Correction(rollout=self.ratio(there.rollout, to.rollout) * to.rollout / there.rollout)

    def learn(self, nodes: int, measured: float) -> None:
        """Calibrate with ``measured`` seconds during which trainers waited."""
        model = self.seconds(nodes)
        if model:
            self._factors = [*self._factors, measured / model][-MAX_FACTORS:]

    def unthrottled(self, nodes: int) -> float | None:
        """Seconds that rollout would need if trainers did not hold it up."""
        model = self.seconds(nodes)
        return None if model is None else model * (median(self._factors) if self._factors else 1.0)

    def _least(self, nodes: int) -> float | None:
        counts = [self._node.replicas(one.tp, nodes) for one in self._classes]
        layout = assign(self._classes, counts, self._bins) if self._bins else None
        return None if layout is None else layout.seconds


def batch_of(
    snapshot: PlanSnapshot, done: Sequence[TrajectoryFact], minibatches: int = 1, forwards: int = 0
) -> BatchWork:
    """The global batch that the trajectories ``done``, not empty, stand for."""
    observed = []
    for t in done:
        # Without a prompt length, each turn counts as adding equally many tokens.
        prompt = t.prompt or max(1, (t.context - t.generated) // max(1, t.turns))
        observed.append(
            TrajectoryLengths(
                generated=max(1, t.generated),
                context=max(t.context, prompt + t.generated),
                prompt=prompt,
                turns=max(1, t.turns),
                tool_s=max(0.0, t.tool_s),
            )
        )
    trajectories = snapshot.prompts_per_step * snapshot.group_size
    return BatchWork(
        trajectories=trajectories,
        lengths=sketch(observed, trajectories, snapshot.eta),
        eta=snapshot.eta,
        minibatches=minibatches,
        forwards=forwards,
    )
