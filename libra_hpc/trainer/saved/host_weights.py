"""Weights in host memory, which come to the device for a while: of a reference policy, or bases of adapters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.nn.utils import vector_to_parameters

from libra_hpc.trainer.device import host_buffer
from libra_hpc.trainer.model.mcore import parallel_state


def host_weights(parameters: Iterable[torch.nn.Parameter]) -> list[HostWeights]:
    """Move the weights of parameters to host memory; collective over the copies of each."""
    parts: dict[tuple[bool, torch.dtype], list[torch.nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        # Megatron-Core's mark of experts that other ranks have others of.
        parts[not getattr(parameter, "allreduce", True), parameter.dtype].append(parameter)
    groups = (
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        parallel_state.get_expert_data_parallel_group(),
    )
    return [HostWeights(own, groups[routed]) for (routed, _), own in parts.items()]


class HostWeights:
    """Parameters of one type that the processes of ``group`` have in common, of which each keeps a piece."""

    def __init__(self, parameters: list[torch.nn.Parameter], group: dist.ProcessGroup) -> None:
        self._parameters, self._group, dtype = parameters, group, parameters[0].dtype
        self._device, self._count = parameters[0].device, sum(map(torch.numel, parameters))
        size = -(-self._count // group.size())
        buffer, begin = host_buffer(self._device, -(-size * dtype.itemsize // 4)), -group.rank() * size
        self._piece = buffer.view(dtype)[:size]
        for parameter in parameters:
            # A copy of all of them would need the device's memory twice.
            low, high = max(begin, 0), min(begin + parameter.numel(), size)
            if low < high:
                self._piece[low:high] = parameter.detach().flatten()[low - begin : high - begin]
            begin += parameter.numel()
        self.drop()

    def fetch(self) -> None:
        flat = own = self._piece.to(self._device, copy=True)
        if self._group.size() > 1:
            flat = own.new_empty(len(own) * self._group.size())
            dist.all_gather_into_tensor(flat, own, group=self._group)
        vector_to_parameters(flat[: self._count], self._parameters)

    def drop(self) -> None:
        for parameter in self._parameters:
            # Sizes stay.
            parameter.data = parameter.data.new_empty(()).expand(parameter.shape)
