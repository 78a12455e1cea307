"""Cost model: seconds each stage needs for one global batch, at the present split of nodes and at its neighbours, from
measured times.

Both stages are in the same unit.  *Measured* at the present split (n training replicas, m rollout nodes), over the last
`MAX_STEPS` = 8 steps since the last change of split or of lengths: older steps are of a policy that was another one.

* T_train: the median of the train stage's own seconds per step (compute, reduce, optimizer of the slowest replica).
  Waiting for data is not in it: in an asynchronous loop the slower stage holds up the other, and only own work says how
  fast a stage could be.
* T_rollout, where trainers wait for it (the mean time between commits exceeds the mean step by `STARVED` = 10 % or
  more): the mean time between commits. Nothing else bounds the loop then, so that this is the time itself.  It is a
  mean, because a batch that takes longer leaves the next one less to do.
* T_rollout otherwise: work / (m * rate).  Work is the mean generated length times the trajectories of a batch; rate is
  all generated tokens over all *busy* node seconds.  A rollout that idles most of the time runs small batches and shows
  too low a rate; but no stage can be slower than the loop it is part of, so T_rollout is then never above the mean time
  between commits.
* The straggler bound: a batch cannot end before its longest trajectory.  With eta + 1 batches in flight it has that
  many batch times, so T_rollout >= (longest * decode_s + its time in tools) / (eta + 1), longest being the quantile 1 -
  1/N of lengths for N trajectories a batch.  Nodes do not shorten it.
* Both stages are of the past.  When the work per batch has a significant trend (`forecast`), they are carried from the
  middle of what was measured to now, and `extrapolate` continues them.

*Predicted* at n', m' nodes: T_train = fixed + (T_train - fixed) * n / n', where fixed (optimizer, latency) is the
intercept of a Theil-Sen line of seconds over tokens per replica, between 0 and `MAX_FIXED` = 0.9 of T_train, and 0
while batches differ too little in size to tell (spread under `MIN_SPREAD` = 0.2 of the median): an optimistic start,
which the next line corrects.  T_rollout scales with m / m'.  Both are multiplied by the *scaling correction* learned
from the last move between the two splits: measured over predicted, per token.  It holds what no ratio of node counts
knows: ranks that share cores or a network, the price of the all-reduce.

Each time carries a relative standard error, from the spread of the steps (median: 1.2533 * 1.4826 MAD / sqrt(n)) and of
the lengths, whose group members are not independent and count as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import sqrt
from statistics import fmean, median
from typing import NamedTuple

from libra_hpc.protocol.plan import PlanSnapshot, RolloutWindowFact, TrainStepFact, TrajectoryFact

from .trend import Trend, trend

MIN_STEPS = 4
"""Steps and windows a median is taken over at least: one outlier cannot move it."""
MIN_GROUPS = 16
"""Groups of finished trajectories the mean length is taken over at least: its error is then some 20 % for lengths as
scattered as their mean."""
MAX_STEPS = 8
"""Newest steps used, and windows and trajectories of their time (some more where steps are so short that too few
fall into it): older ones are of another policy."""
MAX_FIT = 64
"""Newest steps the Theil-Sen line is fitted to: it takes 2,016 pairs of them."""
STARVED = 0.1
"""Share by which the time between commits exceeds training from which on rollout is surely the slower stage."""
TREND_STEPS = 32
"""Newest steps a trend is looked for in."""
MAX_FIXED = 0.9
MIN_SPREAD = 0.2
MIN_CORRECTION = 0.1
"""A stage never gets ten times better than ideal scaling: a smaller ratio is an artefact of a badly estimated fixed
part."""


class Split(NamedTuple):
    """How many nodes do what."""

    train: int
    rollout: int


class Times(NamedTuple):
    """Seconds per global batch of either stage, and what the loop makes of them."""

    train: float
    rollout: float
    eta: int

    @property
    def batch(self) -> float:
        """Seconds per global batch: the slower stage, or with eta = 0, where the stages take turns, both."""
        return self.train + self.rollout if self.eta == 0 else max(self.train, self.rollout)


class Estimate(NamedTuple):
    """The model at one split, fitted to what was measured there."""

    split: Split
    times: Times
    train_error: float
    """Relative standard error of ``times.train``."""
    rollout_error: float
    fixed: float
    """Seconds of a training step that more replicas do not shorten."""
    straggler: float
    """Seconds below which no number of rollout nodes brings a batch."""
    train_tokens: float
    """Tokens of a batch that were trained on."""
    rollout_tokens: float
    """Tokens of a batch that were generated."""
    train_trend: Trend = Trend()
    rollout_trend: Trend = Trend()
    starved: bool = False
    """Whether trainers wait for rollout, whose time is then the time between commits."""
    foreseen: bool = False
    """Whether the times are of the work under way, which the queues do not show yet."""


class Correction(NamedTuple):
    """Measured over predicted when going from one split to another; 1.0 is ideal scaling."""

    train: float = 1.0
    rollout: float = 1.0


def measure(snapshot: PlanSnapshot, split: Split, since: float, drifted: float = float("-inf")) -> Estimate | str:
    """Fit the model to what was measured at ``split`` after ``since``, or say in words what is still missing.

    Trends of the work are taken from all steps after ``drifted``, the last sudden change, whatever the split.
    """
    fitted, steps, windows, done = _seen(snapshot, split, since)
    need = MIN_GROUPS * snapshot.group_size
    if len(steps) < MIN_STEPS or len(windows) < MIN_STEPS or len(done) < need:
        have, seen, finished = min(len(steps), MIN_STEPS), min(len(windows), MIN_STEPS), min(len(done), need)
        return (
            f"{have} of {MIN_STEPS} steps, {seen} of {MIN_STEPS} rollout windows and {finished} of {need} trajectories"
            f" measured with {split.train} training and {split.rollout} rollout nodes since the last change"
        )
    train = median(s.seconds for s in steps)
    fixed = min(_intercept(fitted), MAX_FIXED * train)
    train_trend, rollout_trend = work_trend(snapshot, drifted)
    age = (steps[-1].at - steps[0].at) / 2.0
    train = fixed + (train - fixed) * train_trend.past(age)
    straggler = _straggler(snapshot, done, windows)
    work = fmean(t.generated for t in done) * snapshot.prompts_per_step * snapshot.group_size
    rate = sum(w.generated_tokens for w in windows) / sum(w.seconds * w.nodes * w.busy for w in windows)
    rollout = max(straggler, work / (split.rollout * rate))
    error = sampling_error([float(t.generated) for t in done], snapshot.group_size)
    starved = False
    if snapshot.eta > 0:
        intervals = [b.at - a.at for a, b in pairwise(steps)]
        between = fmean(intervals)
        if between > (1.0 + STARVED) * fmean(s.seconds for s in steps):
            starved, rollout = True, between
        else:
            rollout = min(rollout, max(train, between))
    rollout *= rollout_trend.past(age)
    return Estimate(
        split,
        Times(train, rollout, snapshot.eta),
        _median_error([s.seconds for s in steps]),
        error,
        fixed,
        min(straggler, rollout),
        median(s.tokens for s in steps),
        work,
        train_trend,
        rollout_trend,
        starved,
    )


def work_trend(snapshot: PlanSnapshot, drifted: float) -> tuple[Trend, Trend]:
    """Of the tokens trained on and of those generated, per step after ``drifted``."""
    recent = [s for s in snapshot.steps if s.at > drifted and s.tokens > 0][-TREND_STEPS:]
    return trend([(s.at, float(s.tokens)) for s in recent]), trend(
        [(s.at, float(s.loss_tokens)) for s in recent if s.loss_tokens > 0]
    )


def trajectories_used(snapshot: PlanSnapshot, split: Split, since: float) -> list[TrajectoryFact]:
    """The trajectories `measure` goes by."""
    return _seen(snapshot, split, since).done


class _Seen(NamedTuple):
    """What was measured at a split: steps for the fixed part, the newest of them, and windows and trajectories of
    their time."""

    fitted: list[TrainStepFact]
    steps: list[TrainStepFact]
    windows: list[RolloutWindowFact]
    done: list[TrajectoryFact]


def _seen(snapshot: PlanSnapshot, split: Split, since: float) -> _Seen:
    fitted = [s for s in snapshot.steps if s.at > since and s.replicas == split.train and s.tokens > 0][-MAX_FIT:]
    steps = fitted[-MAX_STEPS:]
    windows = [
        w
        for w in snapshot.windows
        if w.at - w.seconds >= since and w.nodes == split.rollout and w.generated_tokens > 0 and w.busy > 0.0
    ]
    done = [t for t in snapshot.trajectories if t.at > since]
    if len(steps) == MAX_STEPS:
        began = steps[0].at - steps[0].seconds
        windows = windows[-max(MIN_STEPS, sum(w.at - w.seconds >= began for w in windows)) :]
        done = done[-max(MIN_GROUPS * snapshot.group_size, sum(t.at > began for t in done)) :]
    return _Seen(fitted, steps, windows, done)


def with_new_lengths(
    before: Estimate, snapshot: PlanSnapshot, since: float, rollout: float | None, error: float
) -> Estimate | None:
    """``before``, measured with an older workload, for the trajectories after ``since``; None while there are too few.

    Training goes with the tokens of a batch, less the fixed part; ``rollout`` seconds come from a cost model.  Neither
    error is below ``error``.
    """
    done = [t for t in snapshot.trajectories if t.at > since]
    if rollout is None or len(done) < MIN_GROUPS * snapshot.group_size:
        return None
    size = snapshot.prompts_per_step * snapshot.group_size
    tokens, work = fmean(t.context for t in done) * size, fmean(t.generated for t in done) * size
    train = before.fixed + (before.times.train - before.fixed) * tokens / before.train_tokens
    return before._replace(
        times=Times(train, rollout, before.times.eta),
        train_error=max(error, before.train_error),
        rollout_error=max(error, before.rollout_error),
        straggler=0.0,
        train_tokens=tokens,
        rollout_tokens=work,
        train_trend=Trend(),
        rollout_trend=Trend(),
    )


def times_with_work_of(before: Estimate, after: Estimate) -> Times:
    """Times of ``before`` had its batches had the tokens of those of ``after``: what standing still would take now."""
    train = before.fixed + (before.times.train - before.fixed) * after.train_tokens / before.train_tokens
    return Times(train, before.times.rollout * after.rollout_tokens / before.rollout_tokens, before.times.eta)


def extrapolate(now: Estimate, seconds: float) -> Estimate:
    """The same, ``seconds`` later, if the trends of the work go on (damped)."""
    train, rollout = now.train_trend.ahead(seconds), now.rollout_trend.ahead(seconds)
    times = Times(now.fixed + (now.times.train - now.fixed) * train, now.times.rollout * rollout, now.times.eta)
    return now._replace(times=times, straggler=now.straggler * rollout)


def predict(
    now: Estimate, to: Split, correction: Correction, train_shift: float = 0.0, rollout_shift: float = 0.0
) -> Times:
    """Times at the split ``to``; the shifts move the measured times by so many standard errors."""
    train = now.times.train * max(0.0, 1.0 + train_shift * now.train_error)
    rollout = now.times.rollout * max(0.0, 1.0 + rollout_shift * now.rollout_error)
    fixed = min(now.fixed, train)
    return Times(
        fixed + (train - fixed) * correction.train * now.split.train / to.train,
        max(now.straggler, rollout * correction.rollout * now.split.rollout / to.rollout),
        now.times.eta,
    )


def learned_correction(before: Estimate, after: Estimate) -> Correction:
    """What the move from ``before`` to ``after`` taught about scaling between these splits; a change in the size of
    batches is taken out."""
    fixed = before.fixed
    ideal_train = (
        (before.times.train - fixed) * before.split.train / after.split.train * after.train_tokens / before.train_tokens
    )
    ideal_rollout = (
        before.times.rollout * before.split.rollout / after.split.rollout * after.rollout_tokens / before.rollout_tokens
    )
    return Correction(
        max(MIN_CORRECTION, (after.times.train - fixed) / ideal_train),
        max(MIN_CORRECTION, after.times.rollout / ideal_rollout),
    )


def _intercept(steps: Sequence[TrainStepFact]) -> float:
    sizes = sorted(s.tokens / s.replicas for s in steps)
    if sizes[(3 * len(sizes)) // 4] - sizes[len(sizes) // 4] < MIN_SPREAD * median(sizes):
        return 0.0
    points = [(s.tokens / s.replicas, s.seconds) for s in steps]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for i, a in enumerate(points) for b in points[i + 1 :] if b[0] != a[0]]
    slope = max(0.0, median(slopes))
    return max(0.0, median(seconds - slope * size for size, seconds in points))


def _straggler(snapshot: PlanSnapshot, done: Sequence[TrajectoryFact], windows: Sequence[RolloutWindowFact]) -> float:
    speeds = [w.decode_s for w in windows if w.decode_s > 0.0]
    if not speeds:
        return 0.0
    speed = median(speeds)
    alone = sorted(t.generated * speed + max(0.0, t.tool_s) for t in done)
    batch = snapshot.prompts_per_step * snapshot.group_size
    return alone[min(len(alone) - 1, int(len(alone) * (1.0 - 1.0 / batch)))] / (snapshot.eta + 1)


def _median_error(values: Sequence[float]) -> float:
    centre = median(values)
    spread = 1.4826 * median(abs(v - centre) for v in values)
    return 1.2533 * spread / centre / sqrt(len(values))


def sampling_error(values: Sequence[float], group_size: int) -> float:
    """Relative standard error of the mean of as many trajectories, of which a group counts as one."""
    centre = fmean(values)
    return sqrt(fmean((v - centre) ** 2 for v in values)) / centre / sqrt(len(values) / group_size)
