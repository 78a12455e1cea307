"""Seconds of both stages at the present split, from measured steps or, while the workload changes, from in-flight work.

- Steady workload -> `stage_times.measure`. Where trainers hold up rollout, the cost model gives its free-running time.
- Workload changed within `CHANGING_STEPS` steps, and there is a cost model -> `InFlightEstimator`.
  Training takes the tokens in flight times the last measured time per token. Rollout takes the cost model's time.
- First steps at a new split differ from that by more than `AGREEMENT` -> measure first.
- Start of a run, with a cost model -> `FIRST_STEPS` steps that agree are enough to leave a bad first split.
- Lengths changed and no estimate yet -> the earlier measurement, rescaled to the new lengths.
"""

from __future__ import annotations

from math import hypot, inf
from statistics import median

from msgspec.structs import replace

from libra_hpc.protocol.plan import PlanSnapshot, TrainStepFact, TrajectoryFact

from .change_detection import Drift, DriftDetector
from .in_flight import InFlightEstimator, InFlightWork
from .node_scaling import NodeScaling
from .rollout_by_nodes import MODEL_ERROR, RolloutByNodes
from .stage_times import (
    MAX_STEPS,
    Estimate,
    Split,
    Times,
    batch_scatter,
    lent_nodes,
    measure,
    recent,
    sampling_error,
    with_new_lengths,
)

CHANGING_STEPS = 32
"""Steps after a change in which in-flight work replaces measurements: four times `MAX_STEPS`."""
IN_FLIGHT_ERROR = 0.03
"""Relative standard error of a time from in-flight work: that of the model between numbers of nodes."""
AGREEMENT = 0.15
"""Largest relative difference of steps that count as equal."""
CLEARLY_SLOWER = 0.3
"""Share by which rollout must be the slower stage before the time between commits calibrates the cost model. If stages
alternate as the slower one, the mean time exceeds both."""
FIRST_STEPS = 2
"""Steps of a new run that must agree per token."""
PROMPT_QUANTITY = 4
"""`Drift.quantity` of a change of prompts."""


