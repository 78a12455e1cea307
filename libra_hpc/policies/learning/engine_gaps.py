"""Which engine's log-probabilities differ from the trainer's by more than those of the others: it computes wrongly.

- Its mean gap is `TIMES` that of the others and `NATS` above -> it is reloaded: its process ends, and another begins.
- It is again, on tokens of after that -> it is closed.
- Several are -> one a step, borrowed ones first: the others may be right without it.
- Fewer than two others, or one own beside a borrowed one -> nobody knows which one is right.

A lender's engine has another name each time it comes, so its lender is what is closed at the second time.
Pure: one call a trained step.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Literal, NamedTuple

TIMES, NATS = 3.0, 0.1
"""Engines in bfloat16 are at 0.01 to 0.05; those whose weights are some versions older may be at twice the others."""
WINDOW = 10
"""Steps of a mean.  Half: a batch of few turns decides; double: a bad engine is trained on for longer."""
LEAST_TOKENS = 1000
"""An engine with fewer in them is neither judged nor compared with: the standard error of the mean is about 5 %."""

Gap = tuple[float, int]
"""Sum of |log pi_theta_old - log pi_behaviour|, and tokens."""


class EngineOff(NamedTuple):
    """An engine that is off, and what follows."""

    engine: str
    action: Literal["reload", "close"]
    reason: str


class EngineGaps:
    def __init__(self, eta: int) -> None:
        self._eta = eta
        self._windows: dict[str, deque[Gap]] = {}
        self._from: dict[str, int] = {}
        """The first step whose tokens an engine generated after it was reloaded."""
        self._times = Counter[str]()

    def observe(self, step: int, gaps: Mapping[str, Gap], lenders: Mapping[str, str]) -> EngineOff | None:
        """``gaps``: of a step's tokens, by engine; ``lenders``: of every engine that is there; empty: an own engine."""
        for engine in lenders.keys() & gaps.keys():
            if step >= self._from.get(engine, 0):
                self._windows.setdefault(engine, deque(maxlen=WINDOW)).append(gaps[engine])
        self._windows = {engine: window for engine, window in self._windows.items() if engine in lenders}
        means = dict(self._means())
        usual = {engine: self._usual(engine, means, lenders) for engine in means}
        off = [engine for engine, of in usual.items() if of is not None and means[engine] > max(TIMES * of, of + NATS)]
        if not off:
            return None
        engine = max(off, key=lambda one: (lenders[one] != "", means[one]))
        del self._windows[engine]
        # The staleness bound: what is trained later began after this step.
        self._from[engine] = step + self._eta + 2
        self._times[blamed := lenders[engine] or engine] += 1
        action: Literal["reload", "close"] = "close" if self._times[blamed] > 1 else "reload"
        far = f"differ from the trainer's by {means[engine]:.2g} nats, those of the others by {usual[engine]:.2g}"
        return EngineOff(engine, action, f"its log-probabilities {far}")

    def _means(self) -> Iterator[tuple[str, float]]:
        for engine, window in self._windows.items():
            if (tokens := sum(count for _, count in window)) >= LEAST_TOKENS:
                yield engine, sum(gap for gap, _ in window) / tokens

    def _usual(self, engine: str, means: Mapping[str, float], lenders: Mapping[str, str]) -> float | None:
        """The gap of the others; None while it proves nothing."""
        others = [other for other in means if other != engine]
        own = [other for other in others if not lenders[other]]
        enough = len(others) > 1 or (own and lenders[engine])
        return median(means[other] for other in others) if enough else None
