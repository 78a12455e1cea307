"""AdamW on state in host memory: at an update it streams through the device.

- A piece of the state -> to the device, one step of torch's fused kernel, and back, on a lane of its own.
- Two lanes -> a piece arrives and another leaves while a third is computed: both ways of the link are used.
- Weights of the model's type are rounded from the piece while it is here.

The kernel and its numbers are those of the device, so an update is equal to one without the key. It cannot begin before
the last gradient is there: the norm by which all are scaled is of the whole gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.adamw import adamw

from libra_hpc.models import memory
from libra_hpc.trainer.device import lanes, synchronize

from .optimizer_state import OptimizerState, Shard, distributed


class HostedAdamW:
    """See the module docstring. A float32 model's weights stay on the device; its moments stream."""

    def __init__(self, optimizer: Any, state: OptimizerState, device: torch.device) -> None:
        self._state, self._device = state, device
        names = {id(shard.master): name for name, shard in state.shards.items()}
        groups = [group for one in distributed(optimizer) for group in one.optimizer.param_groups]
        self._groups = [(group, [names[id(master)] for master in group["params"]]) for group in groups]
        """Megatron-Core's groups, which have the rate and the decay of the next update, and names of shards."""

    @torch.no_grad()
    def step(self) -> None:
        """One update with the gradients of all shards; collective over the data-parallel ranks."""
        shards, size, count = self._state.shards, memory.HOSTED_PIECE, memory.HOSTED_LANES
        room = min(size, max((shard.end - shard.begin for shard in shards.values()), default=0))
        buffers = torch.empty((count, 2 + self._state.mixed, room), device=self._device).unbind()
        contexts, number = lanes(self._device, count), 0
        for group, names in self._groups:
            for name in names:
                for begin in range(0, shards[name].end - shards[name].begin, size):
                    with contexts[number % count]():
                        self._step(group, name, begin, buffers[number % count])
                    number += 1
        # Others read host memory, which no queue of the device orders.
        synchronize(self._device)
        self._state.gather()

    def _step(self, group: dict[str, Any], name: str, begin: int, buffer: torch.Tensor) -> None:
        state, shard = self._state, self._state.shards[name]
        end = min(begin + memory.HOSTED_PIECE, shard.end - shard.begin)
        own = [tensor.data[begin:end] for tensor in _hosted(shard, state.mixed)]
        here = [room[: end - begin].copy_(piece, non_blocking=True) for room, piece in zip(buffer, own, strict=True)]
        master, exp_avg, exp_avg_sq = here if state.mixed else (shard.master.data[begin:end], *here)
        gradient = state.parameters[name].main_grad.view(-1)  # type: ignore[attr-defined]
        beta1, beta2 = group["betas"]
        adamw(
            [master],
            [gradient[shard.begin + begin : shard.begin + end]],
            [exp_avg],
            [exp_avg_sq],
            [],
            # The kernel counts from the updates before.
            [torch.full((), state.updates - 1.0, device=self._device)],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for piece, new in zip(own, here, strict=True):
            piece.copy_(new, non_blocking=True)
        if state.mixed:
            state.changes.shards[name].cast_part(begin, master, state.changes.marks)


def _hosted(shard: Shard, mixed: bool) -> tuple[torch.Tensor, ...]:
    """The tensors of a shard that are in host memory."""
    return (shard.master, shard.exp_avg, shard.exp_avg_sq) if mixed else (shard.exp_avg, shard.exp_avg_sq)
