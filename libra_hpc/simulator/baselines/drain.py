"""How long an engine needs to finish known trajectories: the cost model of the clairvoyant oracle.

All trajectories of an engine run side by side, and the batch shrinks whenever the one with the fewest remaining tokens
ends.  A stage of n tokens between two ends takes

    n * (step_s(batch, KV tokens) * max(1, batch / room) + sum of prefill seconds per token).

* batch: each trajectory counts by the share of its time outside tools.
* room: how many fit into slots and KV cache; beyond it trajectories take turns.
* Prefill is spread evenly over a trajectory's tokens.
* A trajectory ends with its last stage plus its tool time; the engine ends with its last trajectory.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from typing import NamedTuple

from libra_hpc.models.step_times.steps import StepTimes

REUSE = 0.8
"""A step time is used until the batch has shrunk to this share.

This is exact for the last few trajectories, which decide the end, and costs a logarithmic number of lookups."""
CHUNK = 2_048
"""Prompt tokens priced as one prefill chunk (vLLM's chunked prefill)."""


class Load(NamedTuple):
    """Remaining work of one trajectory at one engine, ordered by tokens to decode."""

    tokens: int
    """Tokens to decode, >= 1."""
    name: str
    prefill_s: float
    tool_s: float
    context: int
    """Mean context over the remaining tokens."""


def prefill_s(steps: StepTimes, tokens: int, context: int) -> float:
    """Seconds that ``tokens`` prompt tokens after ``context`` cached ones add to a decoding engine."""
    if tokens <= 0:
        return 0.0
    chunk = min(tokens, CHUNK)
    middle = context + tokens // 2
    return (steps.step_s(1, middle, chunk, middle) - steps.step_s(1, middle)) * tokens / chunk


def drain_s(loads: Sequence[Load], steps: StepTimes, slots: int) -> float:
    """Seconds until the last of ``loads`` (ascending; none: 0.0) ends at an engine with at most ``slots`` turns."""
    if not loads:
        return 0.0
    pace = steps.step_s(len(loads), sum(load.context for load in loads))
    shares = [1.0 if load.tool_s <= 0.0 else load.tokens * pace / (load.tokens * pace + load.tool_s) for load in loads]
    batch = sum(shares)
    kv = sum(share * load.context for share, load in zip(shares, loads, strict=True))
    rate = sum(load.prefill_s / load.tokens for load in loads)
    elapsed = end = priced_s = 0.0
    priced, done = 2.0 * batch / REUSE, 0
    for share, load in zip(shares, loads, strict=True):
        if load.tokens > done:
            if batch <= REUSE * priced:
                room = max(1.0, min(float(slots), steps.kv_capacity * batch / max(kv, 1.0)))
                running = min(batch, room)
                priced_s = steps.step_s(max(1, round(running)), int(kv * running / batch)) * max(1.0, batch / room)
                priced = batch
            elapsed += (load.tokens - done) * (priced_s + rate)
            done = load.tokens
        end = max(end, elapsed + load.tool_s)
        batch = max(batch - share, 1e-9)
        kv = max(kv - share * load.context, 0.0)
        rate = max(rate - load.prefill_s / load.tokens, 0.0)
    return end


class DrainPlan:
    """The trajectories placed at one engine, and when they end."""

    def __init__(self, steps: StepTimes, slots: int) -> None:
        self.steps, self._slots = steps, slots
        self._loads: list[Load] = []
        self._end: float | None = None

    def __len__(self) -> int:
        return len(self._loads)

    @property
    def end_s(self) -> float:
        if self._end is None:
            self._end = drain_s(self._loads, self.steps, self._slots)
        return self._end

    def resize(self, slots: int) -> None:
        if slots != self._slots:
            self._slots, self._end = slots, None

    def end_with(self, load: Load) -> float:
        loads = self._loads.copy()
        insort(loads, load)
        return drain_s(loads, self.steps, self._slots)

    def add(self, load: Load) -> None:
        insort(self._loads, load)
        self._end = None

    def remove(self, load: Load) -> None:
        self._loads.remove(load)
        self._end = None
