"""Host memory of one node, term by term, in bytes; files in /dev/shm count as memory of the job.

- Weight files: engines read every version from /dev/shm, and the node that exports writes them there.
- Snapshots: one complete training state in /dev/shm, and the next one while it is written.
- Saving: the process that writes a snapshot or checkpoint first collects the state of its replica.
- Standby: a hybrid node that rolls out keeps its replica's float32 state; a stateless replica keeps nothing. vLLM's
  standby drops weights and caches.
- KV tier, environments: what the run file gives them.

A hybrid node is in one of two moments, training or rollout; the larger counts.
"""

from __future__ import annotations

import msgspec

from libra_hpc.hardware.models import ModelShape

from .memory import STATE_BYTES, optimizer_bytes

WEIGHT_VERSIONS = 4
"""Weight files on a node at once: the three that `libra_hpc.weights.relay` keeps, and the one being written."""
SNAPSHOTS = 2
"""Snapshots at once: the complete one, and the one being written (`libra_hpc.train.worker`)."""
PROCESS_BYTES = 4e9
"""Least memory of a node's agent, engine processes and libraries: below it a node certainly fails."""


class NodeWork(msgspec.Struct, frozen=True):
    """What a node does with its memory."""

    trains: bool = False
    rolls: bool = False
    """With ``trains``: a hybrid node."""
    snapshots: bool = True
    state_share: float = 1.0
    """Share of the whole training state that the node's ranks have."""
    stateless: bool = False
    """Its replica has weights and gradients alone: it neither saves nor keeps anything in standby."""
    kv_bytes: float = 0.0
    """For KV caches that the GPUs evicted."""
    environment_bytes: float = 0.0


class NodeMemory(msgspec.Struct, frozen=True):
    """Bytes of one node."""

    weight_files: float
    snapshots: float
    saving: float
    standby: float
    kv_tier: float
    environments: float
    processes: float

    @property
    def shared(self) -> dict[str, float]:
        """The terms in /dev/shm."""
        return {name: size for name, size in self.terms().items() if name in ("weight files", "snapshots")}

    @property
    def total(self) -> float:
        return sum(self.terms().values())

    def terms(self) -> dict[str, float]:
        """What is not 0, by its name in words."""
        sizes = {name.replace("_", " "): float(getattr(self, name)) for name in self.__struct_fields__}
        return {name: size for name, size in sizes.items() if size}


def state_bytes(shape: ModelShape) -> float:
    """A saved training state: weights, and the optimizer's state."""
    return float(shape.params * (shape.dtype_bytes + optimizer_bytes(shape)))


def node_memory(shape: ModelShape, work: NodeWork) -> NodeMemory:
    """The fuller moment of the node."""
    stateful = work.trains and not work.stateless
    state = state_bytes(shape) * work.state_share if stateful else 0.0
    kept = shape.params * STATE_BYTES * work.state_share if stateful and work.rolls else 0.0
    hybrid = work.trains and work.rolls
    # Checkpoints are collected by a core node; a hybrid one writes its snapshots only.
    saving = 0.0 if hybrid and not work.snapshots else state
    training = (SNAPSHOTS * state if work.snapshots else 0.0, saving, 0.0)
    rollout = (state if work.snapshots else 0.0, 0.0, kept)
    snapshots, saving, standby = max(training, rollout, key=sum) if hybrid else training
    return NodeMemory(
        weight_files=float(WEIGHT_VERSIONS * shape.weight_bytes),
        snapshots=snapshots,
        saving=saving,
        standby=standby,
        kv_tier=work.kv_bytes if work.rolls else 0.0,
        environments=work.environment_bytes,
        processes=PROCESS_BYTES,
    )
