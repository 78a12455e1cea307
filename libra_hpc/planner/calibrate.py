"""Online correction: a factor for every term of the next step's time, and the prediction itself, made before the step from past data only.

*Terms.*  The time from commit to commit is a wait for the batch and the training of it.

* Training is nominally tokens per replica times a reference: the plan's seconds per token, without a plan the first measured ones.  The tokens are those
  of the batch itself as soon as it is complete, the median of the last `BATCHES` = 8 batches before.
* A batch is complete its *latency* after the commit that admitted its prompts, eta + 1 batches before: nominally the reference (the plan's, or the first
  measured one).  The wait is what is left of the latency at the commit before; a batch that is late already is taken for the median of those later still.

*Factors* are measured over nominal seconds.  Each is the median of its last `RECENT` = 24 ratios, so that single outliers (a checkpoint, a busy neighbour)
count for nothing.  When the last `RUN` = 6 ratios all lie on one side of the median of the ones before, by more than `TOLERANCE` = 10 % in their own
median, the older ones are forgotten: without a change six of one side happen by chance once in 32 looks and cost samples, no more.  A drift reported
from outside leaves the newest `KEPT` = 2 ratios.  A factor is between 1 / `BOUND` and `BOUND` = 8: a reference that is further off was made for other
hardware, and is replaced by what is measured.

Factors are kept apart by what changes the speed of hardware, not the work: the nodes of the stage, and for training how long the batch let the trainers wait
(not at all, less than half a latency, more).  The longer the wait, the further the next batch is by then; where the stages share cores or links, a
step that starts at once, beside a rollout that has just got new credit, is the slowest.  A kind that is new starts from the one seen last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from statistics import median

import msgspec

RECENT = 24
RUN = 6
TOLERANCE = 0.1
BOUND = 8.0
KEPT = 2
WARM = 3
"""Measurements before a term without a plan's reference is predicted."""
AT_ONCE = 0.01
"""Seconds of waiting that are none."""
BATCHES = 8
"""Batches whose median size stands for one that is not complete yet."""


class Factor:
    """Measured over nominal seconds of one term under one set of circumstances."""

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=RECENT)

    def __len__(self) -> int:
        return len(self._ratios)

    def update(self, ratio: float) -> None:
        """Take in one measurement."""
        self._ratios.append(ratio)
        ratios = list(self._ratios)
        before, run = ratios[:-RUN], ratios[-RUN:]
        if len(before) < WARM:
            return
        centre = median(before)
        one_side = all(r > centre for r in run) or all(r < centre for r in run)
        if one_side and abs(median(run) / centre - 1.0) > TOLERANCE:
            self._keep(RUN)

    def decay(self) -> None:
        """Forget all but the newest `KEPT` measurements."""
        self._keep(KEPT)

    def value(self, above: float = 0.0) -> float:
        """The factor, 1.0 before the first measurement; of the ratios ``above`` a value when there are any, else that value itself."""
        if not self._ratios:
            return max(1.0, above)
        later = [r for r in self._ratios if r > above]
        return min(max(median(later), 1.0 / BOUND), BOUND) if later else above

    @property
    def centre(self) -> float:
        """The median itself, without the bound; needs a measurement."""
        return median(self._ratios)

    def _keep(self, newest: int) -> None:
        self._ratios = deque(list(self._ratios)[-newest:], maxlen=RECENT)


class Term:
    """One term of the model: a reference in seconds per unit of nominal work, and a factor for each kind of circumstances."""

    def __init__(self, reference: float = 0.0) -> None:
        self._reference, self._given = reference, reference > 0.0
        self._factors: dict[Hashable, Factor] = {}
        self._last: Hashable = None

    def measured(self, kind: Hashable, work: float, seconds: float) -> None:
        """One measurement of ``work`` units; without work or time it says nothing."""
        if work <= 0.0 or seconds <= 0.0:
            return
        self._reference = self._reference or seconds / work
        factor = self._factors.setdefault(kind, Factor())
        factor.update(seconds / (work * self._reference))
        self._last = kind
        if len(factor) >= WARM and not 1.0 / BOUND < factor.value() < BOUND:
            self._reference *= factor.centre
            self._factors = {}

    def predict(self, kind: Hashable, work: float, passed: float = 0.0) -> float | None:
        """Seconds of ``work`` units of which ``passed`` seconds are over without it being done; None while too little is known."""
        factor = self._of(kind)
        known = sum(map(len, self._factors.values()))
        if self._reference <= 0.0 or work <= 0.0 or (known < WARM and not self._given):
            return None
        nominal = work * self._reference
        return max(passed, nominal * factor.value(passed / nominal))

    @property
    def present(self) -> float:
        """The factor of the circumstances measured last."""
        return self._of(self._last).value()

    def decay(self) -> None:
        """A drift: newer measurements soon decide."""
        for factor in self._factors.values():
            factor.decay()

    def _of(self, kind: Hashable) -> Factor:
        own = self._factors.get(kind)
        return own if own is not None and len(own) >= WARM else self._factors.get(self._last, own or Factor())


