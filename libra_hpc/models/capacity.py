"""Tokens of KV cache that a replica holds, and blocks that a trajectory needs.

Each of ``tp`` devices has ``memory * util - weights / tp - workspace`` bytes for keys and values; a token takes
`ModelShape.kv_bytes_per_device`. Beyond the number of KV heads these are replicated, and capacity grows more slowly.
"""

from __future__ import annotations

from libra_hpc.errors import invalid

from .devices import Device
from .shapes import ModelShape

MIB, GIB = 1 << 20, 1 << 30
"""Bytes."""


def kv_capacity(device: Device, shape: ModelShape, tp: int, memory_util: float = 0.9) -> int:
    """Tokens of KV cache of a replica of ``tp`` devices; 0 when weights and workspace leave no room.

    ``memory_util`` is the share of device memory for the engine (vLLM's ``gpu_memory_utilization``). Raises
    `UserError` for a share outside (0, 1], or a ``tp`` that does not shard the model.
    """
    if not 0 < memory_util <= 1:
        raise invalid("memory_util", memory_util, "is no share of the device memory", "a number in (0, 1]")
    shape.check_tp(tp, "tp", rollout=True)
    free = device.memory_bytes * memory_util - shape.weight_bytes / tp - device.workspace_bytes
    return max(0, int(free // shape.kv_bytes_per_device(tp)))


def blocks_of(tokens: int, block_size: int) -> int:
    """Blocks that a replica needs to finish a trajectory of ``tokens`` context tokens.

    One more than they fill: a prompt whose last block is cached computes that block again, into another.
    """
    return -(-tokens // block_size) + 1
