"""One rank's part of a model, and passes of packs over it by Megatron-Core's schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from libra_hpc.config.learn import Recompute
from libra_hpc.models.architecture import Architecture
from libra_hpc.trainer.model.head import Head
from libra_hpc.trainer.model.mcore import get_forward_backward_func
from libra_hpc.trainer.model.megatron_model import build_model
from libra_hpc.trainer.model.packing import Pack, PackedLayout, padding
from libra_hpc.trainer.model.rotary import Rotary
from libra_hpc.weights.names import ReplicaPlace, own_entries

from .model import compat

Loss = Callable[[Head, Pack], torch.Tensor]
"""Maps the output layer over a pack's loss tokens to the summed loss (a scalar)."""


class PackedModel:
    """Weights are uninitialised until they are loaded."""

    def __init__(
        self,
        shape: Architecture,
        device: torch.device,
        dtype: torch.dtype,
        split: ReplicaPlace,
        recompute: Recompute = "none",
    ) -> None:
        self.shape, self.device, self.dtype, self.split = shape, device, dtype, split
        self.module = build_model(shape, device, dtype, split, recompute=recompute)
        self.replays = True
        """Whether its routers use the choices of a pack."""
        self._called: torch.nn.Module = self.module
        """The module, or what reduces its gradients."""
        self._rotary = Rotary(shape, device, dtype)
        self._run = get_forward_backward_func()
        self._no_tokens = torch.zeros((), dtype=torch.int, device=device)

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """This rank's parameters by Megatron-Core name, ordered as `own_entries`."""
        found = dict(self.module.named_parameters())
        return {name: found.pop(name) for name in own_entries(self.shape, self.split)}

    @torch.no_grad()
    def forward(self, packs: list[Pack], loss: Loss) -> None:
        """Call ``loss`` for every pack without gradients; only the last pipeline stage does."""
        packs = self._even(packs)
        if packs:
            self._schedule(packs, loss, forward_only=True)

    def layout(self, pack: Pack) -> PackedLayout:
        choices, rotary = pack.layout.choices if self.replays else None, self._rotary.tables(pack.positions[0])
        return dataclasses.replace(pack.layout, rotary=rotary, choices=choices)

    def _even(self, packs: list[Pack]) -> list[Pack]:
        """Packs of the same number on all ranks: in each one they exchange tokens for each other's experts."""
        if self.split.ep == 1:
            return packs
        count = torch.tensor(len(packs), device=self.device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX)
        return packs + [padding(self.device, self.split)] * (int(count) - len(packs))

    def _schedule(self, packs: list[Pack], loss: Loss, *, forward_only: bool) -> None:
        def step(
            iterator: Iterator[Pack], model: torch.nn.Module
        ) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
            pack = next(iterator)

            def total(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
                with compat.without_shim():
                    return loss(Head(self.module, hidden[0], pack.where), pack), self._no_tokens, {}

            with compat.without_shim():
                return model(pack.tokens, pack.positions, None, packed_seq_params=self.layout(pack)), total

        with compat.mcore_device():
            self._run(
                forward_step_func=step,
                data_iterator=iter(packs),
                model=[self._called],
                num_microbatches=len(packs),
                seq_length=max(p.tokens.shape[1] for p in packs),
                micro_batch_size=1,
                forward_only=forward_only,
            )
