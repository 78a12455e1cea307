"""`StepTimes`: how long one engine step takes, whatever the source of the figure.

A step of a vLLM replica decodes one token of each running sequence and, with chunked prefill, computes some prompt
tokens beside them.  Everything above (batching, queueing, preemption, caching) is the caller's own physics.
"""

from __future__ import annotations

from typing import Protocol


class StepTimes(Protocol):
    """One model on one replica of ``tp`` devices."""

    tp: int
    kv_capacity: int
    """Tokens of KV cache of the replica."""
    source: str
    """Where the figures come from, in words: measured, operator tables, or roofline."""

    def step_s(self, decodes: int, kv_tokens: int, prefill: int = 0, context: int = 0) -> float:
        """Seconds of one step.

        ``decodes`` sequences that hold ``kv_tokens`` tokens in all get one token each; ``prefill`` new prompt tokens of
        one sequence are computed after ``context`` tokens of it that are in the cache already.  Either part may be 0,
        not both.  Linear in ``kv_tokens`` while the other three stay, so that the time of k steps of one batch is k
        times the step at its mean.
        """
