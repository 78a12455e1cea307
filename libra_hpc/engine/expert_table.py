"""Experts that a CPU engine's routers chose, by slot of its KV cache: a cached block keeps those of its tokens.

vLLM's own connector of auxiliary outputs needs its second model runner, which has no CPU build. This one has its place
in the scheduler, which asks it for the rows of each sampled token, and resets it with the prefix cache. The table is
memory that the scheduler shares with the worker, which may be another process.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request

from libra_hpc.models.shapes import ModelShape

Rows = npt.NDArray[np.uint8] | npt.NDArray[np.int16]
"""[tokens, layers, experts of a token]"""


class ExpertTable:
    """``rpc`` calls a method of every worker by name."""

    def __init__(self, scheduler: Scheduler, rpc: Callable[..., Any], shape: ModelShape) -> None:
        groups = scheduler.kv_cache_config.kv_cache_groups
        # Layers with a window lose blocks.
        place, group = next(
            found for found in enumerate(groups) if isinstance(found[1].kv_cache_spec, FullAttentionSpec)
        )
        self._blocks = scheduler.kv_cache_manager.coordinator.single_type_managers[place].req_to_blocks
        self._block = group.kv_cache_spec.block_size
        size = scheduler.kv_cache_config.num_blocks * self._block, shape.layers, shape.experts_per_token
        choice = np.dtype(np.uint8 if shape.experts <= 256 else np.int16)
        memory = os.memfd_create("experts")
        os.ftruncate(memory, choice.itemsize * size[0] * size[1] * size[2])
        rpc("keep_experts", args=(f"/proc/{os.getpid()}/fd/{memory}", group.layer_names[0], size, choice.name))
        self._table: Rows = np.frombuffer(mmap.mmap(memory, 0), choice).reshape(size)
        os.close(memory)
        scheduler.aux_output_connector = self  # type: ignore[assignment]

    def take_output(self, request: Request, _: Any) -> Rows:
        """Experts of the tokens that led to the newest one, which are all before it where it is the first."""
        end = request.num_tokens - 1
        tokens = np.arange(0 if request.num_output_tokens == 1 else end - 1, end)
        blocks, first = self._blocks[request.request_id], tokens[0] // self._block
        own = np.array([block.block_id for block in blocks[first : (end - 1) // self._block + 1]])
        return self._table[own[tokens // self._block - first] * self._block + tokens % self._block]

    def build_connector_meta(self, *_: Any) -> None:
        """Nothing is for the workers."""

    def request_finished(self, request: Request) -> None:
        """Its blocks may stay in the cache."""

    def reset(self) -> None:
        """No block is found any more, and each token is computed before its row is read."""


def bind(model: torch.nn.Module, path: str, attention: str, size: tuple[int, int, int], choice: str) -> None:
    """Have the routers of a worker write into the table at ``path``; ``attention``: a layer with its slots."""
    count = size[0] * size[1] * size[2]
    table = torch.from_file(path, shared=True, size=count, dtype=getattr(torch, choice)).view(size)
    for module in model.modules():
        if isinstance(module, MoERunner):
            module.router.set_capture_fn(partial(_keep, table[:, module.layer_id], attention))


def _keep(table: torch.Tensor, attention: str, chosen: torch.Tensor) -> None:
    slots = get_forward_context().slot_mapping[attention]  # type: ignore[call-overload]
    table[slots] = chosen.to(table.dtype)
