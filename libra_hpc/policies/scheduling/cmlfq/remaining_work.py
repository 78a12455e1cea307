"""The remaining-work estimator: tokens that a trajectory is expected to generate yet, learned online.

- *Prior*: the mean total of its task; before any end `PRIOR_TOKENS`.
- *Siblings*: n totals of its prompt count n / (n + `SIBLINGS_K`).
- *Work done*: of m expected tokens ``hypot(max(0, m - a), a)`` are left after a: first fewer, then a Pareto tail of
  index 2.
- *Room*: of m expected tokens m b / (m + b) remain if the context has room for b: the same tail, cut at b.
"""

from __future__ import annotations

from math import inf, sqrt
from typing import Final

PRIOR_TOKENS: Final = 512.0
"""A few agentic turns."""
PRIOR_K: Final = 2.0
"""Trajectories that `PRIOR_TOKENS` is worth."""
SIBLINGS_K: Final = 2.0
"""Siblings that the mean of their task is worth: one finished sibling counts a third."""
TURN_TOKENS: Final = 128.0
"""Generated tokens that smooth what tools add to each."""
KEEP: Final = 0.5 ** (1.0 / 4096.0)
"""Evidence halves in so many ends of a task, some eight batches, as lengths change while the model learns."""
REACH_FACTOR: Final = 2.0
"""Reach over expected tokens: fourth root of the mean fourth power, for errors as large as the estimate (2.2 for an
exponential).  1.3 is up to 2 % slower."""
MAX_PROMPTS: Final = 8192
"""Prompts, of which the one that started least recently is dropped first."""


class Totals:
    """Tokens of trajectories that ended."""

    def __init__(self) -> None:
        self.sum = self.count = 0.0

    def mean(self, prior: float, weight: float) -> float:
        """The mean if ``weight`` more of them had ``prior`` tokens."""
        return (weight * prior + self.sum) / (weight + self.count)


class Cursor:
    """One open trajectory."""

    def __init__(self, task: Totals, prompt: Totals, context: int) -> None:
        self.task, self.prompt, self.first_context = task, prompt, context
        self.mean = self.total = 0.0
        """Expected total by its task; by its siblings too."""
        self.left = self.reach = self.future = 0.0
        """Expected tokens to generate; an upper estimate; tokens that its tools are expected to add."""

    def work(self, context: float) -> float:
        """Expected tokens times its mean context meanwhile; ``context`` is the present one."""
        return self.left * (context + 0.5 * (self.left + self.future))

    def advance(self, attained: int, context: int, room: float = inf) -> float:
        """Expected tokens left after ``attained`` generated ones, if the context has room for ``room`` more."""
        self.mean = self.task.mean(PRIOR_TOKENS, PRIOR_K)
        self.total = self.prompt.mean(self.mean, SIBLINGS_K)
        ahead, done = max(0.0, self.total - attained), float(attained)
        left = sqrt(ahead * ahead + done * done)
        self.reach = REACH_FACTOR * left
        payload = max(0.0, context - self.first_context - done)
        if room < inf:
            room = max(room, 1.0) * (done / (done + payload) if attained else 1.0)
            left *= room / (left + room)
            self.reach = min(self.reach, room)
        self.left, self.future = left, left * payload / (done + TURN_TOKENS)
        return left


class RemainingWorkEstimator:
    """Learns from finished trajectories what running ones have left."""

    def __init__(self) -> None:
        self._tasks: dict[str, Totals] = {}
        self._prompts: dict[str, Totals] = {}

    def cursor(self, prompt_id: str, task: str, context: int = 0) -> Cursor:
        """A cursor for a trajectory that starts with a context of so many tokens."""
        prompt = self._prompts.pop(prompt_id, None) or Totals()
        self._prompts[prompt_id] = prompt
        if len(self._prompts) > MAX_PROMPTS:
            del self._prompts[next(iter(self._prompts))]
        return Cursor(self._tasks.setdefault(task, Totals()), prompt, context)

    def finish(self, cursor: Cursor, tokens: int) -> None:
        """Learn the total of a completed trajectory."""
        for totals in (cursor.task, cursor.prompt):
            totals.sum = KEEP * totals.sum + tokens
            totals.count = KEEP * totals.count + 1.0
