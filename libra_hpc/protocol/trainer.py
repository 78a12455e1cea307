"""Agent <-> Megatron worker process: one process per device, ``tp * pp`` processes per node.

The processes of all nodes of the core form one world, which owns weights and optimizer state. Those of a hybrid node
are a *replica* outside of it: weights and gradients, no optimizer.

An agent sends every message to all processes of its node. It takes the answer of local rank 0 once all have answered.
"""

from __future__ import annotations

from typing import Literal, Union

import msgspec

from .codec import Codec
from .engine_state import Doing, EngineReady

ENGINES = 256
"""Numbers of engines in a loss mask; 0: the policy has not generated the token, 1: an engine without a number."""


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One sequence of ``n`` tokens of a finished trajectory, as the trainer gets it.

    ``loss_mask`` marks the tokens that the policy generated, with the number of their engine (`ENGINES`). ``logprobs``
    are behaviour log-probabilities, 0.0 elsewhere.
    """

    uid: str
    """``index.sample.part``: number of the prompt, of the trajectory in its group, of the sample in its trajectory."""
    tokens: bytes
    """int32[n]"""
    loss_mask: bytes
    """uint8[n]"""
    logprobs: bytes
    """float32[n]"""
    advantage: float
    """All of its tokens have it; where turns have different ones, the largest of them."""
    trajectory_tokens: int = 0
    """Loss tokens of all samples of its trajectory; 0: it is the only one."""
    advantages: bytes = b""
    """float32[n], where turns have different ones; empty: ``advantage``."""
    experts: bytes = b""
    """Rows of all its tokens, as `Generated.experts`, which its node adds; empty: none is known."""
    routed: bytes = b""
    """uint8[n], 1 where the experts of a token are known; empty: nowhere."""

    @property
    def trajectory(self) -> str:
        """The name of the sample's trajectory: ``index.sample``."""
        return self.uid.rpartition(".")[0]


class Join(msgspec.Struct, tag=True, frozen=True):
    """Form the data-parallel group of a membership generation: collective over its members.

    All processes of the core are member 0; replicas are members 1, 2, .., and take its weights.
    """

    generation: int
    rank: int
    size: int
    rendezvous: str
    """File on the shared file system (torch FileStore), fresh for every generation."""
    attempt: int = 0
    """Number of this order within the generation: answers to earlier ones are ignored."""
    step: int = -1
    """Version of the weights that is on its way to all nodes, the core's step; -1: none is."""
    weights: str = ""
    """The image of this node (`libra_hpc.weights.image`), set by its agent; empty: none."""
    version: int = -1
    """Its version; by now it may have a newer one."""


class TrainPortion(msgspec.Struct, tag=True, frozen=True):
    """Add the gradient of a portion of the batch of ``step`` to that of those before; `TrainStep` has the last ones.

    Samples as there. A `Join` drops what was added.
    """

    step: int
    generation: int
    portion: int
    """Number of portions before; 0: gradients begin at zero."""
    samples: tuple[Sample, ...]


class TrainStep(msgspec.Struct, tag=True, frozen=True):
    """Train on one global batch: one optimizer step per minibatch, gradients summed over the generation.

    Every member gets its own samples, all nodes of the core the same ones: they spread them over their data-parallel
    ranks. ``step``, ``generation`` and ``divisors`` are the same for all. By the latter the gradient of each *global*
    minibatch is divided; 0: it has no loss token; None: it is a portion of the next one, packed alone.
    """

    step: int
    generation: int
    minibatches: tuple[tuple[Sample, ...], ...]
    divisors: tuple[int | None, ...]
    portions: int = 0
    """Portions of the first minibatch that came before, in a `TrainPortion` each."""


class OfferWeights(msgspec.Struct, tag=True, frozen=True):
    """Write what this process owns of the weights, as an offer (`libra_hpc.weights.pieces`) in shared memory.

    To every process of the core; each answers for itself and waits for no other.
    """

    folder: str
    """Set by the node's agent; empty before."""
    version: int
    """Version of the present step."""
    base: int
    """Version that every engine has or will have, the last one offered; -1: write whole tensors."""


Tier = Literal["checkpoint", "snapshot"]
"""Where a state is saved: a checkpoint on the shared file system, a snapshot in the shared memory of the nodes."""


class SaveState(msgspec.Struct, tag=True, frozen=True):
    """Write this process's part of the state of the current step into ``folder``.

    `SaveStarted` answers once the state is in host memory, `Saved` or `SaveFailed` once it is written. The train leader
    then completes or discards the state. It asks for one of a tier at a time, each in a folder of its own.
    """

    folder: str
    """The name of a snapshot, which the node's agent replaces by a folder."""
    step: int
    tier: Tier = "checkpoint"


