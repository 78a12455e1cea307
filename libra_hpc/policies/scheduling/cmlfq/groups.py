"""Statistics of tasks and prompts: how long the trajectories of a prompt are, compared with those of its task.

The *gap* of a prompt is the mean of log total - E[log total of the task] over its trajectories:

- A finished one -> its total, discounted by weight version.
- A running sibling -> E[log total | as long as now], with the weight P(total < attained).  So a group counts as long
  before any of it has finished.

The gap is shrunk by n / (n + k); exp of it is the *scale* of the prompt.  Each finished trajectory is predicted under
every k before it is learned, and the k with the least decayed squared error applies.  Infinity ignores siblings.
"""

from __future__ import annotations

from math import exp, inf
from typing import Final

from .blend import PLAIN_FEATURES, Blend
from .signal_effect import Gate, SignalEffect
from .survival import HALF_LIFE, Survival

K_PROMPT: Final[tuple[float, ...]] = (0.5, 2.0, 8.0, inf)
"""Prompts explain 0.59 of the variance of lengths on tau-bench, and nothing on some data sets."""
MAX_GAP: Final = 2.3
"""Bound of a shrunk gap: ten times shorter or longer than the task."""
ERROR_DECAY: Final = 0.98
"""Memory of the errors behind k: 50 trajectories."""
FIRST_K: Final = 1
"""Index of the first k: one finished sibling counts a third."""


class TaskStats:
    """Statistics of one task, or of all."""

    def __init__(self) -> None:
        self.tables = (Survival(), Survival())
        """Of totals; and of totals / scale, for prompts with finished trajectories."""
        self.errors = [0.0] * len(K_PROMPT)
        self.k = K_PROMPT[FIRST_K]
        self.tokens_per_turn = 128.0
        self.plain, self.full = Blend(PLAIN_FEATURES), Blend()
        """Estimates without and with tool results."""
        self.gate = Gate()
        """Whether tool results are used."""
        self.effects: dict[int, SignalEffect] = {}
        """By the last symbol."""

    def evaluate(self, log_total: float, gap: float, count: float) -> None:
        """Predict a finished trajectory from its siblings' gap under every k, and choose k."""
        off = log_total - self.tables[0].log_total[0]
        errors = self.errors
        for i, k in enumerate(K_PROMPT):
            miss = off - gap * count / (count + k)
            errors[i] = ERROR_DECAY * errors[i] + miss * miss
        self.k = K_PROMPT[errors.index(min(errors))]


class PromptGroup:
    """Statistics of one prompt."""

    def __init__(self, task: TaskStats) -> None:
        self.task = task
        self.finished = self._sum = 0.0
        """Decayed number of finished trajectories, and the sum of their log totals."""
        self.running = self.running_sum = 0.0
        """Weights of running trajectories, and the weighted sum of their gaps."""
        self._version = 0
        self.scale = 1.0
        self.log_scale = 0.0

    def gap(self) -> tuple[float, float]:
        """Mean gap, and the number of trajectories behind it."""
        count = self.finished + self.running
        if count <= 0.0:
            return 0.0, 0.0
        return (self._sum - self.finished * self.task.tables[0].log_total[0] + self.running_sum) / count, count

    def rescale(self) -> None:
        """Update ``scale``."""
        gap, count = self.gap()
        gap *= count / (count + self.task.k)
        self.log_scale = gap = gap if -MAX_GAP < gap < MAX_GAP else MAX_GAP if gap > 0.0 else -MAX_GAP
        self.scale = exp(gap)

    def learn(self, log_total: float, version: int) -> None:
        """Add a finished trajectory."""
        if version > self._version:
            decay = 0.5 ** ((version - self._version) / HALF_LIFE)
            self._version = version
            self.finished *= decay
            self._sum *= decay
        self.finished += 1.0
        self._sum += log_total
        self.rescale()
