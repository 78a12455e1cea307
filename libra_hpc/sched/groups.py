"""Prompts and tasks: how long the trajectories of this prompt are, compared with those of its task.

A prompt's *gap* is the mean of log total - E[log total] of the task over its trajectories: the finished ones of its
history and of the running group (the same sum, in which age discounts the former), and the running siblings, whose
total is imputed as E[log total | so long already] with the weight P(total < attained): nothing at their start, nearly
one when they outlived almost everybody.  So a group is known to be long before any of it has finished.

The gap is shrunk by n / (n + k).  What a prompt is worth depends on the data set (on tau-bench it explains 0.59 of the
variance of lengths, on some sets nothing), so k is chosen on held-out data: each finished trajectory is predicted from
its siblings under every k of `K_PROMPT` = 0.5, 2, 8, infinity before it is learned, and the k with the least decayed
squared error of the logarithm rules (the absolute error cannot tell apart predictions between two modes). Infinity
ignores siblings, which makes uninformative prompts harmless.  exp(shrunk gap) is the prompt's *scale*: its trajectories
are those of the task, stretched by so much.
"""

from __future__ import annotations

from collections import OrderedDict
from math import exp, inf
from typing import Final

from .blend import PLAIN_FEATURES, Blend
from .signal_effect import Gate, SignalEffect
from .survival import HALF_LIFE, Survival

K_PROMPT: Final[tuple[float, ...]] = (0.5, 2.0, 8.0, inf)
MAX_GAP: Final = 2.3
"""Bound of a shrunk gap: ten times shorter or longer than the task."""
ERROR_DECAY: Final = 0.98
"""Memory of the errors behind k: 50 trajectories."""
FIRST_K: Final = 1
"""Index of the k that rules before anything is known: one finished sibling counts a third."""


class TaskStats:
    """What is known of one task, or of all."""

    __slots__ = ("errors", "full", "gate", "k", "pairs", "plain", "singles", "tables", "tokens_per_turn")

    def __init__(self) -> None:
        self.tables = (Survival(), Survival())
        """Of totals, and of totals / scale of trajectories whose prompt has finished ones."""
        self.errors = [0.0] * len(K_PROMPT)
        self.k = K_PROMPT[FIRST_K]
        self.tokens_per_turn = 128.0
        self.plain, self.full = Blend(PLAIN_FEATURES), Blend()
        """Estimates without and with what tools said."""
        self.gate = Gate()
        """Whether what tools said pays."""
        self.singles: dict[int, SignalEffect] = {}
        """By the last symbol."""
        self.pairs: OrderedDict[int, SignalEffect] = OrderedDict()
        """By the last two symbols, least recently learned first."""

    def evaluate(self, log_total: float, gap: float, count: float) -> None:
        """Predict a finished trajectory from its siblings' gap under every k."""
        off = log_total - self.tables[0].log_total[0]
        errors = self.errors
        for i, k in enumerate(K_PROMPT):
            miss = off - gap * count / (count + k)
            errors[i] = ERROR_DECAY * errors[i] + miss * miss
        self.k = K_PROMPT[errors.index(min(errors))]

    def copied(self) -> TaskStats:
        """The same knowledge, which from now on goes its own way."""
        other = TaskStats()
        other.tables = (self.tables[0].copied(), self.tables[1].copied())
        other.errors, other.k, other.tokens_per_turn = self.errors[:], self.k, self.tokens_per_turn
        other.plain, other.full, other.gate = self.plain.copied(), self.full.copied(), self.gate.copied()
        other.singles = {symbol: node.copied() for symbol, node in self.singles.items()}
        other.pairs = OrderedDict((key, node.copied()) for key, node in self.pairs.items())
        return other


class PromptGroup:
    """What is known of one prompt."""

    __slots__ = ("_sum", "_version", "effects", "finished", "log_scale", "running", "running_sum", "scale", "task")

    def __init__(self, task: TaskStats) -> None:
        self.task = task
        self.finished = self._sum = 0.0
        """Evidence: decayed number of finished trajectories, and the sum of their log totals."""
        self.running = self.running_sum = 0.0
        """Weights of the running ones, and the weighted sum of their gaps."""
        self._version = 0
        self.scale = 1.0
        self.log_scale = 0.0
        self.effects: dict[int, SignalEffect] = {}
        """By the last symbol, at most `tree.MAX_OWN`, first come."""

    def gap(self) -> tuple[float, float]:
        """(mean gap, evidence)."""
        count = self.finished + self.running
        if count <= 0.0:
            return 0.0, 0.0
        return (self._sum - self.finished * self.task.tables[0].log_total[0] + self.running_sum) / count, count

    def rescale(self) -> None:
        """Bring ``scale`` up to date."""
        gap, count = self.gap()
        gap *= count / (count + self.task.k)
        self.log_scale = gap = gap if -MAX_GAP < gap < MAX_GAP else MAX_GAP if gap > 0.0 else -MAX_GAP
        self.scale = exp(gap)

    def learn(self, log_total: float, version: int) -> None:
        """One finished trajectory of the prompt."""
        if version > self._version:
            keep = 0.5 ** ((version - self._version) / HALF_LIFE)
            self._version = version
            self.finished *= keep
            self._sum *= keep
        self.finished += 1.0
        self._sum += log_total
        self.rescale()
