"""One turn inside a simulated engine, and the totals an engine keeps."""

from __future__ import annotations


class SimRequest:
    """A turn: continue a context of ``tokens`` by ``left`` more.

    ``computed`` of its tokens are in the KV cache; as in vLLM the last sampled token is not, until the next step
    computes it.
    """

    __slots__ = (
        "aborted",
        "again",
        "blocks",
        "cached",
        "computed",
        "counted",
        "decoding",
        "generated",
        "high",
        "keep_s",
        "left",
        "own",
        "priority",
        "prompt",
        "prompt_blocks",
        "serial",
        "step",
        "tokens",
        "trajectory",
    )

    def __init__(
        self,
        trajectory: str,
        prompt: str,
        prompt_blocks: int,
        tokens: int,
        left: int,
        priority: int = 0,
        keep_s: float = 0.0,
        high: int = 0,
        again: str = "move",
    ) -> None:
        self.trajectory, self.prompt = trajectory, prompt
        self.prompt_blocks = prompt_blocks
        """Full blocks of the prompt, which siblings may share."""
        self.tokens, self.left = tokens, left
        self.priority, self.keep_s = priority, keep_s
        self.high = high
        """Positions of the context that were computed before, here or elsewhere."""
        self.again = again
        """Why a position below ``high`` has to be computed again.

        ``move`` (the last turn ran elsewhere), ``eviction`` (its blocks were), ``partial_block`` (no block was, but
        partly filled ones are never found), ``preemption``, ``swap`` (of the weights), ``restart`` (of the trajectory,
        from its prompt).
        """
        self.serial = 0
        self.computed = self.generated = self.step = 0
        self.blocks = self.own = 0
        """Blocks of the context so far, and those of them that no prompt shares."""
        self.decoding = self.counted = self.aborted = False
        self.cached = 0
        """Tokens found in the prefix cache at its first admission."""


class Counters:
    """Totals of one engine."""

    __slots__ = (
        "again",
        "busy_s",
        "cached",
        "first_cached",
        "first_prefill",
        "generated",
        "paused_s",
        "preemptions",
        "prefilled",
        "recomputed",
        "steps",
    )

    def __init__(self) -> None:
        self.generated = 0
        self.prefilled = 0
        """Prompt tokens computed, repetitions included."""
        self.cached = 0
        """Tokens found in the prefix cache, at every admission."""
        self.again: dict[str, int] = {}
        """Of ``prefilled``: tokens that had been computed before, by cause: see `SimRequest.again`."""
        self.first_prefill = self.first_cached = 0
        """The split of every request's prompt at its first admission, which is what live engines report."""
        self.preemptions = 0
        """By lack of KV blocks."""
        self.recomputed = 0
        """Running requests put back by weight updates."""
        self.steps = 0
        self.busy_s = 0.0
        """Inside steps and weight updates."""
        self.paused_s = 0.0
        """Inside weight updates."""
