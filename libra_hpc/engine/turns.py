"""One request inside the engine: its checks, and how its tokens add up to the answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from libra_hpc.protocol.codec import pack_f32, pack_i32
from libra_hpc.protocol.engine import Generate, Generated

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

    from .expert_table import Rows

PARAMETER_SETS = 1024
"""Cached sampling parameters; a task has few combinations of limit, temperature and stop ids."""
NOT_FINITE = "log-probabilities are not finite"
"""Error of an answer that would make every weight of the policy NaN in the next step."""


class TurnRejected(Exception):
    """A request the engine cannot run; the message is one sentence for its sender."""


def read_prompt(request: Generate, max_model_len: int, vocab_size: int) -> list[int]:
    """The prompt's token ids; raises `TurnRejected` for a request that vLLM could not run.

    A prompt must leave room for one token: ``1 <= len(prompt) < max_model_len``. ``max_tokens`` may exceed the room:
    the turn then ends with finish reason ``length``.
    """
    if len(request.prompt) % 4:
        raise TurnRejected(f"prompt: {len(request.prompt)} bytes are not int32 token ids.")
    ids = np.frombuffer(request.prompt, dtype="<i4")
    if not ids.size:
        raise TurnRejected("prompt: empty.")
    if ids.size >= max_model_len:
        raise TurnRejected(f"prompt: {ids.size} tokens leave no room in a context of {max_model_len}.")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise TurnRejected(f"prompt: token id {low if low < 0 else high} is outside the vocabulary of {vocab_size}.")
    if request.max_tokens < 1:
        raise TurnRejected(f"max_tokens = {request.max_tokens}: at least 1 is needed.")
    if not (math.isfinite(request.temperature) and request.temperature >= 0):
        raise TurnRejected(f"temperature = {request.temperature}: a number >= 0 is needed.")
    prompt: list[int] = ids.tolist()
    return prompt


class TurnInFlight:
    """A request in flight; times in seconds of ``time.monotonic``."""

    def __init__(self, rid: str, arrived: float, routed: int = -1) -> None:
        self.rid, self.arrived = rid, arrived
        self._routed, self._experts = routed, list[bytes]()
        self.kv_version, self.oldest_kv = -1, -1
        """Where KV outlives updates: weights of its own first KV, and the oldest that it may find in a cache."""
        self.scheduled = math.inf
        self.cached_tokens = 0
        self.recomputed = 0
        """Times a weight update put it back into the queue that vLLM has not reported yet."""
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self._spans: list[list[int]] = []

    def extend(self, tokens: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        """Append one step's tokens, sampled under weight ``version``."""
        self.tokens += tokens
        self.logprobs += logprobs
        if self._spans and self._spans[-1][0] == version:
            self._spans[-1][1] += len(tokens)
        else:
            self._spans.append([version, len(tokens)])

    def route(self, rows: Rows | None) -> None:
        """Append experts of the tokens before a sampled one: of all before the first, then of one more each time."""
        if rows is not None and self._routed >= 0:
            self._experts.append(rows[0 if self._experts else self._routed :].tobytes())

    def finish(self, reason: str, now: float, error: str = "") -> Generated:
        """The answer with every token so far; an error without tokens when a log-probability is not finite."""
        started = min(self.scheduled, now)
        if not math.isfinite(sum(self.logprobs)):
            self.tokens, self.logprobs, self._spans, self._experts = [], [], [], []
            reason, error = "error", error or NOT_FINITE
        return Generated(
            rid=self.rid,
            tokens=pack_i32(self.tokens),
            logprobs=pack_f32(self.logprobs),
            finish=reason,
            versions=tuple((version, count) for version, count in self._spans),
            cached_tokens=self.cached_tokens,
            queue_s=started - self.arrived,
            run_s=now - started,
            error=error,
            experts=b"".join(self._experts),
            kv_version=self.kv_version if self._spans and self.kv_version < self._spans[0][0] else -1,
        )


@lru_cache(maxsize=PARAMETER_SETS)
def sampling(temperature: float, max_tokens: int, stop_ids: tuple[int, ...]) -> SamplingParams:
    """vLLM's parameters; shared between requests: below the front end vLLM only reads them."""
    from vllm.sampling_params import SamplingParams

    return SamplingParams(
        temperature=temperature,
        max_tokens=max_tokens,
        stop_token_ids=list(stop_ids),
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
    )