class KeepState(msgspec.Struct, tag=True, frozen=True):
    """Remove parts of snapshots that are of no use any more; for the node's agent."""

    complete: int
    """Step of the newest complete snapshot; earlier ones go. -1: none."""
    dropped: str = ""
    """Name of one that was given up."""


class Standby(msgspec.Struct, tag=True, frozen=True):
    """Leave the current group and free device memory that can be rebuilt; `Join` ends the standby."""


class Freed(msgspec.Struct, tag=True, frozen=True):
    """Answer to `Standby`: the memory is free."""

    seconds: float


class Joined(msgspec.Struct, tag=True, frozen=True):
    """The generation's group exists, and this member has its weights."""

    generation: int
    step: int
    received_bytes: int
    """Bytes of weights that one process received; a node's answer has the sum."""
    seconds: float
    attempt: int = 0
    """Attempt of the `Join`."""
    source: str = ""
    """Where a node's weights are from, set by its agent: ``own`` (it had them) | ``image`` | ``core``."""
    memory_s: float = 0.0
    """Seconds out of ``seconds`` until there was memory again."""
    weights_s: float = 0.0
    """Seconds out of ``seconds`` until the weights of the node's image were in it."""


class PortionDone(msgspec.Struct, tag=True, frozen=True):
    """The gradient of a portion is added."""

    step: int
    generation: int
    portion: int
    error: str = ""
    """Why it is not; empty: it is."""


class StepDone(msgspec.Struct, tag=True, frozen=True):
    """The step is committed in this member; only the core's answer has the sums over all members."""

    step: int
    generation: int
    numbers: dict[str, float]
    """By the names of `libra_hpc.facts.columns.TRAINING`; what is not finite is left out."""
    engine_gaps: dict[int, tuple[float, int]] = {}
    """By number of an engine: the sum behind ``logprob_gap`` over its tokens, and how many these are."""


class Offered(msgspec.Struct, tag=True, frozen=True):
    """This process's offer can be read."""

    version: int
    base: int
    """-1: whole tensors, also when a delta was asked for (of float32 weights, or to another base)."""
    writer: str
    """The name in the offer's file."""
    size: int
    """Bytes."""
    changed: int
    """Elements with a value in it."""
    total: int
    """Elements that this process owns."""
    seconds: float


class OfferFailed(msgspec.Struct, tag=True, frozen=True):
    """The offer could not be written (no room, for example); nothing of it remains."""

    version: int
    reason: str


class StepFailed(msgspec.Struct, tag=True, frozen=True):
    """The step was not committed (a peer died); the state is that of ``step - 1``."""

    step: int
    generation: int
    error: str


class SaveStarted(msgspec.Struct, tag=True, frozen=True):
    """The state of ``step`` is in host memory; training goes on while it is written."""

    folder: str
    seconds: float
    """For which training stopped."""


class Saved(msgspec.Struct, tag=True, frozen=True):
    """This process, or all of this node, has written its part; that of a checkpoint is durable."""

    folder: str
    step: int
    seconds: float
    files: dict[str, tuple[int, int]] = {}
    """Size and CRC-32 of a checkpoint's files, by their path below ``folder``."""
    tier: Tier = "checkpoint"
    part_of: int = -1
    """Node whose part the sender has; -1: its own."""


class SaveFailed(msgspec.Struct, tag=True, frozen=True):
    """A part could not be written (no room, for example)."""

    folder: str
    step: int
    reason: str
    tier: Tier = "checkpoint"
    part_of: int = -1
    """See `Saved.part_of`."""


class WorkerFailed(msgspec.Struct, tag=True, frozen=True):
    """A request failed; ``fatal``: the process is about to exit."""

    what: str
    fatal: bool
    generation: int = -1
    """Generation of the join that failed; -1: another request."""
    attempt: int = 0
    """Attempt of the join that failed."""


ToWorker = Union[Join, TrainPortion, TrainStep, OfferWeights, SaveState, KeepState, Standby]
FromWorker = Union[
    EngineReady,
    Joined,
    Freed,
    PortionDone,
    StepDone,
    Offered,
    OfferFailed,
    StepFailed,
    SaveStarted,
    Saved,
    SaveFailed,
    Doing,
    WorkerFailed,
]

to_worker: Codec[ToWorker] = Codec(ToWorker)
from_worker: Codec[FromWorker] = Codec(FromWorker)
