"""What both stages take now, from everything that was seen: measured at the present split, or where the work changes
faster than that, foreseen.

*Measured* is `model.measure`: enough steps, windows and trajectories since the last change of split or workload, with
the cost model in place of a rollout that trainers hold up.  It is late: eta + 1 batches lie between admission and
training, and four more steps have to end.

*Foreseen* is used where there is a cost model and the workload changes: a test of lengths or of prompts raised an
alarm, or the work per step had a trend, within the last `CHANGING` = 32 steps.  The groups under way say what the next
batches are (`underway`); training goes with their tokens, in the time per token that was measured last, at this split
or carried over from another one (`scaling`); rollout takes what the model says of their lengths, times what it was off
when trainers last waited.  The first steps at a new split must agree with what was carried over, within `AGREE` = 15 %,
else it is measured first.

At the start of a run nothing is known and the first split is a guess.  With a cost model `FIRST` = 2 steps that agree
per token are enough to leave it, and up to the eighth the draw of so few groups counts as error: a split that is far
off is left early, a good one not at all for a batch of long ones.
"""

from __future__ import annotations

from math import hypot, inf
from statistics import median

from msgspec.structs import replace

from libra_hpc.cost_models.rollout_by_nodes import MODEL_ERROR, RolloutByNodes
from libra_hpc.protocol.plan import PlanSnapshot, TrainStepFact, TrajectoryFact

from .change_detection import Drift, DriftDetector
from .in_flight import InFlightEstimator, InFlightWork
from .node_scaling import NodeScaling
from .stage_times import MAX_STEPS, Estimate, Split, Times, trajectories_used, measure, with_new_lengths, sampling_error, work_trend

CHANGING = 32
FORESEEN = 0.03
"""Relative standard error of a foreseen time: the model's between numbers of nodes, once its level is measured."""
AGREE = 0.15
CLEARLY = 0.3
"""By how much rollout must be the slower stage for the time between commits to say what the model is off: the mean
of the slower one of two that take turns in being it is above both."""
FIRST = 2
PROMPTS = 4
"""`Drift.quantity` of a change of prompts."""


