"""One turn inside a simulated engine, and the counters of an engine."""

from __future__ import annotations

import msgspec


class SimulatedRequest(msgspec.Struct, eq=False):
    """A turn: continue a context of ``tokens`` by ``left`` more.

    ``computed`` of its tokens are in the KV cache.  As in vLLM, the last sampled token enters it in the next step.
    """

    trajectory: str
    prompt: str
    prompt_blocks: int
    """Full blocks of the prompt, which siblings may share."""
    tokens: int
    left: int
    priority: int = 0
    high: int = 0
    """Positions of the context that were computed before, here or elsewhere."""
    again: str = "move"
    """Why positions below ``high`` are computed again.

    ``move``: the last turn ran elsewhere.  ``eviction``: its blocks were evicted.  ``partial_block``: it ended in
    a partly filled block, which is never found.  ``preemption``.  ``swap``: of the weights.  ``restart``: of the
    trajectory, from its prompt.
    """
    serial: int = 0
    computed: int = 0
    generated: int = 0
    step: int = 0
    blocks: int = 0
    """Of the context so far."""
    own: int = 0
    """Of ``blocks``: outside the shared prompt."""
    decoding: bool = False
    counted: bool = False
    aborted: bool = False
    cached: int = 0
    """Tokens found in the prefix cache at its first admission."""


class Counters(msgspec.Struct):
    """Totals of an engine."""

    generated: int = 0
    prefilled: int = 0
    """Prompt tokens computed, repetitions included."""
    cached: int = 0
    """Tokens found in the prefix cache, at every admission."""
    again: dict[str, int] = {}
    """Of ``prefilled``: tokens computed before, by cause (`SimulatedRequest.again`)."""
    fetched: int = 0
    """Of ``cached``: read from host memory."""
    first_prefill: int = 0
    """Of ``prefilled``: at the first admission of each request, which is what live engines report."""
    first_cached: int = 0
    """Of ``cached``: the same."""
    preemptions: int = 0
    recomputed: int = 0
    steps: int = 0
    busy_s: float = 0.0
    """Seconds in steps and weight updates."""
    paused_s: float = 0.0
    """Seconds in weight updates."""
