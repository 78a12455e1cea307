"""Seconds in which the open trajectories of one replica advance by one token each, tabulated over number and context.

- A step takes s seconds and tools u seconds per token. Of n trajectories, a = n s / (s + u) decode; the others are in
  tools. All advance by one token in s + u seconds, while slots and KV suffice.
- Prompt tokens (tool results, lost context) share the steps as chunks.
- Short KV: trajectories in tools lose their cache and compute it again at the next turn. A scheduler that admits lets
  as many in as are served fastest.
- Full KV: sequences wait; running ones are preempted and computed again (`PREEMPTED`).

Seconds do not decrease with the number of trajectories, because the search relies on it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from libra_hpc.models.step_times.steps import StepTimes

from .factors import Factors
from .lengths import Lengths

CHUNK = 2048
"""Most prompt tokens of a step: vLLM's default budget of batched tokens."""
PREEMPTED = 0.5
"""Tokens computed again per token generated while sequences wait for KV. At most 1; `libra_hpc.simulator` counts 0.3
(many turns) to 0.7 (one long turn)."""
CONTEXTS = 6
"""Tabulated contexts. Step times are linear in the KV tokens of a batch, prefill is slightly convex."""

Curve = list[float]
"""Values at the tabulated numbers of open trajectories."""


class PositionTable:
    """The table of one TP class, up to ``most`` open trajectories; ``steps.kv_capacity`` is not 0."""

    def __init__(
        self,
        steps: StepTimes,
        lengths: Lengths,
        factors: Factors,
        *,
        max_num_seqs: int,
        prefix_hits: float,
        most: float,
        draining: bool,
        admits: bool,
    ) -> None:
        self._steps, self._lengths, self._factors = steps, lengths, factors
        self._max_num_seqs, self._prefix_hits = max_num_seqs, prefix_hits
        self._draining, self._admits = draining, admits
        self.top = min(float(lengths.longest_context), float(steps.kv_capacity))
        """Longest tabulated context, tokens."""
        low = min(lengths.prompt, lengths.prompt_beside, self.top)
        growth = max(self.top, low + 1.0) / low
        self._contexts = [low * growth ** (k / (CONTEXTS - 1)) for k in range(CONTEXTS)]
        self._live = [2.0 ** (g / 2) for g in range(math.ceil(2 * math.log2(max(2.0, most))) + 2)]
        self._seconds: list[Curve] = []
        self._steps_s: list[Curve] = []
        self._waits: list[Curve] = []
        for context in self._contexts:
            self._tabulate(context)

    @property
    def width(self) -> int:
        """Tabulated numbers of open trajectories."""
        return len(self._live)

    def seconds(self, context: float) -> Curve:
        """Seconds per position at ``context`` tokens."""
        return self._blend(self._seconds, context)

    def steps_s(self, context: float) -> Curve:
        """The part of `seconds` that is not spent in tools."""
        return self._blend(self._steps_s, context)

    def waits(self, context: float) -> Curve:
        """Seconds of a step of one sequence at ``context`` tokens where some wait for a slot or KV, else 0."""
        return self._blend(self._waits, context)

    def between(self, context: float) -> tuple[int, float]:
        """Index of the tabulated context below ``context``, and the position between it and the next one, 0..1."""
        contexts = self._contexts
        k = min(max(bisect_right(contexts, context) - 1, 0), len(contexts) - 2)
        return k, min(max((context - contexts[k]) / (contexts[k + 1] - contexts[k]), 0.0), 1.0)

    def point(self, k: int, weight: float, live: float) -> float:
        """Seconds per position of ``live`` trajectories, at a context given by `between`."""
        below, above = self.at(self._seconds[k], live), self.at(self._seconds[k + 1], live)
        return below + weight * (above - below)

    def at(self, curve: Curve, live: float) -> float:
        """Linear interpolation; constant below 1."""
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
        # A draining batch is at one position, overlapping ones are at all of them.
        at = lengths.generated_at(context) if self._draining else 0.0
        rates = lengths.open_at(at)[1] if self._draining else lengths.rates
        again = max(0.0, rates.turns - 1.0 / max(lengths.generated, at)) * context
        room = self._steps.kv_capacity / context
        most = max(1.0, min(float(self._max_num_seqs), room))
        fresh = rates.new + again * (1.0 - hits)
        rows = [(a, *self._step(a, context, max(rates.turn_tokens, a * fresh))) for a in _batches(most)]
        # Recomputation starts at token 0: half of the context on average, in whole chunks.
        preempted = PREEMPTED * self._step(int(most), context / 2, CHUNK)[1] if most >= room else 0.0
        replica = _Replica(
            rows=rows,
            room=room,
            most=most,
            tool=rates.tool_s * self._factors.tool,
            new=rates.new,
            again=again,
            hits=hits,
            preempted=preempted,
        )
        positions = list(replica.positions(self._live))
        for table, tool in ((self._seconds, 0.0), (self._steps_s, replica.tool)):
            own = (seconds - (0.0 if waiting else tool) for seconds, waiting in positions)
            rising = list(accumulate(own, max))
            table.append(self._admitted(rising) if self._admits else rising)
        self._waits.append(list(accumulate((rows[0][1] * waiting for _, waiting in positions), max)))

    def _admitted(self, seconds: Curve) -> Curve:
        """With as many trajectories at a time as are served fastest, the others after them.

        The seconds do not fall with the number of trajectories: those per trajectory are the least up to that number.
        """
        per_trajectory = accumulate((s / live for s, live in zip(seconds, self._live, strict=True)), min)
        return [live * each for live, each in zip(self._live, per_trajectory, strict=True)]

    def _step(self, decodes: int, context: float, tokens: float) -> tuple[float, float]:
        """Seconds of a step that decodes only, and seconds per prompt token that shares it.

        There are ``tokens`` prompt tokens, at most a chunk.
        """
        kv = round(decodes * context)
        alone = self._steps.step_s(decodes, kv)
        chunk = max(1, min(CHUNK, round(tokens)))
        mixed = self._steps.step_s(decodes, kv, chunk, round(context))
        return alone * self._factors.decode, max(0.0, mixed - alone) / chunk * self._factors.prefill


