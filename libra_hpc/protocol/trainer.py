"""Agent <-> Megatron worker process (one process per device; the ``tp * pp`` processes of one node form one replica).

The agent sends every message to all processes of the replica and takes the answer of local rank 0 once every process
has answered.
"""

from __future__ import annotations

from typing import Union

import msgspec

from .codec import Codec


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One finished trajectory as the trainer sees it; ``n`` tokens.

    ``loss_mask`` marks the tokens the policy generated; ``logprobs`` are the behaviour log-probabilities, 0.0 where the
    mask is 0.
    """

    uid: str
    tokens: bytes
    """int32[n]"""
    loss_mask: bytes
    """uint8[n]"""
    logprobs: bytes
    """float32[n]"""
    advantage: float


class Join(msgspec.Struct, tag=True, frozen=True):
    """Form the data-parallel group of a membership generation: collective over its members.

    The member with the highest step is the truth; others take its weights and optimizer state over the group.
    """

    generation: int
    rank: int
    size: int
    rendezvous: str
    """A file on the shared file system (torch FileStore), fresh for every generation."""
    attempt: int = 0
    """Number of this order among those of one generation: an answer to an earlier one says nothing about it."""


class TrainStep(msgspec.Struct, tag=True, frozen=True):
    """Gradients of this replica's share, summed over the generation, divided by ``total_tokens``, one optimizer step
    per minibatch.

    Every member gets the same ``step``, ``generation`` and ``total_tokens`` (loss tokens of each *global* minibatch)
    and its own samples.
    """

    step: int
    generation: int
    minibatches: tuple[tuple[Sample, ...], ...]
    total_tokens: tuple[int, ...]


class Export(msgspec.Struct, tag=True, frozen=True):
    """Write the present weights to ``path`` as one HF-named safetensors file (atomic rename, by local rank 0) for
    the rollout engines."""

    path: str
    """Chosen by the node's agent, in its shared memory; empty on the way there."""
    version: int


class SaveCheckpoint(msgspec.Struct, tag=True, frozen=True):
    """Write weights and optimizer state of the current step into ``folder`` (HF-named safetensors, atomic)."""

    folder: str
    step: int


class LoadCheckpoint(msgspec.Struct, tag=True, frozen=True):
    """Replace weights and optimizer state by those in ``folder`` (a checkpoint, or a shm snapshot)."""

    folder: str


class Standby(msgspec.Struct, tag=True, frozen=True):
    """Leave the current group and free device memory that can be rebuilt; `Join` ends the standby."""


class StopWorker(msgspec.Struct, tag=True, frozen=True):
    """Exit with 0."""


class WorkerReady(msgspec.Struct, tag=True, frozen=True):
    """Model and optimizer are built; ``step`` is that of the state it starts from."""

    step: int
    parameters: int
    start_s: float


class Joined(msgspec.Struct, tag=True, frozen=True):
    """The generation's group exists and this member's state equals the truth's."""

    generation: int
    step: int
    received_bytes: int
    seconds: float
    attempt: int = 0
    """That of the `Join`."""


class StepDone(msgspec.Struct, tag=True, frozen=True):
    """The step is committed in this replica."""

    step: int
    generation: int
    loss: float
    grad_norm: float
    ratio_mean: float
    """Mean of pi_theta / pi_behaviour over loss tokens."""
    ratio_truncated: float
    """Share of loss tokens whose importance weight was truncated."""
    logprob_gap: float
    """Mean |log pi_theta_old - log pi_behaviour| over loss tokens of the first minibatch."""
    entropy: float
    tokens: int
    """All tokens this replica processed (forward and backward)."""
    loss_tokens: int
    compute_s: float
    reduce_s: float
    """Waiting in and running the all-reduce over replicas."""
    optimizer_s: float
    skipped: int = 0
    """Minibatches whose gradient or sums were not finite: their updates were left out, in every replica alike."""


class Exported(msgspec.Struct, tag=True, frozen=True):
    """The weight file is in place; ``crc32`` is zlib's, of the whole file."""

    version: int
    crc32: int
    size: int
    seconds: float


class StepFailed(msgspec.Struct, tag=True, frozen=True):
    """The step was not committed (a peer died); weights and optimizer state are those of ``step - 1``."""

    step: int
    generation: int
    error: str


class Saved(msgspec.Struct, tag=True, frozen=True):
    """The checkpoint is complete and readable."""

    folder: str
    step: int
    seconds: float


class SaveFailed(msgspec.Struct, tag=True, frozen=True):
    """The checkpoint could not be written (no room, for example); nothing of it is left, and the process goes on."""

    folder: str
    step: int
    reason: str


class ExportFailed(msgspec.Struct, tag=True, frozen=True):
    """The weight file could not be written; nothing of it is left, and the process goes on."""

    version: int
    reason: str


class Warned(msgspec.Struct, tag=True, frozen=True):
    """A snapshot could not be written; nothing of it is left, and training goes on without."""

    what: str


class Alive(msgspec.Struct, tag=True, frozen=True):
    """Once a second, from a thread of its own: what the process is doing."""

    phase: str
    """``idle``, ``compute``, ``waiting for peers``, ``snapshot`` or ``checkpoint``"""
    seconds: float
    """Since the phase began."""


class Loaded(msgspec.Struct, tag=True, frozen=True):
    """State replaced; now at ``step``."""

    step: int


class WorkerError(msgspec.Struct, tag=True, frozen=True):
    """A request could not be carried out; ``fatal`` means the process is about to exit."""

    what: str
    fatal: bool
    generation: int = -1
    """Of the join that failed; -1: the request was none."""
    attempt: int = 0
    """Of the join that failed."""


ToWorker = Union[Join, TrainStep, Export, SaveCheckpoint, LoadCheckpoint, Standby, StopWorker]
FromWorker = Union[
    WorkerReady,
    Joined,
    StepDone,
    Exported,
    StepFailed,
    Saved,
    SaveFailed,
    ExportFailed,
    Warned,
    Alive,
    Loaded,
    WorkerError,
]

to_worker: Codec[ToWorker] = Codec(ToWorker)
from_worker: Codec[FromWorker] = Codec(FromWorker)
