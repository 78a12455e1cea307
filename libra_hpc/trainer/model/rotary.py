"""Rotary position embedding of packed sequences: angles once per pack, one multiplication per layer.

Megatron-Core's own embedding processes the sequences of a pack one by one in every layer and synchronises with the
device for their lengths. Here all layers share one table of cosines and sines.

Source: arXiv 2104.09864. Frequencies are computed by transformers' ``modeling_rope_utils``; vLLM's equal them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from libra_hpc.models.architecture import Architecture

from .kernels import choose, difference

Turn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool, int], torch.Tensor]
"""`turned`."""


class RotaryTable(NamedTuple):
    cos: torch.Tensor
    """[t, 1, channels that turn]"""
    sin: torch.Tensor
    interleaved: bool
    """Channels 2i and 2i+1 of a head turn together (GLM); otherwise i and i + half of the channels."""


class Rotary:
    def __init__(self, shape: Architecture, device: torch.device, dtype: torch.dtype) -> None:
        kinds = [shape.rope] if shape.window_rope is None else [shape.rope, shape.window_rope]
        self._kinds = [_frequencies(shape, rope) for rope in kinds]
        self._device = device
        self._interleaved = shape.kind.interleaved_rotary
        self._dtype = dtype

    def tables(self, positions: torch.Tensor) -> list[RotaryTable]:
        """Tables for ``positions``, int64[t]: of layers with full attention, then of those with windows if it differs.

        Angles are in float32, results in the model's type.
        """
        return [self._table(positions, frequencies.to(self._device), scale) for frequencies, scale in self._kinds]

    def _table(self, positions: torch.Tensor, frequencies: torch.Tensor, scale: float) -> RotaryTable:
        angles = positions.float()[:, None, None] * frequencies
        angles = angles.repeat_interleave(2, -1) if self._interleaved else torch.cat((angles, angles), dim=-1)
        cos, sin = (angles.cos() * scale).to(self._dtype), (angles.sin() * scale).to(self._dtype)
        return RotaryTable(cos, sin, self._interleaved)


def rotated(x: torch.Tensor, table: RotaryTable) -> torch.Tensor:
    """Rotate the first channels of ``x`` [t, heads, head_dim] by the angles of its tokens."""
    if x.is_cuda:
        turned: torch.Tensor = Rotate.apply(x, *table)  # type: ignore[no-untyped-call]
        return turned
    width = table.cos.shape[-1]
    if width < x.shape[-1]:
        front, rest = torch.split(x, [width, x.shape[-1] - width], dim=-1)
        return torch.cat((rotated(front, table), rest), dim=-1)
    if table.interleaved:
        across = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    else:
        across = torch.cat((-x[..., width // 2 :], x[..., : width // 2]), dim=-1)
    return x * table.cos + across * table.sin


class Rotate(torch.autograd.Function):
    """`rotated` on CUDA, where the gradient is turned back: each 2 passes over queries and keys as a kernel, else 5."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
        ctx.table = cos, sin, interleaved
        return choose_turn(x.device, x.dtype)(x, cos, sin, interleaved, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        cos, sin, interleaved = ctx.table
        (gradient,) = gradients
        return choose_turn(gradient.device, gradient.dtype)(gradient, cos, sin, interleaved, -1), None, None, None


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, sign: int) -> torch.Tensor:
    """``x`` turned forward or, with ``sign`` -1, back."""
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


def turn_kernel() -> Turn:
    """Triton's kernel of the rotation; raises `ImportError` without Triton."""
    from .triton_kernels import turn

    return turn


def turn_fault(device: torch.device, dtype: torch.dtype, turn: Turn) -> str:
    """How ``turn`` differs from `turned`; empty: by no more than rounding."""
    source = torch.Generator().manual_seed(0)
    # Heads of a wider tensor, of which not all channels turn.
    wide, cos, sin = (
        torch.randn(5, *size, generator=source).to(device, dtype) for size in ((9, 160), (1, 72), (1, 72))
    )
    got, want = ([one(wide[..., :80], cos, sin, pairs, 1) for pairs in (False, True)] for one in (turn, turned))
    return difference(got, want, ("a turn of halves", "a turn of pairs"))


@cache
def choose_turn(device: torch.device, dtype: torch.dtype) -> Turn:
    """`turned`, or what computes the same."""
    fault = partial(turn_fault, device, dtype)
    plain: Turn = turned
    return choose("rotary positions have passes of their own; their kernel", turn_kernel, plain, fault)


def _frequencies(shape: Architecture, rope: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """Radians per position of each pair of channels, and the factor of cosines and sines."""
    if rope["rope_type"] == "default":
        # Computed by each model of transformers, with the same line.
        width = int(shape.head_dim * rope["partial_rotary_factor"])
        return 1.0 / rope["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float32) / width), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = SimpleNamespace(
        standardize_rope_params=lambda: None,
        rope_parameters=rope,
        head_dim=shape.head_dim,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
    )
    found: tuple[torch.Tensor, float] = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    return found
