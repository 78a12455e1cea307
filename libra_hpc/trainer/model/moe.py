"""Mixture of experts: the fields of Megatron-Core's configuration, and its dispatcher without a GPU.

Every layer is a router and ``experts`` gated MLPs. A token goes to ``experts_per_token`` of them, by two all-to-alls
over the expert-parallel ranks. There is no auxiliary loss: the objective is the policy's.

Without CUDA, calls of Megatron-Core's token dispatcher raise; with CUDA nothing is replaced:

- ``torch.cuda.Stream()`` for copies to the host -> no stream
- those copies -> the host's tensors as they are
- collectives of unequal parts over the tensor ranks of experts, which gloo lacks -> such of equal ones

Replay: a token whose experts the rollout engine reported goes to these, with the router's own probabilities, through
which the router has its gradient (arXiv 2510.11370). Any other token routes by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from libra_hpc.models.architecture import Architecture
from libra_hpc.models.supported import CLAMPED
from libra_hpc.weights.names import ReplicaPlace

from .kernels import choose_product, one_by_one
from .mcore import (
    GPTModel,
    MegatronModule,
    MoEAlltoAllTokenDispatcher,
    SequentialMLP,
    TransformerConfig,
    mappings,
    moe_utils,
)
from .packing import Choices

_EQUAL = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim
"""Megatron-Core's own functions, right for equal parts."""


def expert_config(shape: Architecture, place: ReplicaPlace) -> dict[str, Any]:
    """Fields of ``TransformerConfig`` for ``shape``; none for a dense model."""
    if not shape.experts:
        return {}
    return {
        "num_moe_experts": shape.experts,
        "moe_router_topk": shape.experts_per_token,
        "moe_ffn_hidden_size": shape.moe_intermediate,
        "moe_shared_expert_intermediate_size": shape.shared_intermediate or None,
        "moe_shared_expert_gate": shape.shared_gate,
        "moe_router_pre_softmax": not shape.norm_topk,
        "moe_router_score_function": "sigmoid" if shape.kind.sigmoid_router else "softmax",
        "moe_router_topk_scaling_factor": shape.routed_scale if shape.routed_scale != 1.0 else None,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        "expert_model_parallel_size": place.ep,
        "expert_tensor_parallel_size": place.expert_ranks,
    }


def install() -> None:
    """Make Megatron-Core's layers of experts work without Transformer Engine and without CUDA; may be repeated."""
    if not hasattr(moe_utils, "te_general_gemm"):
        # Megatron-Core reads the name, but does not define it without Transformer Engine.
        moe_utils.te_general_gemm = None
    if not torch.cuda.is_available():
        MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = object()
        MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = _on_host
        mappings._gather_along_first_dim = _gather
        mappings._reduce_scatter_along_first_dim = _reduce_scatter


def _on_host(dispatcher: Any, point: str, tokens_per_expert: torch.Tensor | None = None) -> torch.Tensor | None:
    if point == dispatcher.cuda_dtoh_point:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            splits = getattr(dispatcher, name)
            if splits is not None:
                setattr(dispatcher, name, splits.numpy())
    return tokens_per_expert


def _gather(own: torch.Tensor, group: Any, sizes: list[int] | None = None, *buffer: Any, **named: Any) -> Any:
    sizes = named.pop("output_split_sizes", sizes)
    if sizes is None or group.size() == 1:
        return _EQUAL[0](own, group, None, *buffer, **named)
    padded = own.new_zeros(max(sizes), *own.shape[1:])
    padded[: len(own)] = own
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _reduce_scatter(whole: torch.Tensor, group: Any, sizes: list[int] | None = None, *buffer: Any, **named: Any) -> Any:
    sizes = named.pop("input_split_sizes", sizes)
    if sizes is None or group.size() == 1:
        return _EQUAL[1](whole, group, None, *buffer, **named)
    total = whole.contiguous().clone()
    dist.all_reduce(total, group=group)
    return torch.split(total, sizes)[group.rank()]


