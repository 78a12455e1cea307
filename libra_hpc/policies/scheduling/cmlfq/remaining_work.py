"""The remaining-work estimator: tokens that a trajectory is expected to generate yet, learned online.

- *Prior*: the mean total of its task; before any end `PRIOR_TOKENS`.
- *Siblings*: n totals of its prompt count n / (n + `SIBLINGS_K`).
- A running trajectory that has outlived its task's mean counts with what it has generated: the first to end are short.
- *Work done*: of m expected tokens ``hypot(max(0, m - a), TAIL * a)`` are left after a: first fewer, then a heavy tail.
- *Last tool outcome*: times the tokens that followed this outcome over those that were expected then.  One table, by
  tool, outcome and power of two of failing tests; `OUTCOME_K` mean totals shrink it to 1.
- *Room*: of m expected tokens m b / (m + b) remain if the context has room for b: a Pareto tail of index 2, cut at b.

Evidence halves every `HALF_LIFE` weight versions.
"""

from __future__ import annotations

from collections import OrderedDict
from math import inf, sqrt
from typing import Final

from libra_hpc.policies.scheduling.protocol import Finished
from libra_hpc.protocol.env import Signal

PRIOR_TOKENS: Final = 512.0
"""A few agentic turns."""
PRIOR_K: Final = 2.0
"""Trajectories that `PRIOR_TOKENS` is worth."""
SIBLINGS_K: Final = 2.0
"""Siblings that the mean of their task is worth: one finished sibling counts a third."""
OUTCOME_K: Final = 8.0
"""Tool outcomes explain at most 0.09 of what is left on SWE and tau-bench records."""
TAIL: Final = 1.0
"""Tokens left over those generated, once they outlive the mean: a Pareto tail of index 2."""
TURN_TOKENS: Final = 128.0
"""Generated tokens that smooth what tools add to each."""
HALF_LIFE: Final = 16.0
"""Weight versions: within one epoch of a small data set."""
REACH_FACTOR: Final = 2.0
"""Reach over expected tokens: fourth root of the mean fourth power, for errors as large as the estimate (2.2 for an
exponential).  1.3 is up to 2 % slower."""
MAX_KEYS: Final = 8192
"""Prompts, of which the least recently learned is dropped first; and rows of the table, whose later ones are 1."""


class ShrunkRatio:
    """One sum over another, shrunk to a prior."""

    def __init__(self) -> None:
        self.sum = self.count = 0.0
        self._version = 0

    def add(self, value: float, count: float, version: int) -> None:
        """Add evidence of a weight version."""
        if version > self._version:
            decay = 0.5 ** ((version - self._version) / HALF_LIFE)
            self._version, self.sum, self.count = version, decay * self.sum, decay * self.count
        self.sum += value
        self.count += count

    def value(self, prior: float, weight: float) -> float:
        """The ratio if ``weight`` more of the count were at ``prior``."""
        return (weight * prior + self.sum) / (weight + self.count)


class Cursor:
    """One running trajectory."""

    def __init__(self, task: ShrunkRatio, prompt: ShrunkRatio) -> None:
        self.task, self.prompt = task, prompt
        """Totals."""
        self.mean = self.total = self.siblings = 0.0
        """Expected total by its task; by its siblings too; their number."""
        self.left = self.reach = self.future = 0.0
        """Expected tokens to generate; an upper estimate; tokens that its tools are expected to add."""
        self.outcome: ShrunkRatio | None = None
        self.factor = 1.0
        """Row of its last tool outcome in the table, and that row's value."""
        self.counted = 0.0
        """Tokens with which it counts among the totals."""
        self.payload = 0
        """Tokens that its tools have added."""
        self.trail: list[tuple[ShrunkRatio | None, float]] = []
        """By tool outcome: its row, and the tokens expected then."""

    def work(self, context: float) -> float:
        """Expected tokens times its mean context meanwhile; ``context`` is the present one."""
        return self.left * (context + 0.5 * (self.left + self.future))

    def count(self, tokens: float, version: int = 0) -> None:
        """Count among the totals with so many tokens; with 0, as when it is aborted, not at all."""
        added, more = tokens - self.counted, float((tokens > 0.0) - (self.counted > 0.0))
        self.counted = tokens
        self.task.add(added, more, version)
        self.prompt.add(added, more, version)

    def expect(self, attained: int) -> float:
        """Tokens left by prior, siblings and work done."""
        self.mean = self.total = self.task.value(PRIOR_TOKENS, PRIOR_K)
        self.siblings = siblings = self.prompt.count - 1.0 if self.counted else self.prompt.count
        if siblings > 0.0:
            others = max(0.0, self.prompt.sum - self.counted)
            self.total = (SIBLINGS_K * self.mean + others) / (SIBLINGS_K + siblings)
        ahead, tail = max(0.0, self.total - attained), TAIL * attained
        return sqrt(ahead * ahead + tail * tail)

    def estimate(self, left: float, attained: int, room: float) -> float:
        """Apply the last tool outcome and the room of the context to what `expect` found."""
        if self.outcome is not None:
            self.factor = self.outcome.value(1.0, OUTCOME_K * self.mean)
            left *= self.factor
        self.reach = REACH_FACTOR * left
        if room < inf:
            room = max(room, 1.0)
            if attained:
                room *= attained / (attained + self.payload)
            left *= room / (left + room)
            self.reach = min(self.reach, room)
        self.left, self.future = left, left * self.payload / (attained + TURN_TOKENS)
        return left


