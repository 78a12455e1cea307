"""Tokens of KV cache that a replica holds, and blocks that a trajectory needs.

Each of ``tp`` devices has ``memory * UTIL - weights / tp - workspace`` bytes for keys and values; a token takes
`ModelShape.kv_bytes_per_device`. Beyond the number of KV heads these are replicated, and capacity grows more slowly.
"""

from __future__ import annotations

from .devices import Device
from .shapes import ModelShape

MIB, GIB = 1 << 20, 1 << 30
"""Bytes."""
UTIL = 0.9
"""Share of a GPU that an engine takes: vLLM's default."""


def kv_capacity(device: Device, shape: ModelShape, tp: int) -> int:
    """Tokens of KV cache of a replica of ``tp`` devices; 0 when weights and workspace leave no room.

    Raises `UserError` for a ``tp`` that does not shard the model.
    """
    shape.check_tp(tp, "tp", rollout=True)
    free = device.memory_bytes * UTIL - shape.weight_bytes / tp - device.workspace_bytes
    return max(0, int(free // shape.kv_bytes_per_device(tp)))


def blocks_of(tokens: int, block_size: int) -> int:
    """Blocks that a replica needs to finish a trajectory of ``tokens`` context tokens.

    One more than they fill: a prompt whose last block is cached computes that block again, into another.
    """
    return -(-tokens // block_size) + 1