class GroupedProducts(torch.autograd.Function):
    """Products of each expert's tokens with its weights [experts, out, in]; ``ends``: the first token behind each.

    The gradient of the weights is added to ``total`` at once, as Megatron-Core's hooks add it for each parameter; None:
    they are frozen.
    """

    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor, total: torch.Tensor | None
    ) -> torch.Tensor:
        GroupedProducts.remember(ctx, tokens, weights, ends, total)
        out: torch.Tensor = ctx.product(tokens, weights.mT, ends)
        return out

    @staticmethod
    def remember(ctx: Any, tokens: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor, total: Any) -> None:
        """Store what the backward pass needs."""
        ctx.save_for_backward(tokens, weights, ends)
        ctx.total, (_, outer, inner) = total, weights.shape
        # No rank has to have tokens.
        ctx.product = choose_product(inner, outer, tokens.device, tokens.dtype) if len(tokens) else one_by_one

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tokens, weights, ends = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        if ctx.total is not None:
            ctx.total.add_(ctx.product(gradient.t(), tokens, ends))
        # Of tokens, four from the end here and in `AdaptedProducts`.
        return ctx.product(gradient, weights, ends) if ctx.needs_input_grad[-4] else None, None, None, None


class AdaptedProducts(GroupedProducts):
    """The ``out`` of frozen experts, to whose weights some products were added: gradients are also theirs."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, *product: Any) -> torch.Tensor:
        GroupedProducts.remember(ctx, *product)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradients[0], *GroupedProducts.backward(ctx, *gradients)


def ends_of(tokens_per_expert: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The first token behind each expert's; the counts are on the host."""
    return tokens_per_expert.cumsum(0).int().to(device, non_blocking=True)


class GroupedExperts(SequentialMLP):
    """Megatron-Core's experts of this rank, as one MLP whose products are grouped."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        # Megatron-Core lays parameters out from the last to the first. Names stay; experts then ascend in memory.
        self._all = list(self.get_submodule("local_experts").children())
        ascending = {str(number): expert for number, expert in enumerate(self._all)}
        self.local_experts = torch.nn.ModuleDict(dict(reversed(ascending.items())))
        for name in ("linear_fc1", "linear_fc2"):
            getattr(self._all[0], name).forward = partial(self._product, [getattr(one, name) for one in self._all])

    def forward(
        self, tokens: torch.Tensor, tokens_per_expert: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """``tokens`` are in the order of the experts; each result is multiplied by its weight."""
        self._ends = ends_of(tokens_per_expert, tokens.device)
        out: torch.Tensor = self._all[0](tokens, weights)[0]
        return out, None

    def _product(self, linears: list[Any], tokens: torch.Tensor) -> tuple[torch.Tensor, None]:
        graph, first = torch.is_grad_enabled(), linears[0]
        found, total = _stacked(linears, "weight", graph and first.weight.requires_grad)
        out = GroupedProducts.apply(tokens, found, self._ends, total)  # type: ignore[no-untyped-call]
        if graph and hasattr(first, "lora_a"):
            (a, of_a), (b, of_b) = (_stacked(linears, name, True) for name in ("lora_a", "lora_b"))
            # What has a gradient of its own in the sum lets this one have a graph.
            inputs = tokens.detach(), a.to(out.dtype).requires_grad_(), self._ends, of_a
            low = GroupedProducts.apply(*inputs) * first.lora_scale  # type: ignore[no-untyped-call]
            out = AdaptedProducts.apply(out, low, b.to(out.dtype), self._ends, of_b)  # type: ignore[no-untyped-call]
        return out, None


def _stacked(linears: list[Any], name: str, trained: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A parameter of all experts [experts, out, in], and the sum of its gradients."""
    first, last = getattr(linears[0], name), getattr(linears[-1], name)
    apart = (last.data_ptr() - first.data_ptr()) // first.element_size() // max(1, len(linears) - 1)
    size, strides = (len(linears), *first.shape), (apart, first.shape[1], 1)
    return first.data.as_strided(size, strides), first.main_grad.as_strided(size, strides) if trained else None