class Split(msgspec.Struct, frozen=True):
    """Nodes at work when a step was predicted or measured."""

    replicas: int
    rollout_nodes: int


class PredictedStep(msgspec.Struct, frozen=True):
    """One step, predicted before it and measured after it; seconds, None where too little was known for a prediction."""

    step: int
    predicted_s: float | None
    """From the commit before to this one, as predicted at the commit before."""
    measured_s: float
    predicted_train_s: float | None
    """Of training the batch, as predicted when its size was known."""
    measured_train_s: float
    latency_s: float | None
    """From the commit that admitted the batch's prompts until it was complete; None when that was before this attempt."""


class _Next(msgspec.Struct):
    """What is predicted for the step that runs."""

    step: int
    split: Split
    kind: Hashable
    seconds: float | None
    train: float | None


class StepForecast:
    """Told of every complete batch and every commit in order of time; times are seconds of one clock."""

    def __init__(self, eta: int, train_s_per_token: float = 0.0, latency_s: float = 0.0) -> None:
        self.train, self.latency = Term(train_s_per_token), Term(latency_s)
        self._eta = eta
        self._sizes: deque[int] = deque(maxlen=BATCHES)
        self._ready: dict[int, int] = {}
        """Tokens of complete batches that are not trained yet, by step."""
        self._commits: dict[int, float] = {}
        self._latencies: dict[int, float] = {}
        self._next: _Next | None = None

    def batch_ready(self, step: int, tokens: int, rollout_nodes: int, now: float) -> None:
        """The batch of ``step`` is complete and has ``tokens`` tokens to train on."""
        self._ready[step] = tokens
        self._sizes.append(tokens)
        admitted = self._commits.get(step - 1 - self._eta)
        if admitted is not None:
            self._latencies[step] = now - admitted
            self.latency.measured(rollout_nodes, 1.0, now - admitted)
        following = self._next
        if following is not None and following.step == step:
            following.kind = self._kind(following.split, now - self._commits[step - 1])
            following.train = self.train.predict(following.kind, tokens / following.split.replicas)

    def committed(self, step: int, split: Split, step_s: float, wait_s: float, train_s: float, now: float) -> PredictedStep:
        """A step is committed: compare it with its prediction, learn from it, and predict the one after it."""
        tokens = self._ready.pop(step, 0)
        made = self._next if self._next is not None and self._next.step == step else None
        kind = made.kind if made is not None and made.split == split else self._kind(split, wait_s)
        self.train.measured(kind, tokens / split.replicas, train_s)
        self._commits[step] = now
        for old in [s for s in self._commits if s < step - self._eta - 1]:
            del self._commits[old]
        self._next = self._predict(step + 1, split, now)
        predicted, train = (None, None) if made is None else (made.seconds, made.train)
        return PredictedStep(step, predicted, step_s, train, train_s, self._latencies.pop(step, None))

    def drifted(self) -> None:
        """Lengths changed: what was measured before counts less."""
        self.train.decay()
        self.latency.decay()

    @property
    def upcoming(self) -> float | None:
        """Predicted seconds of the step that runs."""
        return None if self._next is None else self._next.seconds

    def _predict(self, step: int, split: Split, now: float) -> _Next:
        waits = step not in self._ready
        tokens = median(self._sizes) if waits and self._sizes else self._ready.get(step, 0)
        wait: float | None = 0.0
        if waits:
            admitted = self._commits.get(step - 1 - self._eta)
            passed = 0.0 if admitted is None else now - admitted
            whole = None if admitted is None else self.latency.predict(split.rollout_nodes, 1.0, passed)
            wait = None if whole is None else whole - passed
        kind = self._kind(split, wait or 0.0)
        train = self.train.predict(kind, tokens / split.replicas)
        return _Next(step, split, kind, None if train is None or wait is None else wait + train, train)

    def _kind(self, split: Split, wait: float) -> Hashable:
        """Circumstances of a training step whose batch came ``wait`` seconds after the commit before."""
        whole = self.latency.predict(split.rollout_nodes, 1.0) or 0.0
        return split.replicas, 0 if wait <= AT_ONCE else 1 if wait < whole / 2 else 2
