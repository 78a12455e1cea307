"""Seconds of a training step, as a law fitted to the steps measured last.

A step takes a fixed time and a time per token.  Where the stages share cores, memory or links, tokens take longer while the next batch is rolled out, so
that with non-negative a, b, c, d

    seconds = a + tokens * (b + c * open + d * at_once)

`Load.open` is the share of the next batch's latency that is left when training begins.  It begins ``at_once`` after the commit before, or later, when the
burst of turns after new credit is over.  On hardware of its own, c and d are about 0.

The coefficients are those of a robust fit of relative errors (`libra_hpc.hardware.fitting`) to the last `RECENT` = 24 steps of as many replicas; a step
counts half as much as one `HALF` = 8 steps later.  When the law is off to one side in `RUN` = 6 steps in a row, by more than `TOLERANCE` = 10 % in their
median, the steps before are forgotten: without a change six of one side happen by chance once in 32 looks and cost samples, no more.

Fewer than `FIT` = 6 steps say their median time per token; before the first one of so many replicas, the steps of the number seen last do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from statistics import median
from typing import NamedTuple

from libra_hpc.hardware.fitting import robust_fit

RECENT = 24
HALF = 8
RUN = 6
TOLERANCE = 0.1
FIT = 6
FAR = 0.1
"""Share of the median time per token below which the law is not believed."""
WARM = 3
"""Measured steps before one is predicted without a plan's reference."""


class Load(NamedTuple):
    """What is known of a training step when it begins."""

    tokens: float
    """Per replica."""
    open: float = 0.0
    """Share of the next batch's latency that is left, 0 .. 1."""
    at_once: bool = False
    """Whether it begins right after the commit before."""


class _Steps:
    """The steps of one number of replicas."""

    def __init__(self) -> None:
        self.measured: deque[tuple[Load, float]] = deque(maxlen=RECENT)
        self._ratios: deque[float] = deque(maxlen=RUN)
        """Measured over predicted seconds."""
        self._law: list[float] | None = None

    @property
    def per_token(self) -> float:
        """Median seconds per token."""
        return median(seconds / load.tokens for load, seconds in self.measured)

    def add(self, load: Load, seconds: float) -> None:
        """One measurement."""
        if self.measured:
            self._ratios.append(seconds / self.predict(load))
        self.measured.append((load, seconds))
        ratios, self._law = self._ratios, None
        if len(ratios) == RUN and shifted(ratios, 1.0):
            self.measured = deque(list(self.measured)[-RUN:], maxlen=RECENT)
            ratios.clear()

    def predict(self, load: Load) -> float:
        """Seconds of a step; needs a measurement."""
        if len(self.measured) < FIT:
            return load.tokens * self.per_token
        if self._law is None:
            newest = len(self.measured) - 1
            trust = [0.5 ** ((newest - number) / HALF) for number in range(newest + 1)]
            self._law = robust_fit([_features(one) for one, _ in self.measured], [seconds for _, seconds in self.measured], trust)
        fitted = sum(c * x for c, x in zip(self._law, _features(load), strict=True))
        # Where every measured step had an open share or began at once, these may take all of the law, and it says next to nothing of a step that has neither.
        typical = load.tokens * self.per_token
        return fitted if fitted > FAR * typical else typical


class TrainLaw:
    """See the module; ``reference`` is a plan's seconds per token and replica, 0 without a plan."""

    def __init__(self, reference: float = 0.0) -> None:
        self._reference, self._given = reference, reference > 0.0
        self._steps: dict[int, _Steps] = {}
        self._last = _Steps()

    def measured(self, replicas: int, load: Load, seconds: float) -> None:
        """One step took so long; without tokens or time it says nothing."""
        if load.tokens <= 0.0 or seconds <= 0.0:
            return
        self._reference = self._reference or seconds / load.tokens
        self._last = self._steps.setdefault(replicas, _Steps())
        self._last.add(load, seconds)

    def predict(self, replicas: int, load: Load) -> float | None:
        """Seconds of a step; None while too little is known."""
        known = sum(len(steps.measured) for steps in self._steps.values())
        if load.tokens <= 0.0 or (known < WARM and not self._given):
            return None
        steps = self._steps.get(replicas, self._last)
        return steps.predict(load) if steps.measured else load.tokens * self._reference

    @property
    def present(self) -> float:
        """Measured over nominal seconds per token, of the number of replicas seen last; 1.0 before the first step."""
        return self._last.per_token / self._reference if self._last.measured else 1.0


def shifted(run: Collection[float], centre: float) -> bool:
    """The change test: whether all ratios of a run lie on one side of ``centre``, and their median off it by more than `TOLERANCE`."""
    one_side = all(ratio > centre for ratio in run) or all(ratio < centre for ratio in run)
    return one_side and abs(median(run) / centre - 1.0) > TOLERANCE


def _features(load: Load) -> list[float]:
    return [1.0, load.tokens, load.tokens * load.open, load.tokens * load.at_once]