class StackedExperts(MegatronModule):
    """The experts of this rank, whose weights [experts, in, out] and biases [experts, out] are one parameter each."""

    def __init__(self, experts: int, config: TransformerConfig, pg_collection: Any = None) -> None:
        super().__init__(config=config)
        hidden, ffn = config.hidden_size, config.moe_ffn_hidden_size
        for name, sizes in {"linear_fc1": (hidden, 2 * ffn), "linear_fc2": (ffn, hidden)}.items():
            linear = torch.nn.Module()
            for kind, size in {"weight": (experts, *sizes), "bias": (experts, sizes[1])}.items():
                parameter = torch.nn.Parameter(torch.empty(size, dtype=config.params_dtype))
                # As Megatron-Core marks parameters whose copies are those of an expert.
                parameter.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]
                linear.register_parameter(kind, parameter)
            self.add_module(name, linear)

    def forward(
        self, tokens: torch.Tensor, tokens_per_expert: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """``tokens`` are in the order of the experts; each result is multiplied by its weight."""
        ends = ends_of(tokens_per_expert, tokens.device)
        expert = torch.searchsorted(ends, torch.arange(len(tokens), device=tokens.device, dtype=ends.dtype), right=True)
        # Its product selects biases, and sums their gradients in a fixed order.
        member = (expert[:, None] == torch.arange(len(ends), device=tokens.device)).to(tokens.dtype)
        both = self._linear(self.linear_fc1, tokens, ends, member)
        product = checkpoint(_clamped, both, use_reentrant=False, preserve_rng_state=False)
        down = self._linear(self.linear_fc2, product, ends, member)
        return (down * weights[:, None]).to(tokens.dtype), None

    def _linear(self, linear: Any, tokens: torch.Tensor, ends: torch.Tensor, member: torch.Tensor) -> torch.Tensor:
        total = linear.weight.main_grad.mT if torch.is_grad_enabled() and linear.weight.requires_grad else None
        out = GroupedProducts.apply(tokens, linear.weight.data.mT, ends, total)  # type: ignore[no-untyped-call]
        return torch.addmm(out, member, linear.bias)


def _clamped(both: torch.Tensor) -> torch.Tensor:
    """Gated activation of columns in turns."""
    alpha, limit = CLAMPED["swiglu_alpha"], CLAMPED["swiglu_limit"]
    gate, up = both[..., ::2].clamp(max=limit), both[..., 1::2].clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


class Replay:
    """Experts chosen elsewhere, in the place of Megatron-Core's ``RouterReplay``.

    That one replays whole batches in the order of the passes. This one is set by the layer, so that recomputation has
    the same experts, and a token may have none.
    """

    def __init__(self) -> None:
        self.chosen: Choices | None = None
        self.counts = torch.zeros(2, dtype=torch.int64)
        """Replayed choices that the router would have made too, and all replayed ones."""

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, groups: int | None, group_topk: int | None, compute: Callable[..., Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by the router: values and indices [t, k] of the experts of each token."""
        values, own = compute(scores, topk, num_groups=groups, group_topk=group_topk)
        if self.chosen is None:
            return values, own
        known = self.chosen.known[:, None]
        used = torch.where(known, self.chosen.experts.long(), own)
        agreed = known & (used[:, :, None] == own[:, None, :]).any(-1)
        self.counts = self.counts.to(scores.device) + torch.stack((agreed.sum(), known.sum() * topk))
        return scores.gather(1, used), used


def _routed(model: GPTModel) -> list[Any]:
    """Layers of experts; those before may be dense."""
    return [layer for layer in model.decoder.layers if hasattr(layer.mlp, "router")]


def replay_routing(model: GPTModel, place: ReplicaPlace) -> None:
    """Let the routers of ``model`` use the choices of a pack's layout."""
    for layer in _routed(model):
        replay = layer.mlp.router.router_replay = Replay()
        layer.forward = partial(_replaying, layer.forward, replay, layer.layer_number - 1, place)


def _replaying(
    forward: Callable[..., Any], replay: Replay, layer: int, place: ReplicaPlace, *args: Any, **named: Any
) -> Any:
    chosen = named["packed_seq_params"].choices
    # Tensor ranks share the tokens (sequence parallelism).
    replay.chosen = chosen and Choices(
        chosen.known.chunk(place.tp)[place.tp_rank], chosen.experts[:, layer].chunk(place.tp)[place.tp_rank]
    )
    return forward(*args, **named)


def take_counts(model: GPTModel) -> torch.Tensor:
    """`Replay.counts` of this rank's routers since the last call."""
    replays = [layer.mlp.router.router_replay for layer in _routed(model)]
    total = sum((replay.counts for replay in replays), torch.zeros(2, dtype=torch.int64))
    for replay in replays:
        replay.counts = torch.zeros_like(replay.counts)
    return total


def add_biases(model: GPTModel) -> None:
    """Give routers a bias for the choice of experts: a parameter, so that it is loaded, saved and sent."""
    for router in (layer.mlp.router for layer in _routed(model)):
        router.expert_bias = torch.nn.Parameter(torch.zeros(router.config.num_moe_experts))
