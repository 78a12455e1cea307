"""One turn inside a simulated engine, and the counters of an engine."""

from __future__ import annotations


class SimulatedRequest:
    """A turn: continue a context of ``tokens`` by ``left`` more.

    ``computed`` of its tokens are in the KV cache.  As in vLLM, the last sampled token enters it in the next step.
    """

    def __init__(
        self,
        trajectory: str,
        prompt: str,
        *,
        prompt_blocks: int,
        tokens: int,
        left: int,
        priority: int = 0,
        high: int = 0,
        again: str = "move",
    ) -> None:
        self.trajectory, self.prompt, self.tokens, self.left, self.priority = trajectory, prompt, tokens, left, priority
        self.prompt_blocks = prompt_blocks
        """Full blocks of the prompt, which siblings may share."""
        self.high = high
        """Positions of the context that were computed before, here or elsewhere."""
        self.again = again
        """Why positions below ``high`` are computed again.

        ``move``: the last turn ran elsewhere.  ``eviction``: its blocks were evicted.  ``partial_block``: it ended in
        a partly filled block, which is never found.  ``preemption``.  ``swap``: of the weights.  ``restart``: of the
        trajectory, from its prompt.
        """
        self.serial = self.computed = self.generated = self.step = 0
        self.blocks = 0
        """Blocks of the context so far."""
        self.own = 0
        """Blocks out of ``blocks`` outside the shared prompt."""
        self.decoding = self.counted = self.aborted = False
        self.cached = 0
        """Tokens found in the prefix cache at its first admission."""


class Counters:
    """Totals of an engine."""

    def __init__(self) -> None:
        self.generated = 0
        self.prefilled = 0
        """Prompt tokens computed, repetitions included."""
        self.cached = 0
        """Tokens found in the prefix cache, at every admission."""
        self.again: dict[str, int] = {}
        """Tokens out of ``prefilled`` that were computed before, by cause (`SimulatedRequest.again`)."""
        self.first_prefill = 0
        """Tokens out of ``prefilled`` at the first admission of each request, which is what live engines report."""
        self.first_cached = 0
        """Tokens out of ``cached`` at the first admission of each request."""
        self.preemptions = self.recomputed = self.steps = 0
        self.busy_s = 0.0
        """Seconds in steps and weight updates."""
        self.paused_s = 0.0
        """Seconds in weight updates."""
