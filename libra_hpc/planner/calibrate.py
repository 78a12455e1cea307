"""Predicted step times, made from past data only, and what they are made of.

The time from commit to commit is a wait for the batch and the training of it.

* Training follows `libra_hpc.planner.trainlaw`, fitted to the steps measured last; before the first of them, the plan's seconds per token.  The tokens are
  those of the batch itself as soon as it is complete, the median of the last `BATCHES` = 8 batches before.
* A batch is complete its *latency* after the commit that admitted its prompts, eta + 1 batches before: nominally the reference (the plan's, or the first
  measured one).  The wait is what is left of the latency at the commit before; a batch that is late already is taken for the median of those later still.

A step is predicted twice: *ahead*, at the commit before, when its batch may still be open; and at its *start*, when the batch is complete, so that the wait
and the tokens are known and training of it begins.

*The latency's factor* is measured over nominal seconds: the median of its last `RECENT` = 24 ratios, so that single outliers count for nothing.  When
the last `RUN` = 6 ratios all lie on one side of the median of the ones before, by more than `TOLERANCE` = 10 % in their own median, the older ones are
forgotten.  A drift reported from outside leaves the newest `KEPT` = 2 ratios.  A factor is between 1 / `BOUND` and `BOUND` = 8: a reference that is
further off was made for other hardware, and is replaced by what is measured.  Factors are kept apart by the number of rollout nodes; a number that is new
starts from the one seen last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from statistics import median

import msgspec

from .trainlaw import RECENT, RUN, WARM, Load, TrainLaw, shifted

BOUND = 8.0
KEPT = 2
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
        if shifted(run, median(before)):
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
    predicted_start_s: float | None
    """The same, as predicted when its batch was complete and the trainers were free."""
    measured_s: float
    predicted_train_s: float | None
    """Of training the batch, as predicted then."""
    measured_train_s: float
    latency_s: float | None = None
    """From the commit that admitted the batch's prompts until it was complete; None when that was before this attempt, or nobody wrote it down."""


class _Next(msgspec.Struct):
    """What is predicted for the step that runs."""

    step: int
    split: Split
    load: Load
    ahead: float | None
    start: float | None = None
    train: float | None = None


class StepForecast:
    """Told of every complete batch and every commit in order of time; times are seconds of one clock."""

    def __init__(self, eta: int, train_s_per_token: float = 0.0, latency_s: float = 0.0) -> None:
        self.train, self.latency = TrainLaw(train_s_per_token), Term(latency_s)
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
            self._begin(following, tokens, now - self._commits[step - 1], now)

    def committed(self, step: int, split: Split, step_s: float, wait_s: float, train_s: float, now: float) -> PredictedStep:
        """A step is committed: compare it with its prediction, learn from it, and predict the one after it."""
        tokens = self._ready.pop(step, 0)
        made = self._next if self._next is not None and self._next.step == step else None
        load = made.load if made is not None and made.split == split else self._load(step, tokens, split, wait_s, now - train_s)
        self.train.measured(split.replicas, load, train_s)
        self._commits[step] = now
        for old in [s for s in self._commits if s < step - self._eta - 1]:
            del self._commits[old]
        self._next = self._predict(step + 1, split, now)
        ahead, start, train = (None, None, None) if made is None else (made.ahead, made.start, made.train)
        return PredictedStep(step, ahead, start, step_s, train, train_s, self._latencies.pop(step, None))

    def drifted(self) -> None:
        """Lengths changed: latencies measured before count less; the law of training knows tokens."""
        self.latency.decay()

    @property
    def upcoming(self) -> float | None:
        """Predicted seconds of the step that runs."""
        if self._next is None:
            return None
        return self._next.ahead if self._next.start is None else self._next.start

    def _predict(self, step: int, split: Split, now: float) -> _Next:
        complete = self._ready.get(step)
        if complete is not None:
            made = _Next(step, split, Load(0.0), None)
            self._begin(made, complete, 0.0, now)
            made.ahead = made.start
            return made
        admitted = self._commits.get(step - 1 - self._eta)
        passed = 0.0 if admitted is None else now - admitted
        whole = None if admitted is None else self.latency.predict(split.rollout_nodes, 1.0, passed)
        wait = 0.0 if whole is None else whole - passed
        load = self._load(step, median(self._sizes) if self._sizes else 0.0, split, wait, now + wait)
        train = self.train.predict(split.replicas, load)
        return _Next(step, split, load, None if train is None or whole is None else wait + train)

    def _begin(self, made: _Next, tokens: int, wait: float, now: float) -> None:
        """The batch is there: the wait and the size are known."""
        made.load = self._load(made.step, tokens, made.split, wait, now)
        made.train = self.train.predict(made.split.replicas, made.load)
        made.start = None if made.train is None else wait + made.train

    def _load(self, step: int, tokens: float, split: Split, wait: float, begins: float) -> Load:
        """Of a step whose training ``begins`` so many seconds after the commit before; the next batch was admitted eta commits before it."""
        whole = self.latency.predict(split.rollout_nodes, 1.0)
        admitted = self._commits.get(step - self._eta, begins)
        left = 1.0 - (begins - admitted) / whole if whole else 0.0
        return Load(tokens / split.replicas, min(1.0, max(0.0, left)), wait <= AT_ONCE)
