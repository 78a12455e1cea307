"""What is known of an engine, from its process to its agent, the leaders, the coordinator and the pool.

A child of an agent reports once a second what it does, and for how long (`Doing`), whatever it is.
An *engine* is a vLLM engine (kind ``rollout``), or all Megatron processes of a node together (kind ``train``).
All hosts of an environment node together are one of kind ``env``.
"""

from __future__ import annotations

from typing import Literal

import msgspec

EngineKind = Literal["train", "rollout", "env"]
LenderKind = Literal["idle", "spot", "lender"]
"""Kind of a borrowed engine: a node that somebody brought (``join``), a job of ``borrow.spot``, a server (``lend``)."""
StateName = Literal["starting", "loading", "ready", "standby", "ending", "lost", "closed"]
"""``loading``: waits for weights; ``standby``: without device memory; ``ending``: was killed, a process lives;
``closed``: computed wrongly too often, as all engines of the node did."""


START, IDLE = "start", "idle"
STEP, PORTION, JOIN, OFFER, STANDBY = "train step", "train portion", "join", "offer", "standby"
SNAPSHOT, CHECKPOINT, LOAD, WRITE = "snapshot", "checkpoint", "load", "write of a saved state"
STORAGE = (SNAPSHOT, CHECKPOINT, LOAD)
"""Phases that read a saved state, or copy one to host memory once the write before has ended; orders wait."""
FIRST_STEPS, SERVING = "first steps", "serving"
ENGINE_STEP, WEIGHTS, WAKE, PAUSED = "engine step", "weight update", "waking", "pause beside users"
WRITE_IMAGE = "write of the image"


class Doing(msgspec.Struct, tag=True, frozen=True):
    """A child's report.  Times are its own, less those in which the process was stopped."""

    now: dict[str, float] = {}
    """Seconds since each phase that it is in began."""
    ended: dict[str, float] = {}
    """Longest seconds of each phase that ended since the report before."""
    waits: bool = False
    """Whether it waits for peers."""
    silence_s: float = 0.0
    """So long its own code may keep it from the next report."""


class EngineStats(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """Load and totals since the start; by default those of an engine that has done nothing yet.

    Sent at most every 0.5 s while busy, once when the engine becomes idle, then once a second.
    """

    version: int = 0
    running: int = 0
    waiting: int = 0
    kv_use: float = 0.0
    """Share of the KV cache that requests hold, 0..1."""
    generated_tokens: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    busy_s: float = 0.0
    update_s: float = 0.0
    """Seconds out of ``busy_s`` in weight updates."""
    asleep: bool = False
    """Whether the engine is in standby."""
    paused_s: float = 0.0
    """With work, but without room for a step beside the users of its device; not in ``busy_s``."""
    stands_still: bool = False
    """Whether that has lasted so long that its turns should go on elsewhere."""
    pause: str = ""
    """Why it was paused last, in the words of the gate."""

    @property
    def stepping_s(self) -> float:
        """Seconds out of ``busy_s`` in steps."""
        return self.busy_s - self.update_s


class StepCosts(msgspec.Struct, array_like=True, frozen=True):
    """Measured seconds of an engine's step: ``base_s`` + ``token_s`` per KV token in use + ``prefill_s`` per prefilled
    token.
    """

    tp: int
    kv_tokens: int
    """KV capacity in tokens."""
    base_s: float
    token_s: float
    prefill_s: float


class EngineCapacity(msgspec.Struct, array_like=True, frozen=True):
    """What a rollout engine has room for."""

    tp: int
    max_model_len: int
    kv_tokens: int
    """KV capacity of the replica in tokens."""
    warm_up: tuple[EngineStats, ...] = ()
    """Reports of the warm-up profile (`libra_hpc.engine.warm_up`), oldest first; afterwards the counters restart."""


class WeightUpdate(msgspec.Struct, array_like=True, frozen=True):
    """How an engine that serves got new weights: seconds that follow each other, the first on the node."""

    version: int
    wire_s: float = 0.0
    image_s: float = 0.0
    stage_s: float = 0.0
    pause_s: float = 0.0
    recomputed: int = 0
    """See `WeightsApplied`."""


class ObservedEngine(msgspec.Struct, array_like=True, frozen=True):
    """What an engine, a carrier or an environment host of a node is, in the node's heartbeat."""

    kind: str
    state: StateName
    version: int = -1
    """Version of its weights."""
    ends: int = 0
    """How often its processes ended unasked so far."""
    reason: str = ""
    """Why it does not work, or did not before."""
    capacity: EngineCapacity | None = None
    """What a rollout engine that is ready has room for, where that is news."""
    update: WeightUpdate | None = None
    """The newest that it got while it served."""
    starts: int = 0
    """`Row.starts` for which it was started, or woken."""
    world: int = 0
    """Number of the common start of trainers of several nodes."""


class EngineReady(msgspec.Struct, tag=True, frozen=True):
    """Process of an engine -> its agent: it has started."""

    version: int
    """Version of its weights; of a trainer its step."""
    seconds: float = 0.0
    """Since a rollout engine's process began."""
    capacity: EngineCapacity | None = None
    """Capacity of a rollout engine."""
