"""The reference policy: a frozen model of any shape, in host memory, from a Hugging Face folder.

- The processes of a world with the same parameters share one copy, a piece each.
- For a pass its weights are on the device, where the activations of training are before and after. Parallelism and
  packs are those of the policy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from libra_hpc.models.architecture import read_shape
from libra_hpc.trainer.model.mcore import parallel_state
from libra_hpc.trainer.packed_model import PackedModel
from libra_hpc.weights.names import from_hf, own_entries

from .checkpoint import TensorFiles


class ReferencePolicy:
    """Has the parallelism of ``policy``."""

    def __init__(self, policy: PackedModel, folder: Path) -> None:
        """Raises `OSError` when the weights cannot be read; collective over the world."""
        model = PackedModel(read_shape(folder), policy.device, policy.dtype, policy.split)
        parameters = model.named_parameters()
        with torch.no_grad(), TensorFiles(folder) as files:
            for name, entry in own_entries(model.shape, model.split).items():
                parameters[name].copy_(from_hf(entry, files, model.shape, model.split))
        self._model = model
        parts: tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]] = ([], [])
        for parameter in parameters.values():
            # Megatron-Core's mark of experts that other ranks have others of.
            parts[not getattr(parameter, "allreduce", True)].append(parameter)
        groups = (
            parallel_state.get_data_parallel_group(with_context_parallel=True),
            parallel_state.get_expert_data_parallel_group(),
        )
        self._shared = [_Shared(*one) for one in zip(parts, groups, strict=True) if one[0]]

    @contextmanager
    def model(self) -> Iterator[PackedModel]:
        """The model while it has its weights; collective over the copies of a parameter."""
        for one in self._shared:
            one.fetch()
        try:
            yield self._model
        finally:
            for one in self._shared:
                one.drop()


class _Shared:
    """Parameters that the processes of ``group`` have in common, of which each keeps a piece."""

    def __init__(self, parameters: list[torch.nn.Parameter], group: dist.ProcessGroup) -> None:
        self._parameters = [(parameter, parameter.shape) for parameter in parameters]
        self._group, self._device = group, parameters[0].device
        size = -(-sum(map(torch.numel, parameters)) // group.size())
        self._piece, begin = torch.zeros(size, dtype=parameters[0].dtype), -group.rank() * size
        for parameter in parameters:
            # A copy of all of them would need the device's memory twice.
            low, high = max(begin, 0), min(begin + parameter.numel(), size)
            if low < high:
                self._piece[low:high] = parameter.detach().flatten()[low - begin : high - begin]
            begin += parameter.numel()
        self.drop()

    def fetch(self) -> None:
        flat = own = self._piece.to(self._device)
        if self._group.size() > 1:
            flat = own.new_empty(len(own) * self._group.size())
            dist.all_gather_into_tensor(flat, own, group=self._group)
        begin = 0
        for parameter, shape in self._parameters:
            parameter.data = flat[begin : begin + shape.numel()].view(shape)
            begin += shape.numel()

    def drop(self) -> None:
        for parameter, _ in self._parameters:
            parameter.data = parameter.data.new_empty(0)
