"""Seconds of both stages at the present split, from measured steps.

- Steady workload -> `stage_times.measure`. Where trainers hold up rollout, the cost model gives its free-running time.
- Lengths changed and no estimate yet -> the earlier measurement, rescaled to the new lengths.
"""

from __future__ import annotations

from math import inf

from libra_hpc.protocol.plan import PlanSnapshot, TrajectoryFact

from .change_detection import Drift, DriftDetector
from .rollout_by_nodes import MODEL_ERROR, RolloutByNodes
from .stage_times import Estimate, Split, measure, recent, with_new_lengths

CHANGING_STEPS = 32
"""Steps after a change whose times do not calibrate the cost model: four times `MAX_STEPS`."""
CLEARLY_SLOWER = 0.3
"""Share by which rollout must be the slower stage before the time between commits calibrates the cost model. If stages
alternate as the slower one, the mean time exceeds both."""


class StageEstimator:
    """Estimates both stages; `observe` every snapshot, then `estimate`."""

    def __init__(self, rollout_model: RolloutByNodes | None) -> None:
        self.drift: Drift | None = None
        """The last change that was detected."""
        self.lengths_changed_at = -inf
        """Time of the last change of lengths; earlier measurements are of another workload."""
        self.split_since = -inf
        self._model = rollout_model
        self._split: Split | None = None
        self._learned_at = -inf
        self._length_test: DriftDetector | None = None
        self._next_trajectory = 0

    def observe(self, snapshot: PlanSnapshot, now: float) -> bool:
        """Take in new trajectories and groups; return whether the workload changed."""
        if self._length_test is None:
            self._length_test = DriftDetector(snapshot.group_size, snapshot.prompts_per_step)
        fresh = [t for t in snapshot.trajectories if t.index >= self._next_trajectory]
        if not fresh:
            return False
        self._next_trajectory = fresh[-1].index + 1
        lengths = [(float(t.generated), float(t.context), float(t.turns), t.tool_s) for t in fresh]
        drift = self._length_test.update(lengths)
        if drift is not None:
            # The block in which the change was detected belongs to the new workload.
            block = snapshot.trajectories[-drift.count :]
            self.lengths_changed_at = block[0].at if drift.count <= len(snapshot.trajectories) else now
            self.drift = drift
        return drift is not None

    def set_split(self, split: Split, now: float) -> None:
        """Set the present split."""
        if split != self._split:
            self._split, self.split_since = split, now

    def estimate(self, snapshot: PlanSnapshot, split: Split) -> Estimate | str:
        """Both stages at this split for the present work, or a sentence that names what is missing."""
        begun = max(self.split_since, self.lengths_changed_at)
        measured = measure(snapshot, split, begun)
        if isinstance(measured, str):
            return self._rescaled(snapshot, split) or measured
        return self._with_cost_model(snapshot, measured, recent(snapshot, split, begun).done)

    def _with_cost_model(self, snapshot: PlanSnapshot, measured: Estimate, done: list[TrajectoryFact]) -> Estimate:
        """Replace a rollout time that trainers hold up by the cost model's; calibrate the model where trainers wait."""
        if self._model is None or snapshot.eta == 0:
            return measured
        self._model.observe_trajectories(snapshot, done)
        nodes, times, more = measured.split.rollout, measured.times, measured.rollout_nodes / measured.split.rollout
        if measured.starved:
            if (
                times.rollout > (1.0 + CLEARLY_SLOWER) * times.train
                and snapshot.steps[-1].at > self._learned_at
                and not self._changing(snapshot)
            ):
                self._model.learn(nodes, times.rollout * more)
                self._learned_at = snapshot.steps[-1].at
            return measured
        free = self._free(split=measured.split, lent=measured.lent)
        if free is None or free >= times.rollout:
            return measured
        error = max(measured.rollout_error, MODEL_ERROR)
        return measured._replace(times=times._replace(rollout=max(measured.straggler, free)), rollout_error=error)

    def _changing(self, snapshot: PlanSnapshot) -> bool:
        """Whether the lengths changed recently."""
        recent_steps = sum(s.at > self.lengths_changed_at for s in snapshot.steps)
        return self.lengths_changed_at > -inf and recent_steps < CHANGING_STEPS

    def _free(self, split: Split, lent: float) -> float | None:
        """The cost model's seconds if trainers do not hold rollout up, beside so many guests."""
        assert self._model is not None
        alone = self._model.unthrottled(split.rollout)
        return None if alone is None else alone * split.rollout / (split.rollout + lent)

    def _rescaled(self, snapshot: PlanSnapshot, split: Split) -> Estimate | None:
        """The measurement from before the change of lengths, rescaled to the new lengths."""
        if self._model is None or self.lengths_changed_at <= self.split_since:
            return None
        before = measure(snapshot, split, self.split_since)
        if isinstance(before, str):
            return None
        self._model.observe(snapshot, self.lengths_changed_at)
        return with_new_lengths(
            before, snapshot, since=self.lengths_changed_at, rollout=self._free(split, before.lent), error=MODEL_ERROR
        )
