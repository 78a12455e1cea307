"""Agent <-> vLLM engine process.

``prompt`` and ``tokens`` are little-endian int32 bytes, ``logprobs`` float32 bytes: natural logarithms of the
distribution that was sampled from, *after* temperature and masks. ``experts`` are rows of tokens,
[tokens, layers, experts of a token], of uint8 for up to 256 experts, else of uint16.
"""

from __future__ import annotations

from typing import NamedTuple, Union

import msgspec

from .codec import Codec
from .engine_state import Doing, EngineReady, EngineStats


class Generate(msgspec.Struct, tag=True, frozen=True):
    """One turn: continue ``prompt`` to a stop id (part of the output) or to ``max_tokens``."""

    rid: str
    prompt: bytes
    max_tokens: int
    temperature: float = 1.0
    stop_ids: tuple[int, ...] = ()
    priority: int = 0
    """vLLM priority: lower is served first."""
    admitted: int = -1
    """Weight version at which its prompt was admitted. KV caches of older weights are not reused for it; -1: nor any
    but those of the weights that the engine has."""
    routed: int = -1
    """First tokens of the prompt whose experts are known; -1: experts are not wanted."""


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Stop a request; it is answered by `Generated` with finish reason ``abort`` and the tokens so far."""

    rid: str


class VersionFiles(NamedTuple):
    """What changes ``base``, or any version after it, into ``version``: manifests of all its offers on this node."""

    version: int
    base: int
    manifests: tuple[str, ...]


class UpdateWeights(msgspec.Struct, tag=True, frozen=True):
    """Take the node's image (`libra_hpc.weights.image`) at ``path``, which has ``version`` or a newer one.

    It is made ready beside the steps and switched to between two.  What cannot be applied is answered by
    `WeightsRefused`, and the old weights stay.
    """

    path: str
    version: int
    changes: tuple[VersionFiles, ...] = ()
    """Newest versions whose offers are here: where they lead on from the engine's own, the image is not read."""


class Sleep(msgspec.Struct, tag=True, frozen=True):
    """Enter warm standby: free device memory that can be rebuilt; requests are refused until `Wake`.

    Answered by `EngineStats` once it is free.
    """


class Wake(msgspec.Struct, tag=True, frozen=True):
    """Leave standby; the weights are stale until the next `UpdateWeights`."""


class Generated(msgspec.Struct, tag=True, frozen=True):
    """The end of a request."""

    rid: str
    tokens: bytes
    logprobs: bytes
    finish: str
    """``stop`` | ``length`` | ``abort`` | ``error``"""
    versions: tuple[tuple[int, int], ...]
    """(weight version, tokens sampled under it), in order; the counts sum to the number of tokens."""
    cached_tokens: int
    queue_s: float
    run_s: float
    error: str = ""
    experts: bytes = b""
    """Rows of all tokens from `Generate.routed` on but the last one, which was not computed; empty: none is known."""
    kv_version: int = -1
    """Oldest weight version that the kept KV of its tokens may have, if ``versions`` begins later; -1: it does not."""


def refusal(rid: str, why: str) -> Generated:
    """The answer to a request that is not begun."""
    return Generated(
        rid=rid,
        tokens=b"",
        logprobs=b"",
        finish="error",
        versions=(),
        cached_tokens=0,
        queue_s=0.0,
        run_s=0.0,
        error=why,
    )


class WeightsApplied(msgspec.Struct, tag=True, frozen=True):
    """The engine now samples from ``version``."""

    version: int
    seconds: float
    """Seconds of the pause."""
    stage_s: float = 0.0
    """Before it, beside the steps."""
    recomputed: int = 0
    """Tokens of running requests whose KV was dropped."""


class EngineFailed(msgspec.Struct, tag=True, frozen=True):
    """Something failed; ``fatal`` means the process is about to exit and must be rebuilt."""

    what: str
    fatal: bool


class WeightsRefused(msgspec.Struct, tag=True, frozen=True):
    """The engine cannot take new weights now; the old ones stay."""

    version: int
    what: str
    absent: bool = False
    """Whether the image has no whole version, for any engine."""


ToEngine = Union[Generate, Abort, UpdateWeights, Sleep, Wake]
FromEngine = Union[EngineReady, Generated, EngineStats, WeightsApplied, WeightsRefused, EngineFailed, Doing]

to_engine: Codec[ToEngine] = Codec(ToEngine)
from_engine: Codec[FromEngine] = Codec(FromEngine)
