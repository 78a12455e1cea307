"""The reference policy: a frozen copy of weights in host memory, from a Hugging Face folder.

- The processes of a world with the same parameters share one copy, a piece each.
- For a pass, the gradient buffers hold the weights: between two steps they have no content. So the device needs no
  further memory, and the model, its parallelism and its packs are those of the policy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from libra_hpc.trainer.train_engine import TrainEngine
from libra_hpc.weights.names import from_hf, own_entries

from .checkpoint import TensorFiles


class ReferencePolicy:
    """Lends its weights to the model of ``engine``."""

    def __init__(self, engine: TrainEngine, folder: Path) -> None:
        """Overwrites the gradients; raises `OSError` when the weights cannot be read."""
        self._buffers = [*engine.ddp.buffers, *engine.ddp.expert_parallel_buffers]
        with self._in_gradients(), torch.no_grad(), TensorFiles(folder) as files:
            parameters = engine.named_parameters()
            for name, entry in own_entries(engine.shape, engine.split).items():
                parameters[name].copy_(from_hf(entry, files, engine.shape, engine.split))
        self._pieces = [_own_piece(buffer).to("cpu", copy=True) for buffer in self._buffers]

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Within, the model has these weights, and no gradients; collective over the copies of a parameter."""
        for buffer, piece in zip(self._buffers, self._pieces, strict=True):
            own = _own_piece(buffer)
            own.copy_(piece)
            if buffer.data_parallel_world_size > 1:
                dist.all_gather_into_tensor(_as_weights(buffer), own, group=buffer.data_parallel_group)
        with self._in_gradients():
            yield

    @contextmanager
    def _in_gradients(self) -> Iterator[None]:
        """Within, parameters have their places in the gradient buffers."""
        own = [(parameter, parameter.data) for buffer in self._buffers for parameter in buffer.params]
        try:
            for buffer in self._buffers:
                flat = _as_weights(buffer)
                for parameter in buffer.params:
                    begin = parameter.data.storage_offset() - buffer.param_data.storage_offset()
                    parameter.data = flat[begin : begin + parameter.numel()].view(parameter.shape)
            yield
        finally:
            for parameter, data in own:
                parameter.data = data


def _as_weights(buffer: Any) -> torch.Tensor:
    """The front of the float32 gradients as a flat buffer of weights."""
    weights = buffer.param_data
    return buffer.grad_data.view(weights.dtype)[: weights.numel()]


def _own_piece(buffer: Any) -> torch.Tensor:
    """Return the piece of `_as_weights` that this process has for all copies; Megatron-Core pads buffers to whole
    pieces."""
    flat, size = _as_weights(buffer), buffer.param_data.numel() // buffer.data_parallel_world_size
    rank = buffer.data_parallel_group.rank()
    return flat[rank * size : (rank + 1) * size]
