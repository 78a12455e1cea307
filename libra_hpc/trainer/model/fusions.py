"""Elementwise parts of a layer with fewer passes over memory, on CUDA alone.

They round less often than the plain forms, so a CPU keeps those and its numbers. Nothing is compiled.

- Gradient of the gated activation: 11 passes over a half of its input, 29 in Megatron-Core's form without a compiler.
- Rotation and its gradient: 5 passes each over queries and keys; about 25 together in the plain form.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .mcore import fused_bias_swiglu


def install(device: torch.device) -> None:
    """Let Megatron-Core's gated activation use `gated_gradient` on CUDA; may be repeated."""
    if device.type == "cuda":
        fused_bias_swiglu.swiglu_back = gated_gradient


def gated_gradient(gradient: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
    """Gradient of ``silu(gate) * up`` by ``both``, which is gate and up side by side."""
    gate, up = both.chunk(2, dim=-1)
    out = both.new_empty(both.shape, dtype=torch.promote_types(gradient.dtype, both.dtype))
    of_gate, of_up = out.chunk(2, dim=-1)
    torch.ops.aten.silu_backward.grad_input(gradient * up, gate, grad_input=of_gate)
    torch.mul(gradient, F.silu(gate), out=of_up)
    return out


class Rotate(torch.autograd.Function):
    """`libra_hpc.trainer.model.rotary.rotated`; the gradient is turned back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
        ctx.table = cos, sin, interleaved
        return _turned(x, cos, sin, interleaved=interleaved, sign=1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        cos, sin, interleaved = ctx.table
        return _turned(gradients[0], cos, sin, interleaved=interleaved, sign=-1), None, None, None


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool, sign: int) -> torch.Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    width = cos.shape[-1]
    # Channels behind those that turn are copied.
    out[..., width:] = x[..., width:]
    torch.mul(x[..., :width], cos, out=out[..., :width])
    halves = slice(0, width // 2), slice(width // 2, width)
    first, second = (slice(0, width, 2), slice(1, width, 2)) if interleaved else halves
    out[..., first].addcmul_(x[..., second], sin[..., first], value=-sign)
    out[..., second].addcmul_(x[..., first], sin[..., second], value=sign)
    return out
