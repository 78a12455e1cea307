"""Seconds of a training step on one replica: ``fixed_s`` + FLOPs / (devices * peak * MFU) + gradient all-reduce.

* FLOPs: three times the forward pass of each sample (forward plus backward), attention by pairs of positions.
* All-reduce over r replicas: a ring on the link between nodes, sharded over the replica's devices, not overlapped:
  2 (r - 1) / r * `GRADIENT_BYTES` * parameters / devices / bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from libra_hpc.models.devices import Device
from libra_hpc.models.shapes import ModelShape
from libra_hpc.models.train_seconds import BACKWARD, forward_flops

PASSES = 1.0 + BACKWARD
GRADIENT_BYTES = 4
"""Per parameter: float32."""
WEIGHT_BYTES = {"bfloat16": 2, "float32": 4}
"""Per parameter that a joining replica receives, by the type of the model."""


class ReplicaTime(msgspec.Struct, frozen=True):
    shape: ModelShape
    device: Device
    devices: int
    mfu: float
    fixed_s: float
    weight_bytes: int

    def compute_s(self, lengths: Iterable[int]) -> float:
        """Seconds of forward and backward over samples of ``lengths`` tokens, plus ``fixed_s``."""
        flops = PASSES * sum(forward_flops(self.shape, n, n * n, n) for n in lengths)
        return self.fixed_s + flops / (self.devices * self.device.peak_flops * self.mfu)

    def reduce_s(self, replicas: int) -> float:
        sent = 2.0 * (replicas - 1) / replicas * GRADIENT_BYTES * self.shape.params / self.devices
        return sent / self.device.inter_bytes_s

    @property
    def received_bytes(self) -> int:
        """Bytes that one process of a joining replica receives."""
        return self.weight_bytes * self.shape.params // self.devices

    @property
    def receive_s(self) -> float:
        return self.received_bytes / self.device.inter_bytes_s
