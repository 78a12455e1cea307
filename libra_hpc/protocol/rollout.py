"""Agent <-> vLLM engine process.

Arrays: ``prompt`` and ``tokens`` are little-endian int32 bytes, ``logprobs`` float32 bytes (natural log, of the sampled
token, *after* temperature and masks, i.e. of the distribution actually sampled from).
"""

from __future__ import annotations

from typing import Union

import msgspec

from .codec import Codec


class Generate(msgspec.Struct, tag=True, frozen=True):
    """One turn: continue ``prompt`` until a stop id (kept in the output), or ``max_tokens``."""

    rid: str
    prompt: bytes
    max_tokens: int
    temperature: float = 1.0
    stop_ids: tuple[int, ...] = ()
    priority: int = 0
    """vLLM priority: lower is served first."""
    keep_s: float = 0.0
    """Seconds after its end for which the request's KV cache is kept although nothing runs on it, as far as nothing
    else needs the room."""


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Stop a request; it is answered by `Generated` with finish reason ``abort`` and the tokens so far."""

    rid: str


class UpdateWeights(msgspec.Struct, tag=True, frozen=True):
    """Swap in the HF-named safetensors at ``path`` between two engine steps; running requests are recomputed under
    the new weights."""

    path: str
    version: int
    crc32: int
    """zlib.crc32 of the whole file; a mismatch is answered by `EngineError` and leaves the old weights in place."""


class Sleep(msgspec.Struct, tag=True, frozen=True):
    """Become a warm standby: free device memory that can be rebuilt; requests are refused until `Wake`."""


class Wake(msgspec.Struct, tag=True, frozen=True):
    """Leave standby; weights are stale until the next `UpdateWeights`."""


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    """Exit with 0."""


class Generated(msgspec.Struct, tag=True, frozen=True):
    """The end of a request."""

    rid: str
    tokens: bytes
    logprobs: bytes
    finish: str
    """``stop`` | ``length`` | ``abort`` | ``error``"""
    versions: tuple[tuple[int, int], ...]
    """(weight version, number of tokens sampled under it), in order; counts add up to the number of tokens."""
    cached_tokens: int
    queue_s: float
    run_s: float
    error: str = ""


class EngineStats(msgspec.Struct, tag=True, frozen=True):
    """Sent at most every 0.5 s while busy, once when the engine falls idle, and once a second while it is.  Counters
    are totals since start."""

    version: int
    running: int
    waiting: int
    kv_use: float
    """Share of the KV cache that requests hold, 0..1."""
    generated_tokens: int
    prefill_tokens: int
    cached_tokens: int
    preemptions: int
    steps: int
    busy_s: float
    kv_pinned: float = 0.0
    """Share of the KV cache that is only kept for later turns (`Generate.keep_s`); it gives way to any request."""
    update_s: float = 0.0
    """Of ``busy_s``: in weight updates."""
    asleep: bool = False
    """Whether the engine is in standby."""

    @property
    def stepping_s(self) -> float:
        """Of ``busy_s``: in steps."""
        return self.busy_s - self.update_s


class EngineReady(msgspec.Struct, tag=True, frozen=True):
    """The engine accepts requests."""

    version: int
    tp: int
    max_model_len: int
    kv_tokens: int
    """KV capacity of the replica in tokens."""
    start_s: float
    warm_up: tuple[EngineStats, ...] = ()
    """Reports from before it was announced (`libra_hpc.rollout.engine.warm_up`), oldest first; the counters start
    anew after them."""


class WeightsApplied(msgspec.Struct, tag=True, frozen=True):
    """The engine now samples from ``version``."""

    version: int
    seconds: float


class EngineError(msgspec.Struct, tag=True, frozen=True):
    """Something failed; ``fatal`` means the process is about to exit and must be rebuilt."""

    what: str
    fatal: bool


ToEngine = Union[Generate, Abort, UpdateWeights, Sleep, Wake, Shutdown]
FromEngine = Union[EngineReady, Generated, EngineStats, WeightsApplied, EngineError]

to_engine: Codec[ToEngine] = Codec(ToEngine)
from_engine: Codec[FromEngine] = Codec(FromEngine)
