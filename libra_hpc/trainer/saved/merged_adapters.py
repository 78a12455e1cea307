"""Low-rank adapters in Megatron-Core's layers: trained, and added to the weights before every step.

- After an update every adapted weight is its base + scale * B A, computed in float32 and rounded once: the trainer
  computes with the weights that the engines get. Sums do not drift.
- Gradients of A and B need the layer's input and its output's gradient, multiplied with B or A: no gradient of a weight
  exists.
- Bases are in host memory. The processes with the same weights share one copy, a piece each, and a layer comes at a
  time.
- Adapters start with B = 0, and with an A that depends on its name alone. Names and cuts: `libra_hpc.models.adapters`.
"""

from __future__ import annotations

import zlib
from functools import partial
from itertools import chain, groupby
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from libra_hpc.models.adapters import A, adapter_entries, adapter_shapes
from libra_hpc.models.architecture import Entry
from libra_hpc.trainer.model.mcore import (
    gather_from_sequence_parallel_region,
    parallel_state,
    reduce_scatter_to_sequence_parallel_region,
)
from libra_hpc.trainer.packed_model import PackedModel
from libra_hpc.weights.blocks import from_hf
from libra_hpc.weights.names import ReplicaPlace, own_entries

from .host_weights import HostWeights, host_weights
from .optimizer_state import OptimizerState


class Adapters:
    """The adapters of one rank; nothing where the model has none."""

    def __init__(self, model: PackedModel) -> None:
        """Freeze ``model``, before anything counts what has gradients; values come with `start`."""
        self._shape, self._split, self._sizes = model.shape, model.split, adapter_shapes(model.shape)
        self.parameters: dict[str, torch.nn.Parameter] = {}
        self._entries: dict[str, Entry] = {}
        self._linears: dict[str, Any] = {}
        """By the names of their weights."""
        self._layers: list[tuple[list[str], list[HostWeights]]] = []
        own = own_entries(model.shape, model.split)
        if model.shape.lora is not None:
            model.module.requires_grad_(False)
            self._add(model, own, model.shape.lora.scale)
        self.spans = {
            name: _share(model.split, own[name], weight.numel())
            for name, weight in model.named_parameters().items()
            if not weight.requires_grad
        }
        """First and last element of each flattened frozen weight for which this rank stands among its copies."""

    def _add(self, model: PackedModel, own: dict[str, Entry], scale: float) -> None:
        split = self._split
        self._entries = adapter_entries(self._shape, own)
        for name, entry in self._entries.items():
            owner, _, kind = name.rpartition(".")
            linear: Any = model.module.get_submodule(owner)
            size = from_hf(entry, lambda one: torch.empty(self._sizes[one], device="meta"), self._shape, split).shape
            adapter: Any = torch.nn.Parameter(torch.empty(size, device=model.device))
            # Megatron-Core's marks: of experts, and of what has a part of the gradient on every tensor rank.
            adapter.allreduce = getattr(linear.weight, "allreduce", True)
            adapter.sequence_parallel = split.tp > 1 and entry.dim is None and entry.expert is None
            linear.register_parameter(kind, adapter)
            linear.lora_scale = scale
            self.parameters[name], self._linears[f"{owner}.weight"] = adapter, linear
        for name, linear in self._linears.items():
            if own[name].expert is None:
                linear.register_forward_hook(partial(_adapted, own[name].layout != "plain", split.tp > 1))
        if parallel_state.is_pipeline_first_stage():
            # What is frozen below the first adapter would end the graph of gradients, and with it some functions here.
            model.module.embedding.register_forward_hook(lambda _module, _arguments, out: out.requires_grad_())

    def start(self, state: OptimizerState) -> None:
        """Take the present weights as bases; adapters are then such that nothing is added."""
        self._layers = [
            (names, host_weights([state.parameters[name] for name in names]))
            for _, own in groupby(self.spans if self._shape.lora else (), lambda name: name.split(".")[:3])
            for names in [list(own)]
        ]
        for name, entry in self._entries.items():
            state.set_weight(name, from_hf(entry, self._first, self._shape, self._split))
        self.merge(state)

    def _first(self, name: str) -> torch.Tensor:
        source, size = torch.Generator().manual_seed(zlib.crc32(name.encode())), self._sizes[name]
        return torch.empty(size).uniform_(-1.0, 1.0, generator=source) * (size[1] ** -0.5 * name.endswith(A))

    @torch.no_grad()
    def merge(self, state: OptimizerState) -> None:
        """Make every weight its base and its adapter; collective over the processes with the same weights."""
        for names, bases in self._layers:
            before = {name: state.parameters[name].data for name in names if name in self._linears}
            for one in bases:
                one.fetch()
            for name, old in before.items():
                linear = self._linears[name]
                linear.weight.copy_(
                    torch.addmm(linear.weight.float(), linear.lora_b, linear.lora_a, alpha=linear.lora_scale)
                )
                # Weights that were dropped come back as they were.
                if state.changes.marks and old.is_contiguous():
                    state.changes.shards[name].mark(old)

    def drop(self) -> None:
        """Free all weights until they are merged again."""
        for one in chain.from_iterable(bases for _, bases in self._layers):
            one.drop()

    def sum_gradients(self) -> None:
        """Add up what the tensor ranks of an expert have of the gradients of adapters that each of them has whole."""
        for name, entry in self._entries.items() if self._split.expert_ranks > 1 else ():
            if entry.expert is not None and entry.dim is None:
                dist.all_reduce(
                    self.parameters[name].main_grad,  # type: ignore[attr-defined]
                    group=parallel_state.get_expert_tensor_parallel_group(),
                )


def _share(place: ReplicaPlace, entry: Entry, count: int) -> tuple[int, int]:
    """First and last of ``count`` elements for which a rank stands among the copies of a parameter."""
    routed = place.expert_copies, place.expert_copy_rank
    copies, rank = (place.copies, place.copy_rank) if entry.expert is None else routed
    return count * rank // copies, count * (rank + 1) // copies


class _Adapted(torch.autograd.Function):
    """The output of a frozen layer, from whose gradient follow those of B [out, r] and of ``low`` = scale * A x."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, low: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(low, up)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,), (low, up) = gradients, ctx.saved_tensors
        of_up = (gradient.flatten(0, -2).t() @ low.flatten(0, -2)).float()
        return gradient, gradient @ up.to(gradient.dtype), of_up


def _adapted(rows: bool, cut: bool, linear: Any, arguments: tuple[Any, ...], out: tuple[Any, Any]) -> Any:
    """Hook of a layer of which tensor ranks share the rows, or the columns; with ``cut`` they share the tokens, too."""
    low = F.linear(arguments[0].detach(), linear.lora_a.to(out[0].dtype)) * linear.lora_scale
    if cut:
        low = (gather_from_sequence_parallel_region if rows else reduce_scatter_to_sequence_parallel_region)(low)
    return _Adapted.apply(out[0], low, linear.lora_b), out[1]  # type: ignore[no-untyped-call]
