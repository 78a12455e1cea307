"""Seconds of each stage for one global batch: measured at the present split, predicted for others.

Measured over the last `MAX_STEPS` steps since the last change of split or lengths:

- Training: median own seconds of a step, without waiting for data.
- Rollout, trainers wait (`STARVED`) -> mean time between commits.
- Rollout, otherwise -> work / (nodes x tokens per busy node second), at most the mean time between commits.
- Rollout is never shorter than its longest trajectory / (eta + 1).
- Guests roll out too -> so many own nodes more (`lent_nodes`), which stay when own ones move.

Predicted: training = fixed + rest x node ratio, rollout x node ratio, each times a measured `Correction`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import hypot, sqrt
from statistics import NormalDist, fmean, median
from typing import NamedTuple

from libra_hpc.protocol.plan import PlanSnapshot, RolloutWindowFact, TrainStepFact, TrajectoryFact

MIN_STEPS = 4
"""Fewest steps and windows of a median: one outlier cannot move it."""
MIN_GROUPS = 16
"""Fewest finished groups of a mean length. Its error is then some 20 % for lengths as scattered as their mean."""
MAX_STEPS = 8
"""Newest steps used, with the windows and trajectories of their time. Older ones are of another policy."""
MAX_FIT = 64
"""Newest steps of the Theil-Sen line: 2,016 pairs."""
ONE_SIDED_95 = 1.645
"""Standard errors of a one-sided 95 % bound."""
STARVED = 0.1
"""Share by which the time between commits exceeds training before rollout counts as the slower stage."""
MAX_FIXED = 0.9
"""Largest share of a training step that counts as fixed."""
MIN_SPREAD = 0.2
"""Interquartile range of batch sizes over their median below which the fixed part is taken as 0: no slope is
measurable."""
LENT_S = 120.0
"""Seconds over which guests must have been there.  Half: lenders that flap count; double: new ones count late."""
LENT_QUANTILE = 0.1
"""Quantile of the windows of that time: who left is missed after 12 s."""
MIN_CORRECTION = 0.1
"""Smallest correction. Ten times better than ideal scaling comes from a badly estimated fixed part."""


class Split(NamedTuple):
    train: int
    rollout: int


class Scatter(NamedTuple):
    """Relative standard deviation of the work of a batch in either stage."""

    train: float = 0.0
    rollout: float = 0.0


class Times(NamedTuple):
    """Seconds per global batch of either stage."""

    train: float
    rollout: float
    eta: int
    ahead: float = 0.0
    """Share of training beside rollout, before the batch is complete; with eta = 0."""

    @property
    def batch(self) -> float:
        """Seconds per global batch: the slower stage; with eta = 0 rollout and what is left of training then."""
        if self.eta:
            return max(self.train, self.rollout)
        return self.train + self.rollout - min(self.ahead * self.train, self.rollout)

    def expected(self, scatter: Scatter) -> float:
        """Mean seconds per global batch whose work scatters: `batch`, and more where the stages are close.

        Each batch takes its slower stage, which is not always the one that is slower on average. This is the mean of
        the larger of two normal variables.
        """
        spread = hypot(scatter.train * self.train, scatter.rollout * self.rollout)
        if self.eta == 0 or spread == 0.0:
            return self.batch
        gap = NormalDist(sigma=spread)
        apart = abs(self.train - self.rollout)
        return self.batch + spread * spread * gap.pdf(apart) - apart * gap.cdf(-apart)


class Estimate(NamedTuple):
    """Both stages at one split, with errors and fixed parts."""

    split: Split
    times: Times
    train_error: float
    """Relative standard error of ``times.train``."""
    rollout_error: float
    fixed: float
    """Seconds of a training step that more replicas do not shorten: optimizer, latency, offer of new weights."""
    straggler: float
    """Seconds below which no number of rollout nodes finishes a batch."""
    train_tokens: float
    """Tokens of a batch, trained on."""
    rollout_tokens: float
    """Tokens of a batch, generated."""
    starved: bool = False
    """Whether trainers wait for rollout, whose time is then the time between commits."""
    scatter: Scatter = Scatter()
    lent: float = 0.0
    """Own nodes that guests stand for: ``times`` count on so many."""

    @property
    def rollout_nodes(self) -> float:
        return self.split.rollout + self.lent

    def train_seconds(self, tokens: float, factor: float = 1.0) -> float:
        """Training seconds of a batch of ``tokens``; the part that is not fixed takes ``factor`` times as long."""
        return self.fixed + (self.times.train - self.fixed) * factor * tokens / self.train_tokens


class Correction(NamedTuple):
    """Measured over predicted seconds between two splits; 1.0 is ideal scaling."""

    train: float = 1.0
    rollout: float = 1.0


def measure(snapshot: PlanSnapshot, split: Split, since: float) -> Estimate | str:
    """Measure both stages at ``split`` after ``since``, or name what is missing."""
    fitted, steps, windows, done = recent(snapshot, split, since)
    need = MIN_GROUPS * snapshot.group_size
    if len(steps) < MIN_STEPS or len(windows) < MIN_STEPS or len(done) < need:
        have, seen, finished = min(len(steps), MIN_STEPS), min(len(windows), MIN_STEPS), min(len(done), need)
        return (
            f"{have} of {MIN_STEPS} steps, {seen} of {MIN_STEPS} rollout windows and {finished} of {need} trajectories"
            f" measured with {split.train} training and {split.rollout} rollout nodes since the last change"
        )
    train = median(s.seconds for s in steps)
    fixed = min(_intercept(fitted), MAX_FIXED * train)
    straggler = _straggler(snapshot, done, windows)
    work = fmean(t.generated for t in done) * snapshot.sampled
    rate = sum(w.generated_tokens for w in windows) / sum(w.seconds * w.nodes * w.busy for w in windows)
    lent = lent_nodes(snapshot)
    rollout = max(straggler, work / ((split.rollout + lent) * rate))
    fewer = _rollout_nodes(windows) / (split.rollout + lent)
    error = sampling_error([float(t.generated) for t in done], snapshot.group_size)
    starved = False
    if snapshot.eta > 0:
        intervals = [b.at - a.at for a, b in pairwise(steps)]
        between = fmean(intervals)
        if between > (1.0 + STARVED) * fmean(s.seconds for s in steps):
            starved, rollout = True, between * fewer
        else:
            rollout = min(rollout, max(train, between * fewer))
    return Estimate(
        split=split,
        times=Times(train, rollout, snapshot.eta, _ahead(steps)),
        train_error=_median_error([s.seconds for s in steps]),
        rollout_error=error,
        fixed=fixed,
        straggler=min(straggler, rollout),
        train_tokens=median(s.tokens for s in steps),
        rollout_tokens=work,
        starved=starved,
        scatter=batch_scatter(snapshot, done),
        lent=lent,
    )


def _rollout_nodes(windows: Sequence[RolloutWindowFact]) -> float:
    """With the guests of these windows, which shortened the time between commits."""
    return fmean(w.nodes + w.lent for w in windows)


def lent_nodes(snapshot: PlanSnapshot) -> float:
    """Own nodes that guests have stood for in nearly all of the last windows."""
    recent = sorted(w.lent for w in snapshot.windows if w.at > snapshot.windows[-1].at - LENT_S)
    return recent[int(LENT_QUANTILE * len(recent))] if recent else 0.0


def with_lent(now: Estimate, lent: float) -> Estimate:
    """The estimate beside another number of guests."""
    rollout = max(now.straggler, now.times.rollout * now.rollout_nodes / (now.split.rollout + lent))
    return now._replace(times=now.times._replace(rollout=rollout), lent=lent)


class Recent(NamedTuple):
    """Facts of one split: steps for the fixed part, the newest of them, and windows and trajectories of their time."""

    fitted: list[TrainStepFact]
    steps: list[TrainStepFact]
    windows: list[RolloutWindowFact]
    done: list[TrajectoryFact]


def recent(snapshot: PlanSnapshot, split: Split, since: float) -> Recent:
    fitted = [s for s in snapshot.steps if s.at > since and s.nodes == split.train and s.tokens > 0][-MAX_FIT:]
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
    return Recent(fitted, steps, windows, done)


def with_new_lengths(
    before: Estimate, snapshot: PlanSnapshot, since: float, rollout: float | None, error: float
) -> Estimate | None:
    """``before``, rescaled to the trajectories after ``since``; None while there are too few of them.

    ``rollout`` seconds come from a cost model. Neither error is below ``error``.
    """
    done = [t for t in snapshot.trajectories if t.at > since]
    if rollout is None or len(done) < MIN_GROUPS * snapshot.group_size:
        return None
    tokens = fmean(t.context for t in done) * snapshot.prompts_per_step * snapshot.group_size
    work = fmean(t.generated for t in done) * snapshot.sampled
    return before._replace(
        times=before.times._replace(train=before.train_seconds(tokens), rollout=rollout),
        train_error=max(error, before.train_error),
        rollout_error=max(error, before.rollout_error),
        straggler=0.0,
        train_tokens=tokens,
        rollout_tokens=work,
    )


def times_with_work_of(before: Estimate, after: Estimate) -> Times:
    """Times at the split of ``before`` for the batch sizes of ``after``: what standing still would take now."""
    train = before.train_seconds(after.train_tokens)
    nodes = before.rollout_nodes / (before.split.rollout + after.lent)
    rollout = before.times.rollout * nodes * after.rollout_tokens / before.rollout_tokens
    return before.times._replace(train=train, rollout=rollout)


def predict(
    now: Estimate, to: Split, correction: Correction, train_shift: float = 0.0, rollout_shift: float = 0.0
) -> Times:
    """Times at the split ``to``; the shifts move the measured times by so many standard errors."""
    train = now.times.train * max(0.0, 1.0 + train_shift * now.train_error)
    rollout = now.times.rollout * max(0.0, 1.0 + rollout_shift * now.rollout_error)
    fixed = min(now.fixed, train)
    return Times(
        fixed + (train - fixed) * correction.train * now.split.train / to.train,
        max(now.straggler, rollout * correction.rollout * now.rollout_nodes / (to.rollout + now.lent)),
        now.times.eta,
        now.times.ahead,
    )


def _ahead(steps: Sequence[TrainStepFact]) -> float:
    return median(s.ahead_s / max(s.seconds, 1e-9) for s in steps)


def _theil_sen_slope(points: Sequence[tuple[float, float]]) -> float:
    """Median slope between all pairs of (x, y) points whose x differ; at least two must."""
    return median(
        [(b[1] - a[1]) / (b[0] - a[0]) for i, a in enumerate(points) for b in points[i + 1 :] if b[0] != a[0]]
    )


def _intercept(steps: Sequence[TrainStepFact]) -> float:
    known, sizes = median(s.diff_s for s in steps), sorted(s.tokens / s.nodes for s in steps)
    if sizes[(3 * len(sizes)) // 4] - sizes[len(sizes) // 4] < MIN_SPREAD * median(sizes):
        return known
    points = [(s.tokens / s.nodes, s.seconds) for s in steps]
    slope = max(0.0, _theil_sen_slope(points))
    return max(known, median(seconds - slope * size for size, seconds in points))


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


def batch_scatter(snapshot: PlanSnapshot, done: Sequence[TrajectoryFact]) -> Scatter:
    """Scatter of a batch of trajectories like ``done``: of the tokens trained on, and of those generated."""
    batches = len(done) / (snapshot.group_size * snapshot.prompts_per_step)
    train, rollout = (
        sampling_error(tokens, snapshot.group_size)
        for tokens in ([float(t.context) for t in done], [float(t.generated) for t in done])
    )
    return Scatter(train * sqrt(batches), rollout * sqrt(batches))


def sampling_error(values: Sequence[float], group_size: int) -> float:
    """Relative standard error of a mean; the members of a group count as one."""
    centre = fmean(values)
    return sqrt(fmean((v - centre) ** 2 for v in values)) / centre / sqrt(len(values) / group_size)