class _Replica(NamedTuple):
    """One replica at one context."""

    rows: list[tuple[int, float, float]]
    """Batch size, seconds of a step that decodes only, and seconds per prompt token in it; rising sizes up to ``most``.
    """
    room: float
    """Contexts that fit in the KV cache."""
    most: float
    tool: float
    """Seconds of tools per generated token."""
    new: float
    """Prompt tokens per generated token."""
    again: float
    """Tokens of earlier context that turns return to, per generated token."""
    hits: float
    """Share of them that is cached while KV is not short."""
    preempted: float
    """Seconds to compute preempted sequences again, per token generated while some wait for KV."""

    def positions(self, lives: Sequence[float]) -> Iterator[tuple[float, bool]]:
        """For each number of ``lives``, which rise: seconds per position, and whether some wait.

        The batch is the one that tools empty as fast as they refill it. It grows with the number of trajectories.
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
        """Trajectories that fill the batch of ``row`` while ``live`` share the cache; seconds of a step plus tools."""
        size, decode, prefill = self.rows[row]
        cached = 1.0 if live <= max(self.room, size) else max(0.0, min(1.0, (self.room - size) / (live - size)))
        step = decode + size * (self.new + self.again * (1.0 - self.hits * cached)) * prefill
        return size * (step + self.tool) / step, step + self.tool


def _batches(most: float) -> list[int]:
    """Tabulated batch sizes: powers of two, the middles between them, and the largest."""
    sizes, size = {1, int(most)}, 2
    while size < most:
        sizes |= {s for s in (size, size * 3 // 2) if s < most}
        size *= 2
    return sorted(sizes)
