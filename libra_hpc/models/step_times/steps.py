"""`StepTimes`: duration of one engine step, from any source.

A step decodes one token of each running sequence; with chunked prefill it also computes prompt tokens. Batching,
queueing, preemption and caching are the caller's.
"""

from __future__ import annotations

from typing import Protocol


class StepTimes(Protocol):
    """One model on one replica of ``tp`` devices."""

    tp: int
    kv_capacity: int
    source: str
    """Source of the figures in words: measured, operator tables, or roofline."""

    def step_s(self, decodes: int, kv_tokens: int, prefill: int = 0, context: int = 0) -> float:
        """Seconds of one step.

        ``decodes`` sequences, which hold ``kv_tokens`` tokens in total, get one token each. ``prefill`` new prompt
        tokens of one sequence follow ``context`` cached ones. Either part may be 0, not both.

        With the others fixed, the time is linear in ``kv_tokens``: k steps of a batch take k times the step at its
        mean. Where the host's work of asynchronous steps outlasts the device's, it is constant.
        """
