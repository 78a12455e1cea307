"""Seconds in which the replicas of one TP class roll out their share of a global batch.

*One step.*  A replica with n open trajectories of context k decodes a of them at once; the others are in a tool or wait for a slot.  Per generated
token a trajectory needs one step s, u seconds of tools, and p computed prompt tokens (tool results, and context that the prefix cache lost), which
share the steps as chunks.  In balance a = n s / (s + u), at most ``max_num_seqs`` and at most what the KV cache holds; all n advance by one token in
n s / a seconds, which is s + u while nothing is short.

*Short KV.*  The a that decode hold their context; what is left of the cache keeps that of the n - a others, and none of it once sequences wait.  What is
lost comes back as prompt tokens at the next turn.  While sequences wait the cache is full, and every token that is generated takes the place of another
one: running sequences are preempted and computed again (`PREEMPTED`).  Those that wait begin when others have ended.  Until the first trajectory ends all
of them advance in lockstep, in waves, of which the last does not fill the replica (`WAVE`); later there is always one that takes a free place.

*One batch.*  Position x is the number of tokens a trajectory has generated; trajectories that end before x are gone.  With eta = 0 the class starts
its N trajectories together and drains: T is the integral of the time per position over the live number n(x).  With eta >= 1 the next batches fill the
gaps: eta + 1 of them are open, so a position lasts as long as the mean live number says, n = (eta + 1) * tokens / longest, and a batch comes every
longest / (eta + 1) positions.  Both contain the straggler bound: n is never below 1, hence T >= longest * (s(1) + u) / (eta + 1).  Computing the
prompts is added: one that n trajectories share goes to each of r replicas with probability 1 - (1 - 1/r)^n (`RolloutOptions.group`).  So are the
contexts that a weight update has computed again, all those that run at that moment (`RolloutOptions.updates`).

Replicas of a class share its trajectories evenly.  Trajectories are those between two bins of the sketch, so that classes can take the short or the
long end.  Times per position are tabulated over n (a factor of sqrt 2 apart) and k (`CONTEXTS` values) and made non-decreasing in n, as physics has
them: the search relies on it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import msgspec

from libra_hpc.hardware.steps import StepTimes

from .factors import NONE, Factors
from .memory import Limit
from .training import Batch

CHUNK = 2048
"""Most prompt tokens of one step: vLLM's default budget of batched tokens."""
PREEMPTED = 0.5
"""Tokens computed again for each token generated while sequences wait for KV: 1 if a sequence that ends left no room for the growth of the others; 0.3 (many
turns) to 0.7 (one long turn) where `libra_hpc.sim` counts them."""
WAVE = 0.5
"""Share of a wave that is empty in the last one, on average."""
GROWTH = 1.3
"""Largest ratio of the contexts at the two ends of a stretch of positions that counts as one."""
CONTEXTS = 6
"""Contexts at which step times are tabulated; they are linear in the KV tokens of a batch, prefill is slightly convex."""


class RolloutOptions(msgspec.Struct, frozen=True):
    """How the engines are run."""

    max_num_seqs: int = 256
    """Most sequences a replica decodes at once."""
    max_model_len: int = 0
    """Tokens of one sequence that every replica must be able to hold, however short trajectories are: vLLM does not start with less."""
    prefix_hits: float = 0.95
    """Share of a turn's earlier context that is still cached when the turn comes and KV is not short."""
    group: int = 1
    """Trajectories that share a prompt, sent to any replica: it is computed once on each that gets one of them."""
    updates: int = 0
    """Weight updates per global batch while trajectories run: each has the running ones computed again."""


class _Ladder(NamedTuple):
    """What is known of one segment: times at some numbers of replicas."""

    counts: list[int]
    """Rising."""
    speeds: list[float]
    """Minus the seconds, hence not falling."""