class StageEstimator:
    """`observe` every snapshot, then `measure`."""

    def __init__(self, rollout_model: RolloutByNodes | None, scaling: NodeScaling) -> None:
        self.drift: Drift | None = None
        """The last change found."""
        self.drifted = -inf
        """When lengths changed: what was measured before is of another workload."""
        self.changed = -inf
        """When lengths or prompts changed last: what ends from then on is of the present workload."""
        self.since = -inf
        """When the present split began."""
        self.direct: Estimate | None = None
        """What was measured at the present split, whatever `measure` answered."""
        self._model, self._scaling = rollout_model, scaling
        self._began = -inf
        self._split: Split | None = None
        self._base: Estimate | None = None
        self._learned = -inf
        self._lengths: DriftDetector | None = None
        self._in_flight: InFlightEstimator | None = None
        self._next_index = 0

    def observe(self, snapshot: PlanSnapshot, now: float) -> bool:
        """Take in new trajectories and groups; whether the workload changed."""
        if self._lengths is None or self._in_flight is None:
            self._lengths = DriftDetector(snapshot.group_size, snapshot.prompts_per_step)
            self._in_flight = InFlightEstimator(snapshot.group_size, snapshot.prompts_per_step)
        prompts = self._in_flight.observe(snapshot)
        if prompts is not None:
            self.drift, self.changed = replace(prompts, quantity=PROMPTS), now
        fresh = [t for t in snapshot.trajectories if t.index >= self._next_index]
        if not fresh:
            return prompts is not None
        self._next_index = fresh[-1].index + 1
        drift = self._lengths.update([(float(t.generated), float(t.context), float(t.turns), t.tool_s) for t in fresh])
        if drift is not None:
            # The block that raised the alarm is of the new kind already.
            block = snapshot.trajectories[-drift.count :]
            self.drifted = block[0].at if drift.count <= len(snapshot.trajectories) else now
            self.drift, self.changed = drift, max(self.changed, self.drifted)
        return drift is not None or prompts is not None

    def split(self, split: Split, now: float) -> bool:
        """The present split; whether it is a new one."""
        if split == self._split:
            return False
        self._began = -inf if self._split is None else now
        self._split, self.since = split, now
        return True

    def changing(self, snapshot: PlanSnapshot) -> bool:
        """Whether the workload changed lately or has a trend."""
        recent = sum(s.at > self.changed for s in snapshot.steps) < CHANGING
        return (recent and self.changed > -inf) or any(t.rate for t in work_trend(snapshot, self.drifted))

    def measure(self, snapshot: PlanSnapshot, split: Split, since: float | None = None) -> Estimate | str:
        """The model at this split and the work of now, or what is still missing; with ``since``, from newer steps
        alone."""
        begun = max(self.since, self.drifted) if since is None else since
        measured = measure(snapshot, split, begun, self.drifted)
        self.direct = (
            None
            if isinstance(measured, str)
            else self._with_cost_model(snapshot, measured, trajectories_used(snapshot, split, begun))
        )
        if since is None and self._model is not None:
            foreseen = self._foreseen(snapshot, split, self._model)
            if isinstance(foreseen, Estimate):
                return foreseen
        return self.direct or self._renewed(snapshot, split, since) or measured

    def _with_cost_model(self, snapshot: PlanSnapshot, measured: Estimate, done: list[TrajectoryFact]) -> Estimate:
        """Put the cost model's rollout in place of one that trainers hold up; learn from one that holds up trainers."""
        if self._model is None or snapshot.eta == 0:
            return measured
        self._model.observe_work(snapshot, done)
        nodes, times = measured.split.rollout, measured.times
        if measured.starved:
            if (
                times.rollout > (1.0 + CLEARLY) * times.train
                and snapshot.steps[-1].at > self._learned
                and not self.changing(snapshot)
            ):
                self._model.learn(nodes, times.rollout)
                self._learned = snapshot.steps[-1].at
            return measured
        free = self._model.unthrottled(nodes)
        if free is None or free >= times.rollout:
            return measured
        error = max(measured.rollout_error, MODEL_ERROR)
        return measured._replace(times=times._replace(rollout=max(measured.straggler, free)), rollout_error=error)

    def _renewed(self, snapshot: PlanSnapshot, split: Split, since: float | None) -> Estimate | None:
        """What was measured before the workload changed, for the lengths since."""
        if self._model is None or self.drifted <= self.since or since is not None:
            return None
        before = measure(snapshot, split, self.since, self.drifted)
        if isinstance(before, str):
            return None
        self._model.observe(snapshot, self.drifted)
        return with_new_lengths(before, snapshot, self.drifted, self._model.unthrottled(split.rollout), MODEL_ERROR)

    def _foreseen(self, snapshot: PlanSnapshot, split: Split, rollout_model: RolloutByNodes) -> Estimate | None:
        assert self._in_flight is not None
        steps = [s for s in snapshot.steps if s.at > self.since and s.replicas == split.train and s.tokens > 0]
        plain = measure(snapshot, split, self.since, inf)
        if isinstance(plain, Estimate):
            self._base = plain
        first = self.changed == self._began == -inf and len(steps) < MAX_STEPS
        if snapshot.eta == 0 or not (first or self.changing(snapshot)):
            return None
        base = self._base or _begun(split, steps, snapshot.eta)
        work = self._in_flight.work(snapshot)
        if base is None or work is None:
            return None
        there = self._scaling.correction(base.split, split).train * base.split.train / split.train

        def seconds(tokens: float) -> float:
            return base.fixed + (base.times.train - base.fixed) * there * tokens / base.train_tokens

        if (
            steps
            and abs(median(s.seconds / seconds(s.tokens) for s in steps[-FIRST:]) - 1.0) > AGREE
            and split != base.split
        ):
            return None
        rollout_model.observe_work(snapshot, work.done)
        rollout = rollout_model.unthrottled(split.rollout)
        if rollout is None:
            return None
        size = snapshot.prompts_per_step * snapshot.group_size
        tokens = size * sum(t.context for t in work.done) / len(work.done)
        train_error, rollout_error = _errors(work, snapshot.group_size, first)
        return Estimate(
            split,
            Times(seconds(tokens), rollout, snapshot.eta),
            train_error,
            rollout_error,
            base.fixed,
            0.0,
            tokens,
            size * sum(t.generated for t in work.done) / len(work.done),
            foreseen=True,
        )


def _begun(split: Split, steps: list[TrainStepFact], eta: int) -> Estimate | None:
    """The first steps of a run, if they agree: a start-up in one of them does not."""
    per_token = [s.seconds / s.tokens for s in steps[-FIRST:]]
    if len(per_token) < FIRST or max(per_token) > (1.0 + AGREE) * min(per_token):
        return None
    tokens = median(s.tokens for s in steps)
    return Estimate(split, Times(tokens * median(per_token), 0.0, eta), MODEL_ERROR, MODEL_ERROR, 0.0, 0.0, tokens, 0.0)


def _errors(work: InFlightWork, group_size: int, first: bool) -> tuple[float, float]:
    """Of the model and of what is not finished; where nothing says that the workload changes, of the draw of these
    groups as well."""
    train, rollout = hypot(FORESEEN, work.tokens_error), hypot(FORESEEN, work.generated_error)
    if not first:
        return train, rollout
    return (
        hypot(train, sampling_error([float(t.context) for t in work.done], group_size)),
        hypot(rollout, sampling_error([float(t.generated) for t in work.done], group_size)),
    )