class StageEstimator:
    """Estimates both stages; `observe` every snapshot, then `estimate`."""

    def __init__(self, rollout_model: RolloutByNodes | None, scaling: NodeScaling) -> None:
        self.drift: Drift | None = None
        """The last change that was detected."""
        self.lengths_changed_at = -inf
        """Time of the last change of lengths; earlier measurements are of another workload."""
        self.workload_changed_at = -inf
        """Time of the last change of lengths or prompts."""
        self.split_since = -inf
        self.measured: Estimate | None = None
        """What was measured at the present split, whatever `estimate` returned."""
        self._model, self._scaling = rollout_model, scaling
        self._split_changed_at = -inf
        self._split: Split | None = None
        self._base: Estimate | None = None
        self._learned_at = -inf
        self._length_test: DriftDetector | None = None
        self._in_flight: InFlightEstimator | None = None
        self._next_trajectory = 0

    def observe(self, snapshot: PlanSnapshot, now: float) -> bool:
        """Take in new trajectories and groups; return whether the workload changed."""
        if self._length_test is None or self._in_flight is None:
            self._length_test = DriftDetector(snapshot.group_size, snapshot.prompts_per_step)
            self._in_flight = InFlightEstimator(snapshot.group_size, snapshot.prompts_per_step)
        prompts = self._in_flight.observe(snapshot)
        if prompts is not None:
            self.drift, self.workload_changed_at = replace(prompts, quantity=PROMPT_QUANTITY), now
        fresh = [t for t in snapshot.trajectories if t.index >= self._next_trajectory]
        if not fresh:
            return prompts is not None
        self._next_trajectory = fresh[-1].index + 1
        lengths = [(float(t.generated), float(t.context), float(t.turns), t.tool_s) for t in fresh]
        drift = self._length_test.update(lengths)
        if drift is not None:
            # The block in which the change was detected belongs to the new workload.
            block = snapshot.trajectories[-drift.count :]
            self.lengths_changed_at = block[0].at if drift.count <= len(snapshot.trajectories) else now
            self.drift, self.workload_changed_at = drift, max(self.workload_changed_at, self.lengths_changed_at)
        return drift is not None or prompts is not None

    def set_split(self, split: Split, now: float) -> bool:
        """Set the present split; return whether it is a new one."""
        if split == self._split:
            return False
        self._split_changed_at = -inf if self._split is None else now
        self._split, self.split_since = split, now
        return True

    def is_changing(self, snapshot: PlanSnapshot) -> bool:
        """Whether the workload changed recently."""
        recent = sum(s.at > self.workload_changed_at for s in snapshot.steps) < CHANGING_STEPS
        return recent and self.workload_changed_at > -inf

    def estimate(self, snapshot: PlanSnapshot, split: Split, since: float | None = None) -> Estimate | str:
        """Both stages at this split for the present work, or a sentence that names what is missing.

        With ``since``, only newer steps count.
        """
        begun = max(self.split_since, self.lengths_changed_at) if since is None else since
        measured = measure(snapshot, split, begun)
        self.measured = (
            None
            if isinstance(measured, str)
            else self._with_cost_model(snapshot, measured, recent(snapshot, split, begun).done)
        )
        if since is None and self._model is not None:
            expected = self._from_in_flight(snapshot, split, self._model)
            if isinstance(expected, Estimate):
                return expected
        return self.measured or self._rescaled(snapshot, split, since) or measured

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
                and not self.is_changing(snapshot)
            ):
                self._model.learn(nodes, times.rollout * more)
                self._learned_at = snapshot.steps[-1].at
            return measured
        free = self._free(split=measured.split, lent=measured.lent)
        if free is None or free >= times.rollout:
            return measured
        error = max(measured.rollout_error, MODEL_ERROR)
        return measured._replace(times=times._replace(rollout=max(measured.straggler, free)), rollout_error=error)

    def _free(self, split: Split, lent: float) -> float | None:
        """The cost model's seconds if trainers do not hold rollout up, beside so many guests."""
        assert self._model is not None
        alone = self._model.unthrottled(split.rollout)
        return None if alone is None else alone * split.rollout / (split.rollout + lent)

    def _rescaled(self, snapshot: PlanSnapshot, split: Split, since: float | None) -> Estimate | None:
        """The measurement from before the change of lengths, rescaled to the new lengths."""
        if self._model is None or self.lengths_changed_at <= self.split_since or since is not None:
            return None
        before = measure(snapshot, split, self.split_since)
        if isinstance(before, str):
            return None
        self._model.observe(snapshot, self.lengths_changed_at)
        return with_new_lengths(
            before, snapshot, since=self.lengths_changed_at, rollout=self._free(split, before.lent), error=MODEL_ERROR
        )

    def _from_in_flight(self, snapshot: PlanSnapshot, split: Split, rollout_model: RolloutByNodes) -> Estimate | None:
        """Both stages for the in-flight work; None unless the workload changes and the cost model covers it."""
        assert self._in_flight is not None
        steps = self._steps(snapshot, split)
        plain = measure(snapshot, split, self.split_since)
        self._base = plain if isinstance(plain, Estimate) else self._base
        first = self.workload_changed_at == self._split_changed_at == -inf and len(steps) < MAX_STEPS
        if snapshot.eta == 0 or not (first or self.is_changing(snapshot)):
            return None
        base = self._base or _first_steps(split, steps, snapshot.eta)
        work = self._in_flight.work(snapshot)
        if base is None or work is None:
            return None
        there = self._scaling.correction(base.split, split).train * base.split.train / split.train
        if split != base.split and _differ(steps, base, there):
            return None
        rollout_model.observe_trajectories(snapshot, work.done)
        lent = lent_nodes(snapshot)
        rollout = self._free(split, lent)
        if rollout is None:
            return None
        size = snapshot.prompts_per_step * snapshot.group_size
        tokens = size * sum(t.context for t in work.done) / len(work.done)
        train_error, rollout_error = _errors(work, snapshot.group_size, first)
        return Estimate(
            split=split,
            times=Times(base.train_seconds(tokens, there), rollout, snapshot.eta),
            train_error=train_error,
            rollout_error=rollout_error,
            fixed=base.fixed,
            straggler=0.0,
            train_tokens=tokens,
            rollout_tokens=snapshot.sampled * sum(t.generated for t in work.done) / len(work.done),
            from_in_flight=True,
            scatter=batch_scatter(snapshot, work.done),
            lent=lent,
        )

    def _steps(self, snapshot: PlanSnapshot, split: Split) -> list[TrainStepFact]:
        """Steps at the present split."""
        return [s for s in snapshot.steps if s.at > self.split_since and s.nodes == split.train and s.tokens > 0]


def _differ(steps: list[TrainStepFact], base: Estimate, correction: float) -> bool:
    """Whether the newest steps take other times than ``base`` expects with this correction."""
    if not steps:
        return False
    ratios = [s.seconds / base.train_seconds(s.tokens, correction) for s in steps[-FIRST_STEPS:]]
    return abs(median(ratios) - 1.0) > AGREEMENT


def _first_steps(split: Split, steps: list[TrainStepFact], eta: int) -> Estimate | None:
    """The first steps of a run, if they agree per token; a slow start-up step does not."""
    per_token = [s.seconds / s.tokens for s in steps[-FIRST_STEPS:]]
    if len(per_token) < FIRST_STEPS or max(per_token) > (1.0 + AGREEMENT) * min(per_token):
        return None
    tokens = median(s.tokens for s in steps)
    return Estimate(
        split=split,
        times=Times(tokens * median(per_token), 0.0, eta),
        train_error=MODEL_ERROR,
        rollout_error=MODEL_ERROR,
        fixed=0.0,
        straggler=0.0,
        train_tokens=tokens,
        rollout_tokens=0.0,
    )


def _errors(work: InFlightWork, group_size: int, first: bool) -> tuple[float, float]:
    """Relative errors of both stages. At the start of a run they include the sampling error of so few groups."""
    train, rollout = hypot(IN_FLIGHT_ERROR, work.tokens_error), hypot(IN_FLIGHT_ERROR, work.generated_error)
    if not first:
        return train, rollout
    return (
        hypot(train, sampling_error([float(t.context) for t in work.done], group_size)),
        hypot(rollout, sampling_error([float(t.generated) for t in work.done], group_size)),
    )
