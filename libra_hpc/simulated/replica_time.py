"""How long a replica's share of a training step takes.

Seconds = ``fixed_s`` + FLOPs / (devices * peak * MFU) + gradient all-reduce over the replicas.

* FLOPs: forward plus backward, three times the forward pass of each sample, whose attention counts pairs of positions.
* The all-reduce is a ring over float32 gradients, sharded over the replica's devices, on the link between nodes, hidden
  behind nothing: 2 (r - 1) / r * 4 bytes * parameters / devices / bandwidth.
* A newcomer's state is `STATE_BYTES` = 12 per parameter: float32 weights and both Adam moments.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from libra_hpc.cost_models.training_time import BACKWARD, forward_flops
from libra_hpc.hardware.devices import Device
from libra_hpc.hardware.models import ModelShape

PASSES = 1.0 + BACKWARD
GRADIENT_BYTES = 4
STATE_BYTES = 12


class ReplicaTime(msgspec.Struct, frozen=True):
    """One replica of ``devices`` devices."""

    shape: ModelShape
    device: Device
    devices: int
    mfu: float
    fixed_s: float

    def compute_s(self, lengths: Iterable[int]) -> float:
        """Seconds of forward and backward over samples of so many tokens, and of what no sample causes."""
        flops = PASSES * sum(forward_flops(self.shape, n, n * n) for n in lengths)
        return self.fixed_s + flops / (self.devices * self.device.peak_flops * self.mfu)

    def reduce_s(self, replicas: int) -> float:
        """Seconds of one gradient all-reduce."""
        sent = 2.0 * (replicas - 1) / replicas * GRADIENT_BYTES * self.shape.params / self.devices
        return sent / self.device.inter_bytes_s

    @property
    def state_bytes(self) -> int:
        """Bytes one process of the replica receives when it takes a peer's state."""
        return STATE_BYTES * self.shape.params // self.devices

    @property
    def receive_s(self) -> float:
        """Seconds of receiving them."""
        return self.state_bytes / self.device.inter_bytes_s
