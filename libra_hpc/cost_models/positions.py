"""Seconds in which the open trajectories of one replica advance by one token each: their number and their context
decide.

*One step.*  A replica with n open trajectories of context k decodes a of them at once; the others are in a tool or wait
for a slot.  Per generated token a trajectory needs one step s, u seconds of tools, and p computed prompt tokens (tool
results, and context that the prefix cache lost), which share the steps as chunks.  In balance a = n s / (s + u), at
most ``max_num_seqs`` and at most what the KV cache holds; all n advance by one token in n s / a seconds, which is s + u
while nothing is short.

*Short KV.*  The a that decode hold their context; what is left of the cache keeps that of the n - a others, and none of
it once sequences wait.  What is lost comes back as prompt tokens at the next turn.  While sequences wait the cache is
full, and every token that is generated takes the place of another one: running sequences are preempted and computed
again (`PREEMPTED`).  Those that wait begin when others have ended.

Seconds are tabulated over n (a factor of sqrt 2 apart) and k (`CONTEXTS` values) and made non-decreasing in n, as
physics has them: the search relies on it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from libra_hpc.hardware.steps import StepTimes

from .factors import Factors
from .lengths import Lengths

CHUNK = 2048
"""Most prompt tokens of one step: vLLM's default budget of batched tokens."""
PREEMPTED = 0.5
"""Tokens computed again for each token generated while sequences wait for KV: 1 if a sequence that ends left no room
for the growth of the others; 0.3 (many turns) to 0.7 (one long turn) where `libra_hpc.simulator` counts them."""
CONTEXTS = 6
"""Contexts at which step times are tabulated; they are linear in the KV tokens of a batch, prefill is slightly
convex."""

Curve = list[float]
"""Values over the tabulated numbers of open trajectories."""


class PositionTable:
    """The table of one TP class for up to ``most`` open trajectories; ``steps.kv_capacity`` is not 0."""

    def __init__(
        self, steps: StepTimes, lengths: Lengths, factors: Factors, max_num_seqs: int, prefix_hits: float, most: float
    ) -> None:
        self._steps, self._lengths, self._factors = steps, lengths, factors
        self._max_num_seqs, self._prefix_hits = max_num_seqs, prefix_hits
        self.top = min(float(lengths.longest_context), float(steps.kv_capacity))
        """The longest context that is tabulated, tokens."""
        low = min(lengths.prompt, lengths.prompt_beside, self.top)
        growth = max(self.top, low + 1.0) / low
        self._contexts = [low * growth ** (k / (CONTEXTS - 1)) for k in range(CONTEXTS)]
        self._live = [2.0 ** (g / 2) for g in range(math.ceil(2 * math.log2(max(2.0, most))) + 2)]
        self._seconds: list[Curve] = []
        self._waits: list[Curve] = []
        for context in self._contexts:
            self._tabulate(context)

    @property
    def width(self) -> int:
        """Numbers of open trajectories that are tabulated."""
        return len(self._live)

    def seconds(self, context: float) -> Curve:
        """Seconds per position at ``context`` tokens."""
        return self._blend(self._seconds, context)

    def waits(self, context: float) -> Curve:
        """Seconds of a step of one sequence where some wait for a slot or KV, else 0."""
        return self._blend(self._waits, context)

    def between(self, context: float) -> tuple[int, float]:
        """The tabulated context below ``context``, and how far it is on the way to the next one."""
        contexts = self._contexts
        k = min(max(bisect_right(contexts, context) - 1, 0), len(contexts) - 2)
        return k, min(max((context - contexts[k]) / (contexts[k + 1] - contexts[k]), 0.0), 1.0)

    def point(self, k: int, weight: float, live: float) -> float:
        """Seconds per position of ``live`` trajectories whose context is `between`."""
        below, above = self.at(self._seconds[k], live), self.at(self._seconds[k + 1], live)
        return below + weight * (above - below)

    def at(self, curve: Curve, live: float) -> float:
        """Linear interpolation; the curve is constant below 1."""
        if live <= 1.0:
            return curve[0]
        grid = self._live
        g = min(int(2 * math.log2(live)), len(grid) - 2)
        return curve[g] + (curve[g + 1] - curve[g]) * (live - grid[g]) / (grid[g + 1] - grid[g])

    def _blend(self, table: list[Curve], context: float) -> Curve:
        k, weight = self.between(context)
        return [x + weight * (y - x) for x, y in zip(table[k], table[k + 1], strict=True)]

    def _tabulate(self, context: float) -> None:
        lengths, hits = self._lengths, self._prefix_hits
        again = max(0.0, lengths.turns_per_token - 1.0 / lengths.generated) * context
        room = self._steps.kv_capacity / context
        most = max(1.0, min(float(self._max_num_seqs), room))
        fresh = lengths.new_per_token + again * (1.0 - hits)
        rows = [(a, *self._step(a, context, max(lengths.turn_tokens, a * fresh))) for a in _batches(most)]
        # From its beginning, hence half of the context on average, and in whole chunks.
        preempted = PREEMPTED * self._step(int(most), context / 2, CHUNK)[1] if most >= room else 0.0
        replica = _Replica(
            rows,
            room,
            most,
            lengths.tool_s_per_token * self._factors.tool,
            lengths.new_per_token,
            again,
            hits,
            preempted,
        )
        positions = list(replica.positions(self._live))
        self._seconds.append(list(accumulate((seconds for seconds, _ in positions), max)))
        self._waits.append(list(accumulate((rows[0][1] * waiting for _, waiting in positions), max)))

    def _step(self, decodes: int, context: float, tokens: float) -> tuple[float, float]:
        """Seconds of a step that decodes only, and what each of so many prompt tokens beside it adds, or of a chunk
        if there are more."""
        kv = round(decodes * context)
        alone = self._steps.step_s(decodes, kv)
        chunk = max(1, min(CHUNK, round(tokens)))
        mixed = self._steps.step_s(decodes, kv, chunk, round(context))
        return alone * self._factors.decode, max(0.0, mixed - alone) / chunk * self._factors.prefill