class _Replica(NamedTuple):
    """One replica at one context."""

    rows: list[tuple[int, float, float]]
    """Batch size, seconds of a step that decodes only, and of each prompt token beside it; sizes rising up to the largest possible one."""
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

    def position(self, live: float) -> tuple[float, bool]:
        """Seconds per position of ``live`` trajectories, and whether some of them wait for others.

        In balance the batch is the one that tools empty as fast as they refill it.
        """
        before: tuple[float, float] | None = None
        for size, decode, prefill in self.rows:
            a, step = float(size), decode + size * self._computed(size, live) * prefill
            need = a * (step + self.tool) / step
            if need >= live:
                if before is None or need <= before[0]:
                    return step + self.tool, False
                weight = max(0.0, (live - before[0]) / (need - before[0]))
                return before[1] + weight * (step + self.tool - before[1]), False
            before = (need, step + self.tool)
        return live * (step / min(a, self.most) + self.preempted), True

    def _computed(self, decodes: float, live: float) -> float:
        """Prompt tokens computed per generated token while so many of the ``live`` trajectories decode."""
        kept = 1.0 if live <= max(self.room, decodes) else max(0.0, min(1.0, (self.room - decodes) / (live - decodes)))
        return self.new + self.again * (1.0 - self.hits * kept)


class ReplicaCost:
    """One TP class; times are those of ``replicas`` equal replicas."""

    def __init__(self, steps: StepTimes, batch: Batch, options: RolloutOptions = RolloutOptions(), factors: Factors = NONE) -> None:  # noqa: B008
        self.tp, self.source = steps.tp, steps.source
        self.kv_capacity = steps.kv_capacity
        self._steps, self._batch, self._options, self._factors = steps, batch, options, factors
        self._ladders: dict[tuple[int, int], _Ladder] = {}
        lengths = batch.lengths
        self._top = min(float(lengths.longest_context), float(max(1, steps.kv_capacity)))
        low = min(lengths.prompt, lengths.prompt_beside, self._top)
        self._contexts = sorted({low * (self._top / low) ** (k / (CONTEXTS - 1)) for k in range(CONTEXTS)})
        most = max(2.0, batch.trajectories * (batch.eta + 1.0))
        self._live = [2.0 ** (g / 2) for g in range(math.ceil(2 * math.log2(most)) + 2)]
        self._table: list[list[float]] = []
        self._waits: list[list[float]] = []
        if steps.kv_capacity > 0:
            for context in self._contexts:
                self._tabulate(context)
            self._token_s = steps.step_s(0, 0, CHUNK, 0) / CHUNK * factors.prefill
            self._prompt_s = lengths.prompt * batch.trajectories * self._token_s
            self._prepare()

    def limit(self, last: int = 0) -> Limit | None:
        """Why no replica of this class holds the trajectories of bin ``last``, by default the shortest, or None; ``over`` is in tokens."""
        need = self._need(last)
        if self.kv_capacity >= need:
            return None
        if self.kv_capacity <= 0:
            return Limit(float(need), "the weights leave no room for a KV cache")
        return Limit(float(need - self.kv_capacity), f"its KV cache holds {self.kv_capacity:,} tokens, trajectories may have {need:,}")

    def fits(self, last: int) -> bool:
        """Whether the longest context that bin ``last`` asks for fits in the KV cache."""
        return self._need(last) <= self.kv_capacity

    def _need(self, last: int) -> int:
        return max(self._batch.lengths.bins[last].longest, self._options.max_model_len)

    def position_s(self, live: float, context: float) -> float:
        """Seconds in which ``live`` open trajectories of ``context`` tokens advance by one token each."""
        return _at(self._blend(self._table, context), self._live, live)

    @property
    def latency(self) -> float:
        """Seconds per token of a single trajectory of mean context: orders the classes."""
        return self.position_s(1.0, min(self._batch.lengths.context, self._top))

    def time(self, first: int, last: int, replicas: float) -> float:
        """Seconds per global batch when so many replicas serve the trajectories of bins ``first..last``; infinite when the longest does not fit."""
        return self._time(first, last, replicas) if self.fits(last) else math.inf

    def fewest(self, first: int, last: int, seconds: float, most: int) -> int | None:
        """The fewest of at most ``most`` replicas that serve the segment within ``seconds``, or None; earlier answers narrow the bisection."""
        if most < 1 or not self.fits(last):
            return None
        ladder = self._ladders.get((first, last))
        if ladder is None:
            ladder = self._ladders[first, last] = _Ladder([], [])
        counts, speeds = ladder
        i = bisect_left(speeds, -seconds)
        low = counts[i - 1] if i else 0
        if i < len(counts) and counts[i] <= most:
            high = counts[i]
        elif low >= most or not self._climb(ladder, i, first, last, most, seconds):
            return None
        else:
            high = most
        while high - low > 1:
            middle = (low + high) // 2
            if self._climb(ladder, bisect_left(counts, middle), first, last, middle, seconds):
                high = middle
            else:
                low = middle
        return high

    def _climb(self, ladder: _Ladder, at: int, first: int, last: int, replicas: int, seconds: float) -> bool:
        """Whether so many replicas keep ``seconds``; their time is kept at rung ``at``."""
        own = self._time(first, last, replicas)
        ladder.counts.insert(at, replicas)
        ladder.speeds.insert(at, -own)
        return own <= seconds

    def _time(self, first: int, last: int, replicas: float) -> float:
        share = self._shares[last + 1] - self._shares[first]
        prompts = self._prompt_s * share * self._prompts(replicas)
        if self._batch.eta == 0:
            return prompts + self._drain(first, last, replicas)
        longest = self._batch.lengths.bins[last].generated
        tokens = self._tokens[last + 1] - self._tokens[first]
        square = self._squares[last + 1] - self._squares[first]
        open_batches = self._batch.eta + 1
        live = self._batch.trajectories * tokens * open_batches / (replicas * longest)
        # A token's mean position is half the mean length, weighted by length.
        context = self._batch.lengths.context_at(square / tokens / 2)
        running = min(live, float(self._options.max_num_seqs), max(1.0, self.kv_capacity / context))
        again = self._options.updates * running * context * self._token_s
        return prompts + again + longest / open_batches * self.position_s(live, context)

    def _prompts(self, replicas: float) -> float:
        """Share of the trajectories' prompts that one replica computes."""
        each, group = 1.0 / replicas, self._options.group
        return each if group == 1 else max(1.0, each) * (1.0 - (1.0 - min(1.0, each)) ** group) / group

    def _drain(self, first: int, last: int, replicas: float) -> float:
        shares, live = self._shares, self._live
        scale = self._batch.trajectories / replicas
        end = shares[last + 1]
        total = _at(self._through[first], live, scale * (end - shares[first]))
        for q in range(first + 1, last + 1):
            total += _at(self._pieces[q], live, scale * (end - shares[q]))
        return total

    def _prepare(self) -> None:
        """Prefix sums over bins; for a draining batch also the time of each stretch of positions at every live number."""
        bins, lengths, positions = self._batch.lengths.bins, self._batch.lengths, 0.0
        self._shares = [0.0, *accumulate(b.share for b in bins)]
        self._tokens = [0.0, *accumulate(b.share * b.generated for b in bins)]
        self._squares = [0.0, *accumulate(b.share * b.generated**2 for b in bins)]
        self._pieces: list[list[float]] = []
        self._through: list[list[float]] = []
        width = len(self._live)
        sums, waits = [0.0] * width, [0.0] * width
        # A sequence waits for a turn of another one, not for its end: places stay empty in the last turn only.
        share = WAVE / max(1.0, lengths.turns_per_token * lengths.generated)
        for b in bins:
            piece = [0.0] * width
            for stretch, context in self._stretches(positions, b.generated):
                piece = _plus(piece, stretch, self._blend(self._table, context))
                waits = _plus(waits, share * stretch, self._blend(self._waits, context))
            sums = _plus(sums, 1.0, piece)
            self._pieces.append(piece)
            self._through.append(_plus(sums, 1.0, waits))
            positions = b.generated

    def _stretches(self, start: float, end: float) -> Iterator[tuple[float, float]]:
        """Number of positions and context in their middle, of parts in which contexts hardly grow."""
        at = self._batch.lengths.context_at
        parts = max(1, math.ceil(math.log(at(end) / at(start)) / math.log(GROWTH)))
        width = (end - start) / parts
        for part in range(parts):
            yield width, at(start + (part + 0.5) * width)

    def _blend(self, table: list[list[float]], context: float) -> list[float]:
        """The curve over live numbers at ``context``, between the tabulated ones."""
        contexts = self._contexts
        k = min(max(bisect_right(contexts, context) - 1, 0), max(len(contexts) - 2, 0))
        if len(contexts) == 1:
            return table[0]
        weight = min(max((context - contexts[k]) / (contexts[k + 1] - contexts[k]), 0.0), 1.0)
        return [x + weight * (y - x) for x, y in zip(table[k], table[k + 1], strict=True)]

    def _tabulate(self, context: float) -> None:
        """Add the seconds per position at every tabulated live number, and the seconds of a step of one sequence wherever some wait."""
        lengths, factors, hits = self._batch.lengths, self._factors, self._options.prefix_hits
        again = max(0.0, lengths.turns_per_token - 1.0 / lengths.generated) * context
        room = self.kv_capacity / context
        most = max(1.0, min(float(self._options.max_num_seqs), room))
        fresh = lengths.new_per_token + again * (1.0 - hits)
        rows = [(a, *self._step(a, context, max(lengths.turn_tokens, a * fresh))) for a in _batches(most)]
        # From its beginning, hence half of the context on average, and in whole chunks.
        preempted = PREEMPTED * self._step(int(most), context / 2, CHUNK)[1] if most >= room else 0.0
        replica = _Replica(rows, room, most, lengths.tool_s_per_token * factors.tool, lengths.new_per_token, again, hits, preempted)
        positions = [replica.position(live) for live in self._live]
        self._table.append(list(accumulate((seconds for seconds, _ in positions), max)))
        self._waits.append(list(accumulate((rows[0][1] * waiting for _, waiting in positions), max)))

    def _step(self, decodes: int, context: float, tokens: float) -> tuple[float, float]:
        """Seconds of a step that decodes only, and what each of so many prompt tokens beside it adds, or of a chunk if there are more."""
        kv = round(decodes * context)
        alone = self._steps.step_s(decodes, kv)
        chunk = max(1, min(CHUNK, round(tokens)))
        mixed = self._steps.step_s(decodes, kv, chunk, round(context))
        return alone * self._factors.decode, max(0.0, mixed - alone) / chunk * self._factors.prefill


def _batches(most: float) -> list[int]:
    """Batch sizes at which steps are asked for: powers of two and the middles between them, then the largest."""
    sizes, size = {1, int(most)}, 2
    while size < most:
        sizes |= {s for s in (size, size * 3 // 2) if s < most}
        size *= 2
    return sorted(sizes)


def _plus(totals: list[float], weight: float, values: list[float]) -> list[float]:
    """``totals + weight * values``."""
    return [total + weight * value for total, value in zip(totals, values, strict=True)]


def _at(curve: list[float], grid: list[float], live: float) -> float:
    """Linear interpolation over a grid of powers of sqrt 2 from 1; the curve is constant below 1."""
    if live <= 1.0:
        return curve[0]
    g = min(int(2 * math.log2(live)), len(grid) - 2)
    return curve[g] + (curve[g + 1] - curve[g]) * (live - grid[g]) / (grid[g + 1] - grid[g])