class RemainingWorkEstimator:
    """Learns from finished trajectories, and estimates what running ones have left."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._tasks: dict[str, ShrunkRatio] = {}
        self._prompts: OrderedDict[str, ShrunkRatio] = OrderedDict()
        self._outcomes: dict[tuple[str, str, int], ShrunkRatio] = {}

    def __len__(self) -> int:
        """Number of prompts and rows of the table."""
        return len(self._prompts) + len(self._outcomes)

    def cursor(self, prompt_id: str, task: str) -> Cursor:
        """A cursor for a trajectory that starts."""
        if prompt_id not in self._prompts:
            self._prompts[prompt_id] = ShrunkRatio()
            if len(self._prompts) > self._max_keys:
                self._prompts.popitem(last=False)
        return Cursor(self._tasks.setdefault(task, ShrunkRatio()), self._prompts[prompt_id])

    def advance(self, cursor: Cursor, signals: tuple[Signal, ...], attained: int, room: float = inf) -> float:
        """Read the new signals; returns the expected tokens left after ``attained`` generated ones.

        ``room``: tokens that the context has room for.
        """
        if attained > cursor.counted and attained > cursor.task.value(PRIOR_TOKENS, PRIOR_K):
            cursor.count(float(attained))
        expected = cursor.expect(attained)
        for i in range(len(cursor.trail), len(signals)):
            cursor.outcome = self._row(signals[i])
            cursor.payload += signals[i].payload_tokens
            cursor.trail.append((cursor.outcome, expected))
        return cursor.estimate(expected, attained, room)

    def peek(self, cursor: Cursor, attained: int, room: float = inf) -> Cursor:
        """A separate cursor for the middle of a turn, from which nothing is learned."""
        middle = Cursor(cursor.task, cursor.prompt)
        middle.outcome, middle.payload, middle.counted = cursor.outcome, cursor.payload, cursor.counted
        middle.estimate(middle.expect(attained), attained, room)
        return middle

    def insert(self, record: Finished) -> None:
        """Learn from a completed trajectory that had no cursor, such as one of an earlier run."""
        cursor = self.cursor(record.prompt_id, record.task)
        for count, at in enumerate(record.at_signal[: len(record.signals)]):
            self.advance(cursor, record.signals[: count + 1], at)
        self.finish(cursor, record)

    def finish(self, cursor: Cursor, record: Finished) -> None:
        """Learn from a completed trajectory."""
        total = max(1, record.generated_tokens)
        for (row, expected), at in zip(cursor.trail, record.at_signal, strict=False):
            # No decision follows the last token, so there is nothing to learn.
            if row is not None and total > at:
                row.add(float(total - at), expected, record.version)
        cursor.count(float(total), record.version)
        if record.prompt_id in self._prompts:
            self._prompts.move_to_end(record.prompt_id)

    def _row(self, signal: Signal) -> ShrunkRatio | None:
        """The table's row of a tool outcome; None if it is full."""
        outcome = "error" if signal.exit_code and signal.outcome == "ok" else signal.outcome
        key = (signal.tool, outcome, -1 if signal.failed is None else signal.failed.bit_length())
        if key not in self._outcomes and len(self._outcomes) < self._max_keys:
            self._outcomes[key] = ShrunkRatio()
        return self._outcomes.get(key)