class _Replica(NamedTuple):
    """One replica at one context."""

    rows: list[tuple[int, float, float]]
    """Batch size, seconds of a step that decodes only, and of each prompt token beside it; sizes rising up to the
    largest possible one."""
    room: float
    """Contexts the KV cache holds."""
    most: float
    """The largest batch."""
    tool: float
    """Seconds of tools per generated token."""
    new: float
    """Prompt tokens per generated token."""
    again: float
    """Tokens of earlier context that turns come back to, per generated token."""
    hits: float
    """Share of them that is cached when KV is not short."""
    preempted: float
    """Seconds of computing preempted sequences again, per generated token while some wait for KV."""

    def positions(self, lives: Sequence[float]) -> Iterator[tuple[float, bool]]:
        """For each number of ``lives``, which rise: seconds per position of so many trajectories, and whether some of
        them wait for others.

        In balance the batch is the one that tools empty as fast as they refill it.  It grows with the number of
        trajectories.
        """
        row = 0
        for live in lives:
            while row < len(self.rows) and self._balance(row, live)[0] < live:
                row += 1
            if row == len(self.rows):
                seconds = self._balance(row - 1, live)[1] - self.tool
                yield live * (seconds / min(float(self.rows[-1][0]), self.most) + self.preempted), True
                continue
            need, seconds = self._balance(row, live)
            below, faster = self._balance(row - 1, live) if row else (need, seconds)
            weight = max(0.0, (live - below) / (need - below)) if need > below else 1.0
            yield faster + weight * (seconds - faster), False

    def _balance(self, row: int, live: float) -> tuple[float, float]:
        """Trajectories that keep the batch of ``row`` full while ``live`` share the cache, and the seconds of a step
        and the tools beside it."""
        size, decode, prefill = self.rows[row]
        kept = 1.0 if live <= max(self.room, size) else max(0.0, min(1.0, (self.room - size) / (live - size)))
        step = decode + size * (self.new + self.again * (1.0 - self.hits * kept)) * prefill
        return size * (step + self.tool) / step, step + self.tool


def _batches(most: float) -> list[int]:
    """Batch sizes at which steps are asked for: powers of two and the middles between them, then the largest."""
    sizes, size = {1, int(most)}, 2
    while size < most:
        sizes |= {s for s in (size, size * 3 // 2) if s < most}
        size *= 2
    return sorted(sizes)
