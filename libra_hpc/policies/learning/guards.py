"""Guards of learning: what a run's own history shows of its last steps.

- Reward far below the run's best -> *reward*, a notice: data that become harder do the same.
- Nearly all groups have equal rewards -> *equal*, a notice: also where a task is solved.
- Entropy far from its history -> *entropy*, a notice: it also falls where a task is solved.
- *reward* with *equal* or *entropy* -> *collapse*: the policy itself has changed, or learns nothing any more.
- The engines' log-probabilities far from the trainer's, or from what they were -> *gap*: samples are weighted wrongly.
- The gap is above `CACHE_NATS` with KV caches in FP8, whose scales are 1 -> *cache*, from the first step on.
- *cache* where no sample is stale -> pause or stop at once: nothing but the caches differs.
- *collapse*, *gap* or *cache* has held for `HOLD` steps -> pause or stop.  Whoever resumes accepts that: history begins
  again.

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
"""Steps before anything but *cache* is judged."""
HISTORY = 400
"""Steps of a median.  Half: a break that takes 100 steps becomes usual; double: a start reads its history slower."""
HOLD = 15
"""Steps between notice and action.  Half: a dip of a few batches, which stays in the mean for `WINDOW` steps, ends a
run; double: 15 more steps are lost."""
NOISE = 7.0
"""Standard errors of a mean that are no chance: of a thousand means the highest and the lowest differ by about 6."""
SPREAD = 0.25
"""Standard deviations of the trajectories' rewards on top of that: means differ so far with the data."""
SHARE = 0.25
"""Share of the best mean by which the reward must fall at least: a task that is solved has neither noise nor spread."""
EQUAL = 0.95
"""Share of groups of equal rewards."""
GAP, GAP_NATS = 5.0, 0.1
"""Times the median of its history, and nats: engines in bfloat16 are at 0.01 to 0.05."""
GAP_MOST = 0.5
"""Nats, whatever its history: half of the tokens weigh 1.6 times too much or too little.  A tenth: policies with a high
rate are there by staleness; double: engines that compute wrongly from the first step on are never named."""
ENTROPY = 4.0
"""Times its median, or one part in so many of it."""

CACHE_NATS = 0.05
"""With KV caches in FP8: more than in bfloat16, so the caches are the cause, or stale samples of a policy with a high
rate are.  Half: usual runs pause; double: outlying keys, which cost 0.1 to 3 nats, may pass."""

READ = ("reward", "reward_std", "equal_groups", "entropy", "logprob_gap")
"""Columns of ``metrics.jsonl``; a value that is missing or not finite is left out."""
BROKEN = ("collapse", "gap", "cache")
"""Guards that lead to an action."""

Action = Literal["notice", "pause", "stop"]


class GuardDecision(NamedTuple):
    """What follows from a step, and why."""

    action: Action
    reason: str
    good_step: int
    """The last step at which the reward was near the run's best, less the window that hid the fall."""


