"""Guards of learning: what a run's own history says about its last steps.

- Reward far below the run's best -> *broken*.
- The engines' log-probabilities far from the trainer's -> *broken*: samples are weighted wrongly.
- Nearly all groups have equal rewards -> nothing is learned; broken only where the reward is below its best.
- Entropy far from its history -> a notice, never more: it also falls where a task is solved.
- A guard begins to hold -> a notice.  It is of the broken ones and has held for `HOLD` steps -> pause or stop.

Pure: one line of ``metrics.jsonl`` a step, in order.  All means are over the last `WINDOW` steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from statistics import median
from typing import Literal, NamedTuple

WINDOW = 10
"""Steps of a mean.  Half: the noise of batches is sqrt(2) times as large; double: a break is seen 10 steps later."""
LEAST = 2 * WINDOW
"""Steps before anything is judged."""
HOLD = 15
"""Steps between notice and action.  Half: a dip of a few batches, which stays in the mean for `WINDOW` steps, ends a
run; double: 15 more steps are lost."""
NOISE = 7.0
"""Standard errors of a mean that are no chance: of a thousand means the highest and the lowest differ by about 6."""
SPREAD = 0.25
"""Standard deviations of the trajectories' rewards on top of that: means differ so far with the data."""
EQUAL = 0.95
"""Share of groups of equal rewards."""
GAP, GAP_NATS = 5.0, 0.1
"""Times the median of its history, and nats: engines in bfloat16 are at 0.01 to 0.05."""
ENTROPY = 4.0
"""Times its median, or one part in so many of it."""

READ = ("reward", "reward_std", "equal_groups", "entropy", "logprob_gap")
"""Columns of ``metrics.jsonl``; a value that is missing or not finite is left out."""

Action = Literal["notice", "pause", "stop"]


class GuardDecision(NamedTuple):
    """What follows from a step, and why."""

    action: Action
    reason: str
    good_step: int
    """The last step before the guard began to hold, less the window that hid it."""


class _Finding(NamedTuple):
    guard: str
    reason: str
    broken: bool


class LearningGuards:
    """`observe` takes every step once; ``action`` is the strongest answer."""

    def __init__(self, action: Action) -> None:
        self._action = action
        self._values: dict[str, list[float]] = {name: [] for name in READ}
        self._best = -math.inf
        """Highest mean reward of a window before the newest one."""
        self._since: dict[str, int] = {}
        """Guard -> the step at which it began to hold."""
        self._over = False

    def observe(self, line: Mapping[str, float | None]) -> GuardDecision | None:
        """Judge a step; None: nothing new."""
        for name, values in self._values.items():
            value = line.get(name)
            if value is not None and math.isfinite(value):
                values.append(value)
        rewards = self._values["reward"]
        if len(rewards) <= LEAST:
            return None
        self._best = max(self._best, _mean(rewards[-2 * WINDOW : -WINDOW]))
        step, found = int(line["step"] or 0), self._findings()
        self._since = {one.guard: self._since.get(one.guard, step) for one in found}
        for one in found:
            began = self._since[one.guard]
            held = one.broken and step - began >= HOLD and not self._over
            if began == step or (held and self._action != "notice"):
                self._over = self._over or held
                return GuardDecision(self._action if held else "notice", one.reason, max(0, began - WINDOW))
        return None

    def _findings(self) -> list[_Finding]:
        found = [self._reward(), self._gap(), self._equal(), self._entropy()]
        return [one for one in found if one is not None]

    def _fall(self) -> tuple[float, float, float]:
        """Mean reward of the newest window, how far it is below the best, and the fall that is no chance."""
        rewards = self._values["reward"]
        steps = [abs(b - a) for a, b in pairwise(rewards)]
        # Of a normal distribution: the median difference of two draws is 0.954 standard deviations.
        error = median(steps) / 0.954 / math.sqrt(WINDOW)
        recent = _mean(rewards[-WINDOW:])
        return recent, self._best - recent, NOISE * error + SPREAD * median(self._values["reward_std"])

    def _reward(self) -> _Finding | None:
        recent, fall, limit = self._fall()
        if fall <= limit:
            return None
        words = f"the reward fell from {self._best:.3g} to {recent:.3g}, means of {WINDOW} steps"
        return _Finding("reward", f"{words}; a fall of {limit:.2g} is no chance", broken=True)

    def _gap(self) -> _Finding | None:
        gaps = self._values["logprob_gap"]
        if len(gaps) <= LEAST:
            return None
        recent, usual = _mean(gaps[-WINDOW:]), median(gaps[:-WINDOW])
        if recent <= max(GAP * usual, GAP_NATS):
            return None
        words = "the engines' log-probabilities differ from the trainer's by"
        return _Finding("gap", f"{words} {recent:.2g} nats, {usual:.2g} before", broken=True)

    def _equal(self) -> _Finding | None:
        equal = _mean(self._values["equal_groups"][-WINDOW:])
        if not equal >= EQUAL:
            return None
        recent, fall, limit = self._fall()
        words = f"{equal:.0%} of the groups of {WINDOW} steps have equal rewards, mean {recent:.3g}: nothing is learned"
        return _Finding("equal", words, broken=fall > limit / 2.0)

    def _entropy(self) -> _Finding | None:
        values = self._values["entropy"]
        if len(values) <= LEAST:
            return None
        recent, usual = _mean(values[-WINDOW:]), median(values[:-WINDOW])
        if usual / ENTROPY <= recent <= usual * ENTROPY:
            return None
        return _Finding("entropy", f"the entropy is {recent:.2g} nats, {usual:.2g} before", broken=False)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan
