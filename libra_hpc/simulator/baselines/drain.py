"""How long an engine needs to finish known trajectories: the model the clairvoyant oracle plans with.

All trajectories of an engine run side by side, each with a known number of tokens still to decode, prompt tokens still
to prefill and seconds of tools still to wait.  Sorted by remaining tokens, the engine drains in stages: while the
shortest has tokens left everybody decodes one token a step; then it leaves and the batch shrinks.  A stage of n tokens
takes

    n * (step_s(batch, KV tokens) * max(1, demand / room) + sum of prefill seconds per token),

where batch counts each trajectory by the share of its time it is not in a tool, and room is how many fit (slots and KV
cache): beyond it they take turns. A trajectory ends when its last stage does plus its own tool time; the engine ends
with the last.  Prefill is spread evenly over a trajectory's tokens.

`REUSE` = 0.8: a step time is computed anew only when the batch has shrunk to that share, which is exact for the last
few trajectories (they decide the end) and costs a logarithmic number of look-ups for many.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from typing import NamedTuple

from libra_hpc.hardware.steps import StepTimes

REUSE = 0.8
CHUNK = 2_048
"""Prompt tokens whose prefill is priced at once (vLLM's chunked prefill)."""


class Load(NamedTuple):
    """One trajectory at one engine, ordered by what it still has to decode."""

    tokens: int
    """Still to decode, >= 1."""
    name: str
    prefill_s: float
    """Seconds of prefill still to come."""
    tool_s: float
    """Seconds of tools still to come."""
    context: int
    """Mean context over what remains, tokens."""


def prefill_s(steps: StepTimes, tokens: int, context: int) -> float:
    """Seconds that computing ``tokens`` prompt tokens after ``context`` cached ones adds to an engine that is
    decoding."""
    if tokens <= 0:
        return 0.0
    chunk = min(tokens, CHUNK)
    middle = context + tokens // 2
    return (steps.step_s(1, middle, chunk, middle) - steps.step_s(1, middle)) * tokens / chunk


def drain_s(loads: Sequence[Load], steps: StepTimes, slots: int) -> float:
    """Seconds until the last of ``loads`` (ascending) ends at an engine with ``slots`` turns in flight at most; 0.0
    for none."""
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
        """Seconds until the last one ends."""
        if self._end is None:
            self._end = drain_s(self._loads, self.steps, self._slots)
        return self._end

    def resize(self, slots: int) -> None:
        """The engine may have ``slots`` turns in flight now."""
        if slots != self._slots:
            self._slots, self._end = slots, None

    def end_with(self, load: Load) -> float:
        """Seconds until the last one ends if ``load`` were here too."""
        loads = self._loads.copy()
        insort(loads, load)
        return drain_s(loads, self.steps, self._slots)

    def add(self, load: Load) -> None:
        """Place a trajectory here."""
        insort(self._loads, load)
        self._end = None

    def remove(self, load: Load) -> None:
        """Take away what `add` placed."""
        self._loads.remove(load)
        self._end = None