class LearningGuards:
    """`observe` takes every step once; ``action`` is the strongest answer."""

    def __init__(self, action: Action, fp8_caches: bool = False) -> None:
        self._action, self._fp8_caches = action, fp8_caches
        self._values: dict[str, list[float]] = {}
        self._steps: list[int] = []
        """Steps of the rewards."""
        self.active: dict[str, str] = {}
        """Guards that hold after the last step, with their reasons."""
        self._since: dict[str, int] = {}
        """Guard -> the step at which it began to hold."""
        self._noticed: dict[str, int] = {}
        """Guard -> the last step at which it was active."""
        self._fresh = False
        """Whether no sample of the last step is stale."""
        self.good_step: int | None = None
        """While the reward, or the gap, is far off: that of the first decision."""
        self._begin()

    @property
    def acts_at(self) -> int | None:
        """The step of the action, unless what holds ends; None: there will be none."""
        broken = [guard for guard in BROKEN if guard in self.active and self._action != "notice"]
        holds = [self._since[guard] + (0 if guard == "cache" and self._fresh else HOLD) for guard in broken]
        return min(holds, default=None)

    def _begin(self) -> None:
        self._values = {name: [] for name in READ}
        self._steps, self._since, self._noticed, self.active, self.good_step = [], {}, {}, {}, None
        self._best = -math.inf
        """Highest mean reward of a window before the newest one."""

    def observe(self, line: Mapping[str, float | None]) -> GuardDecision | None:
        """Judge a step; None: nothing new."""
        step, self._fresh = int(line["step"] or 0), line.get("staleness_max") == 0
        for name, values in self._values.items():
            value = line.get(name)
            if value is not None and math.isfinite(value):
                values.append(value)
                self._steps += [step] if name == "reward" else []
                del values[:-HISTORY]
        del self._steps[:-HISTORY]
        rewards, cache = self._values["reward"], self._cache()
        self.active = {"cache": cache} if cache else {}
        if len(rewards) > LEAST:
            self._best = max(self._best, _mean(rewards[-2 * WINDOW : -WINDOW]))
            self.active |= self._findings()
        self._since = {guard: self._since.get(guard, step) for guard in self.active}
        if not self.active.keys() & {"reward", *BROKEN}:
            self.good_step = None
        elif self.good_step is None:
            self.good_step = self._near_best()
        return self._decide(step)

    def _decide(self, step: int) -> GuardDecision | None:
        new = [guard for guard in self.active if step - self._noticed.get(guard, -WINDOW) >= WINDOW]
        self._noticed |= dict.fromkeys(self.active, step)
        good = self._near_best() if self.good_step is None else self.good_step
        if (at := self.acts_at) is not None and step >= at:
            reason = "; ".join(self.active[guard] for guard in BROKEN if guard in self.active)
            self._begin()
            return GuardDecision(self._action, reason, good)
        return GuardDecision("notice", "; ".join(self.active[guard] for guard in new), good) if new else None

    def _findings(self) -> dict[str, str]:
        found = {"gap": self._gap(), "reward": self._reward(), "equal": self._equal(), "entropy": self._entropy()}
        why = found["equal"] or found["entropy"]
        if found["reward"] and why:
            found |= {"collapse": f"{found['reward']}; {why}", "reward": "", "equal": "", "entropy": ""}
        return {guard: reason for guard, reason in found.items() if reason}

    def _limit(self) -> float:
        """The fall of the reward that is no chance."""
        steps = [abs(b - a) for a, b in pairwise(self._values["reward"])]
        # Of a normal distribution: the median difference of two draws is 0.954 standard deviations.
        error = median(steps) / 0.954 / math.sqrt(WINDOW)
        chance = NOISE * error + SPREAD * median(self._values["reward_std"] or [0.0])
        return max(chance, SHARE * abs(self._best))

    def _near_best(self) -> int:
        rewards = self._values["reward"]
        if len(rewards) <= LEAST:
            return 0
        near = self._best - self._limit() / 2.0
        ends = range(len(rewards), WINDOW, -1)
        end = next((end for end in ends if _mean(rewards[end - WINDOW : end]) >= near), WINDOW)
        return max(0, self._steps[end - 1] - WINDOW)

    def _reward(self) -> str:
        recent, limit = _mean(self._values["reward"][-WINDOW:]), self._limit()
        if self._best - recent <= limit:
            return ""
        words = f"the reward fell from {self._best:.3g} to {recent:.3g}, means of {WINDOW} steps"
        return f"{words}; {limit:.2g} may be chance"

    def _gap(self) -> str:
        recent, usual = self._recent_and_usual("logprob_gap")
        if math.isnan(usual) or recent <= min(max(GAP * usual, GAP_NATS), GAP_MOST):
            return ""
        return f"the engines' log-probabilities differ from the trainer's by {recent:.2g} nats, {usual:.2g} before"

    def _cache(self) -> str:
        recent = _mean(self._values["logprob_gap"][-WINDOW:])
        if not (self._fp8_caches and recent > CACHE_NATS):
            return ""
        return f'beside KV caches in FP8 the gap is {recent:.2g} nats; rollout.kv_dtype = "auto" has none of it'

    def _equal(self) -> str:
        equal = _mean(self._values["equal_groups"][-WINDOW:])
        return f"{equal:.0%} of the groups have equal rewards: nothing is learned" if equal >= EQUAL else ""

    def _entropy(self) -> str:
        recent, usual = self._recent_and_usual("entropy")
        if math.isnan(usual) or usual / ENTROPY <= recent <= usual * ENTROPY:
            return ""
        return f"the entropy is {recent:.2g} nats, {usual:.2g} before"

    def _recent_and_usual(self, column: str) -> tuple[float, float]:
        """Mean of the last values, and the median of those before; NaN while there are too few."""
        values = self._values[column]
        return _mean(values[-WINDOW:]), median(values[:-WINDOW]) if len(values) > LEAST else math.nan


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan
