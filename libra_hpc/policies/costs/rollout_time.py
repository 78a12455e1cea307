"""Seconds in which the replicas of one TP class roll out their share of a global batch.

- eta = 0: all trajectories start together and drain. A trajectory ends after the integral, over its positions, of the
  seconds of a step with the falling number of open ones, and after its own tools. The last one to end counts: not
  always the longest.
- eta >= 1: eta + 1 batches are open, or being trained. A position lasts as long as the mean number of trajectories
  implies. The longest one, and the one with the most tool seconds, of all open ones end before the training step of
  their batch, ``lag`` seconds, has to begin: the gate takes groups that have ended first.
- Prompts: one that n trajectories share goes to each of r replicas with probability 1 - (1 - 1/r)^n.
- A weight update computes the running contexts again (`RolloutOptions.updates`).
- Sequences that wait for KV run in waves, the last of which is not full (`EMPTY_IN_LAST_WAVE`).

Replicas of a class share its trajectories evenly: those between two bins, so that classes can take long or short ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import msgspec

from libra_hpc.models.memory import Limit
from libra_hpc.models.step_times.steps import StepTimes

from .factors import NONE, Factors
from .lengths import BatchWork
from .positions import CHUNK, Curve, PositionTable

PROMPT_COPIES = 1.3
"""Replicas that compute a prompt when the scheduler starts samples beside their siblings; simulated, groups of 8."""
EMPTY_IN_LAST_WAVE = 0.5
"""Share of the last wave that is empty, on average."""
ITERATIONS, SOLVED = 100, 1e-12
"""Most iterations for the number of open trajectories, and the relative step at which it is found."""
MAX_CONTEXT_GROWTH = 1.3
"""Largest ratio of the contexts at both ends of a stretch of positions that is computed as one."""


class RolloutOptions(msgspec.Struct, frozen=True):
    max_num_seqs: int = 256
    """Most sequences that a replica decodes at once."""
    max_model_len: int = 0
    """Tokens of one sequence that every replica must hold, or vLLM does not start."""
    prefix_hits: float = 0.99
    """Share of a turn's earlier context that is still cached while KV is not short; simulated: 0.972 to 0.998."""
    group: int = 1
    """Trajectories that share a prompt; each replica that gets one of them computes it once."""
    cache_aware: bool = False
    """Whether the scheduler starts samples beside their siblings and lets no more trajectories in than caches hold, as
    C-MLFQ does."""
    updates: int = 0
    """Weight updates per global batch while trajectories run; each computes their contexts again."""


class _Overlapping(NamedTuple):
    """One segment of overlapping batches."""

    live: float
    positions: float
    """Positions from batch to batch."""
    context: float
    """Mean tokens of an open trajectory."""
    below: int
    """Index of the tabulated context below."""
    weight: float
    """Position between it and the next one, 0..1."""


class ReplicaCost:
    """Rollout time of one TP class; ``replicas`` are equal."""

    def __init__(
        self,
        steps: StepTimes,
        batch: BatchWork,
        options: RolloutOptions = RolloutOptions(),  # noqa: B008
        factors: Factors = NONE,
    ) -> None:
        self.tp, self.source = steps.tp, steps.source
        self.kv_capacity, self.group = steps.kv_capacity, options.group
        self._batch, self._options = batch, options
        lengths = batch.lengths
        self._fits = [self._need(last) <= steps.kv_capacity for last in range(len(lengths.bins))]
        self._times: dict[tuple[int, int, int, float], float] = {}
        self._overlapping: dict[tuple[int, int], _Overlapping] = {}
        if steps.kv_capacity > 0:
            most = batch.trajectories * (batch.eta + 1.0)
            self._positions = PositionTable(
                steps,
                lengths,
                factors,
                max_num_seqs=options.max_num_seqs,
                prefix_hits=options.prefix_hits,
                most=most,
                draining=batch.eta == 0,
                admits=options.cache_aware,
            )
            self._token_s = steps.step_s(0, 0, CHUNK, 0) / CHUNK * factors.prefill
            self._prompt_s = lengths.prompt * batch.trajectories * self._token_s
            self._prepare(steps, factors)

    def limit(self, last: int = 0) -> Limit | None:
        """Why no replica holds the trajectories of bin ``last`` (by default the shortest), or None."""
        need = self._need(last)
        if self.kv_capacity >= need:
            return None
        if self.kv_capacity <= 0:
            return Limit(float(need), "the weights leave no room for a KV cache")
        return Limit(
            float(need - self.kv_capacity),
            f"its KV cache holds {self.kv_capacity:,} tokens, trajectories may have {need:,}",
        )

    def fits(self, last: int) -> bool:
        """Whether the longest context of bin ``last`` fits in the KV cache."""
        return self._fits[last]

    def _need(self, last: int) -> int:
        return max(self._batch.lengths.bins[last].longest, self._options.max_model_len)

    def position_s(self, live: float, context: float) -> float:
        """Seconds in which ``live`` open trajectories of ``context`` tokens advance by one token each."""
        return self._positions.point(*self._positions.between(context), live)

    @property
    def latency(self) -> float:
        """Seconds per token of a single trajectory of mean context; orders the classes."""
        return self.position_s(1.0, min(self._batch.lengths.context, self._positions.top))

    def time(self, first: int, last: int, replicas: float, lag: float = 0.0) -> float:
        """Seconds per global batch when so many replicas serve bins ``first..last``; infinite when the longest does not
        fit.

        ``lag``: seconds from the end of a batch until its prompts are replaced by new ones, that is a training step.
        """
        return self._time(first, last, replicas, lag) if self.fits(last) else math.inf

    def fewest(self, first: int, last: int, seconds: float, most: int, lag: float = 0.0) -> int | None:
        """The fewest replicas that serve bins ``first..last`` within ``seconds``; None where ``most`` are too few."""
        if most < 1 or not self._fits[last] or self._known(first, last, most, lag) > seconds:
            return None
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._known(first, last, middle, lag) <= seconds else (middle, high)
        return high

    def _known(self, first: int, last: int, replicas: int, lag: float) -> float:
        key = first, last, replicas, lag
        if key not in self._times:
            self._times[key] = self._time(*key)
        return self._times[key]

    def _time(self, first: int, last: int, replicas: float, lag: float) -> float:
        share = self._shares[last + 1] - self._shares[first]
        prompts = self._prompt_s * share * self._prompts(replicas)
        if self._batch.eta == 0:
            return prompts + max(self._drain(first, last, replicas))
        segment = self._overlapping.get((first, last))
        if segment is None:
            segment = self._overlapping[first, last] = self._overlap(first, last)
        live, context = segment.live / replicas, segment.context
        running = min(live, float(self._options.max_num_seqs), max(1.0, self.kv_capacity / context))
        again = self._options.updates * running * context * self._token_s
        busy = prompts + again + segment.positions * self._overlapping_position_s(segment, live, lag)
        return max(busy, (max(self._alone_s[first : last + 1]) + lag) / (self._batch.eta + 1))

    def _overlapping_position_s(self, segment: _Overlapping, live: float, lag: float) -> float:
        """Seconds per batch over its positions, of ``live`` trajectories if none waited for a training step.

        With n open ones a position takes s(n) seconds. W tokens per batch keep n = W s(n) / T open (Little's law), and
        the longest ends in time: longest s(n) + lag = (eta + 1) T. n falls from ``live`` to the solution.
        """
        point, below, weight = self._positions.point, segment.below, segment.weight
        seconds = point(below, weight, live)
        if not lag:
            return seconds
        longest, open_now = segment.positions * (self._batch.eta + 1), live
        for _ in range(ITERATIONS):
            fewer = live * longest * seconds / (longest * seconds + lag)
            if fewer >= open_now * (1.0 - SOLVED):
                break
            open_now, seconds = fewer, point(below, weight, fewer)
        return seconds + lag / longest

    def _overlap(self, first: int, last: int) -> _Overlapping:
        longest, open_batches = self._longest[last], self._batch.eta + 1
        tokens = self._tokens[last + 1] - self._tokens[first]
        square = self._squares[last + 1] - self._squares[first]
        # A token's mean position is half the mean length, weighted by length.
        context = self._batch.lengths.context_at(square / tokens / 2)
        live = self._batch.trajectories * tokens * open_batches / longest
        return _Overlapping(live, longest / open_batches, context, *self._positions.between(context))

    def _prompts(self, replicas: float) -> float:
        """Share of all prompts that one replica computes."""
        each, group = 1.0 / replicas, self._options.group
        if group == 1:
            return each
        by_chance = max(1.0, each) * (1.0 - (1.0 - min(1.0, each)) ** group) / group
        return min(by_chance, PROMPT_COPIES * each / group) if self._options.cache_aware else by_chance

    def ends(self, first: int, last: int, replicas: float) -> list[tuple[float, float]]:
        """(seconds, share of the batch) of each bin of a draining batch, rising."""
        bins = self._batch.lengths.bins[first : last + 1]
        return sorted((end, b.share) for end, b in zip(self._drain(first, last, replicas), bins, strict=True))

    def _drain(self, first: int, last: int, replicas: float) -> Iterator[float]:
        """Seconds until the trajectories of each bin have ended."""
        shares, at = self._shares, self._positions.at
        scale = self._batch.trajectories / replicas
        end = shares[last + 1]
        total = at(self._through[first], scale * (end - shares[first]))
        yield total + self._tools[first]
        for q in range(first + 1, last + 1):
            total += at(self._pieces[q], scale * (end - shares[q]))
            yield total + self._tools[q]

    def _prepare(self, steps: StepTimes, factors: Factors) -> None:
        """Prefix sums over bins, and for a draining batch the time of each stretch at every number of open
        trajectories."""
        bins, lengths, positions = self._batch.lengths.bins, self._batch.lengths, 0.0
        self._shares = [0.0, *accumulate(b.share for b in bins)]
        self._tokens = [0.0, *accumulate(b.share * b.generated for b in bins)]
        self._squares = [0.0, *accumulate(b.share * b.generated**2 for b in bins)]
        self._tools = [b.most_tool_s * factors.tool for b in bins]
        step_s = steps.step_s(1, round(min(lengths.context, self._positions.top))) * factors.decode
        self._longest = [*(b.generated for b in bins[:-1]), max(bins[-1].generated, lengths.open_generated)]
        self._alone_s = [n * step_s + b.open_tool_s * factors.tool for n, b in zip(self._longest, bins, strict=True)]
        self._pieces: list[Curve] = []
        self._through: list[Curve] = []
        width = self._positions.width
        sums, waits = [0.0] * width, [0.0] * width
        # A sequence waits for the end of another's turn, not of its trajectory: slots stay empty in the last turn only.
        share = EMPTY_IN_LAST_WAVE / max(1.0, lengths.turns_per_token * lengths.generated)
        for b in bins:
            piece = [0.0] * width
            for stretch, context in self._stretches(positions, b.generated):
                piece = _plus(piece, stretch, self._positions.steps_s(context))
                waits = _plus(waits, share * stretch, self._positions.waits(context))
            sums = _plus(sums, 1.0, piece)
            self._pieces.append(piece)
            self._through.append(_plus(sums, 1.0, waits))
            positions = b.generated

    def _stretches(self, start: float, end: float) -> Iterator[tuple[float, float]]:
        """Numbers of positions with the context in their middle, split so that contexts hardly grow."""
        at = self._batch.lengths.open_at
        parts = max(1, math.ceil(math.log(at(end)[0] / at(start)[0]) / math.log(MAX_CONTEXT_GROWTH)))
        width = (end - start) / parts
        for part in range(parts):
            yield width, at(start + (part + 0.5) * width)[0]


def _plus(totals: Curve, weight: float, values: Curve) -> Curve:
    """``totals + weight * values``."""
    return [total + weight * value for total, value in zip(totals, values, strict=True)]
