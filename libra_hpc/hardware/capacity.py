"""How many tokens of KV cache a replica holds, and how many blocks a trajectory needs.

A replica of ``tp`` devices shares the weights evenly (Megatron-style sharding splits every large matrix). Each device
keeps ``memory * util - weights / tp - workspace`` bytes for keys and values, and every token takes
`ModelShape.kv_bytes_per_device` of them: with more devices than KV heads the heads are replicated, so capacity no
longer grows with the devices' number alone.
"""

from __future__ import annotations

from libra_hpc.errors import invalid

from .devices import Device
from .models import ModelShape


def kv_capacity(device: Device, shape: ModelShape, tp: int, memory_util: float = 0.9) -> int:
    """Tokens of KV cache of one replica of ``tp`` devices; 0 when the weights and the workspace leave no room.

    ``memory_util`` is the share of device memory the engine may use (vLLM's ``gpu_memory_utilization``).  Raises
    `UserError` for a share outside (0, 1] and for a ``tp`` that does not shard the model.
    """
    if not 0 < memory_util <= 1:
        raise invalid("memory_util", memory_util, "is no share of the device memory", "a number in (0, 1]")
    shape.check_tp(tp)
    free = device.memory_bytes * memory_util - shape.weight_bytes / tp - device.workspace_bytes
    return max(0, int(free // shape.kv_bytes_per_device(tp)))


def blocks_of(tokens: int, block_size: int) -> int:
    """Blocks a replica must have to run a trajectory of ``tokens`` context tokens to its end.

    One more than they fill: a prompt whose last block is cached computes that block again, into another.
    """
    return -(-tokens // block_size) + 1
