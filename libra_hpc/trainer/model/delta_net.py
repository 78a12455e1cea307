"""Gated delta nets over packed sequences: layers with a state in the place of keys and values (arXiv 2412.06464).

- State and convolution begin from zero at every sequence of a pack.
- CUDA with flash-linear-attention: its kernel, where it passes a check. Elsewhere `delta_rule`.
- Tensor ranks have some of the heads each.
- Context ranks gather the tokens of a pack. Each computes all of them and continues with its own.
- What lies between two projections is computed again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import accumulate
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from libra_hpc.models.shapes import DeltaNet

from . import context
from .kernels import choose, difference
from .mcore import (
    MegatronModule,
    TransformerConfig,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from .packing import PackedLayout

Rule = Callable[..., torch.Tensor]
"""`each_sequence`, or what computes the same."""
CHUNK = 64
"""Tokens of a chunk. Half: twice as many steps; double: twice the pairs of tokens, and worse rounding."""
LENGTHS = (150, 64, 33)
"""Tokens of the sequences on which a kernel is compared: more than two chunks, one, less than one."""
LENGTH_EPS = 1e-6
"""Added to squared lengths of queries and keys, as in flash-linear-attention."""


class GatedDeltaNet(MegatronModule):
    """A layer's delta net in the place of Megatron-Core's self-attention; parameters have the names of the files."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        *,
        net: DeltaNet,
    ) -> None:
        super().__init__(config=config)
        tp = config.tensor_model_parallel_size
        # What this rank has of it.
        self._net = net = msgspec.structs.replace(net, key_heads=net.key_heads // tp, value_heads=net.value_heads // tp)
        for name, size in net.sizes(config.hidden_size).items():
            module, _, leaf = name.rpartition(".")
            owner = torch.nn.Module() if module else self
            parameter = torch.nn.Parameter(torch.empty(size, dtype=config.params_dtype))
            # Megatron-Core then sums the gradients that the heads of each rank give it.
            parameter.sequence_parallel = config.sequence_parallel and name == "norm.weight"  # type: ignore[attr-defined]
            owner.register_parameter(leaf, parameter)
            if module:
                self.add_module(module, owner)

    def forward(
        self, hidden_states: torch.Tensor, packed_seq_params: PackedLayout | None = None, **_: Any
    ) -> tuple[torch.Tensor, None]:
        """``hidden_states`` [t, 1, hidden] -> the same, and no bias."""
        layout, x = packed_seq_params, hidden_states
        assert layout is not None, "the trainer always packs"
        if self.config.sequence_parallel:
            x = gather_from_sequence_parallel_region(x)
        if layout.gathered:
            whole = context.gather(x, x[..., :0]).whole
            assert whole is not None
            x = whole
        again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        mixed, gate, beta, decay = self._projected(x[:, 0])
        out = again(self._mix, mixed, beta, decay, layout.cu_seqlens_q)
        if layout.gathered:
            own = [torch.arange(piece.begin, piece.begin + len(piece.rows)) for piece in layout.pieces]
            rows = torch.cat(own).to(out.device)
            out, gate = out[rows], gate[rows]
        out = F.linear(again(self._gated, out, gate), self.get_parameter("out_proj.weight"))[:, None]
        return reduce_scatter_to_sequence_parallel_region(out) if self.config.sequence_parallel else out, None

    def _projected(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values side by side [t, channels], gate [t, heads, d], then two numbers of each head."""
        net = self._net
        parts = [F.linear(x, self.get_parameter(f"{name}.weight")) for name in net.projections]
        if not net.fused:
            mixed, gate, beta, decay = parts
            return mixed, gate.view(len(x), net.value_heads, -1), beta, decay
        # For each key head: its query, its key, its values, their gates.
        each = net.value_heads // net.key_heads
        widths = [net.key_dim, net.key_dim, each * net.value_dim, each * net.value_dim]
        *mixed_parts, gate = torch.split(parts[0].view(len(x), net.key_heads, -1), widths, dim=-1)
        beta, decay = (part.flatten(1) for part in parts[1].view(len(x), net.key_heads, 2, each).unbind(2))
        mixed = torch.cat([part.flatten(1) for part in mixed_parts], dim=-1)
        return mixed, gate.reshape(len(x), net.value_heads, -1), beta, decay

    def _mix(self, mixed: torch.Tensor, beta: torch.Tensor, decay: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
        """Convolution and delta rule of every sequence; ``bounds`` int32[sequences + 1] -> [t, heads, d]."""
        net = self._net
        heads = [(net.key_heads, net.key_dim)] * 2 + [(net.value_heads, net.value_dim)]
        parts = torch.split(self._convolved(mixed, bounds), [count * width for count, width in heads], dim=-1)
        query, key, value = (part.reshape(len(mixed), *size) for part, size in zip(parts, heads, strict=True))
        query, key = (x.repeat_interleave(net.value_heads // net.key_heads, dim=1) for x in (query, key))
        rate = F.softplus(decay.float() + self.get_parameter("dt_bias").float())
        decays = -self.get_parameter("A_log").float().exp() * rate
        rule = choose_rule(net.key_dim, net.value_dim, mixed.device, mixed.dtype)
        return rule(query, key, value, decays, beta.sigmoid(), bounds).to(mixed.dtype)

    def _convolved(self, mixed: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
        lengths, x = bounds.diff(), mixed.float()
        place = torch.arange(len(x), device=x.device) - bounds[:-1].repeat_interleave(lengths)
        weights = self.get_parameter("conv1d.weight").float()[:, 0].flip(-1).unbind(-1)
        total = x * weights[0]
        for back, weight in enumerate(weights[1:], 1):
            earlier = F.pad(x, (0, 0, back, 0))[: len(x)]
            total = total + earlier * (place >= back)[:, None] * weight
        return F.silu(total).to(mixed.dtype)

    def _gated(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        normed = F.rms_norm(out.float(), out.shape[-1:], eps=self.config.layernorm_epsilon).to(out.dtype)
        return (self.get_parameter("norm.weight") * normed * F.silu(gate.float())).to(out.dtype).flatten(1)


def delta_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """The gated delta rule of one sequence in chunks: [t, heads, d] and, for the last two, [t, heads] -> [t, heads, d].

    Each token multiplies the state by exp(decay), then moves what it holds at the key by ``beta`` towards the value.
    """
    count, heads, precise = len(query), query.shape[1], torch.promote_types(query.dtype, torch.float32)
    query, key, value, decay, beta = (
        # [heads, chunks, tokens, d]
        F.pad(x.reshape(count, heads, -1).to(precise), (0, 0, 0, 0, 0, -count % CHUNK))
        .reshape(-1, CHUNK, heads, x[0, 0].numel())
        .permute(2, 0, 1, 3)
        for x in (query, key, value, decay, beta)
    )
    query, key = (x * (x.square().sum(-1, keepdim=True) + LENGTH_EPS).rsqrt() for x in (query, key))
    # Between strong decays, differences of sums in float32 lose 1e-5, and gradients of decays more.
    sums = decay.double().cumsum(-2)
    total, rest = sums.to(precise), (sums[:, :, -1:] - sums).to(precise)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=query.device).triu(1)
    between = (sums - sums.mT).to(precise).masked_fill(later, -torch.inf).exp()
    scaled = key * beta
    # Within a chunk every token corrects what those before it wrote: one triangular system for all.
    system = scaled @ key.mT * between
    new, read = (
        torch.linalg.solve_triangular(system, x, upper=False, unitriangular=True)
        for x in (value * beta, scaled * total.exp())
    )
    query = query * query.shape[-1] ** -0.5
    scores = query @ key.mT * between
    query, whole = query * total.exp(), total[:, :, -1:]
    written = (key * rest.exp()).mT
    state = value.new_zeros(value.shape[0], key.shape[-1], value.shape[-1])
    out = []
    for chunk in range(value.shape[1]):
        values = new[:, chunk] - read[:, chunk] @ state
        out.append(query[:, chunk] @ state + scores[:, chunk] @ values)
        state = state * whole[:, chunk].exp() + written[:, chunk] @ values
    return torch.cat(out, dim=1).transpose(0, 1)[:count]


def each_sequence(*inputs: torch.Tensor) -> torch.Tensor:
    """`delta_rule` of every sequence of a pack; the last input is int32[sequences + 1], their bounds."""
    *tensors, bounds = inputs
    sequences = zip(*(torch.split(x, bounds.diff().tolist()) for x in tensors), strict=True)
    return torch.cat([delta_rule(*one) for one in sequences])


@cache
def choose_rule(key_dim: int, value_dim: int, device: torch.device, dtype: torch.dtype) -> Rule:
    """`each_sequence`, or on CUDA the kernel of flash-linear-attention, where it is, after it was compared with that
    once; a fault of it is a line on stderr."""
    if device.type != "cuda":
        return each_sequence
    return choose(
        "delta nets run in plain torch; flash-linear-attention",
        flas_kernel,
        each_sequence,
        lambda kernel: rule_fault(kernel, key_dim, value_dim, device, dtype),
    )


def flas_kernel() -> Rule:
    """The kernel of flash-linear-attention, called as `each_sequence` is; raises `ImportError` without the package."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def kernel(*inputs: torch.Tensor) -> torch.Tensor:
        batched, bounds = (x[None] for x in inputs[:-1]), inputs[-1]
        out: torch.Tensor = chunk_gated_delta_rule(*batched, use_qk_l2norm_in_kernel=True, cu_seqlens=bounds)[0][0]
        return out

    return kernel


def rule_fault(kernel: Rule, key_dim: int, value_dim: int, device: torch.device, dtype: torch.dtype) -> str:
    """What the kernel does wrong on a tiny pack, in words; empty: nothing."""
    source, rows, bounds = torch.Generator().manual_seed(0), sum(LENGTHS), [0, *accumulate(LENGTHS)]
    widths = key_dim, key_dim, value_dim
    tensors = [torch.randn(rows, 2, width, generator=source).to(device, dtype) for width in widths]
    chances = [torch.rand(rows, 2, generator=source).to(device) for _ in range(2)]
    inputs = [*tensors, -chances[0], chances[1].to(dtype)]
    found = []
    # The first pass of a layer that is computed again stores nothing of this.
    with torch.enable_grad(), saved_tensors_hooks(lambda x: x, lambda x: x):
        for rule in (kernel, each_sequence):
            own = [x.detach().requires_grad_() for x in inputs]
            out = rule(*own, torch.tensor(bounds, dtype=torch.int32, device=device)).float()
            found.append([out.detach(), *torch.autograd.grad(out.square().sum(), own)])
    got, want = found
    return difference(got, want, ["the output", *(f"gradient {number}" for number in range(1, len(got)))])
