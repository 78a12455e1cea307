"""Compares an attention kernel with `rectangles` once, on a tiny pack with the model's heads, before it is used.

Outputs and gradients are compared, with the strides that the projection's parts have in Megatron-Core. Context ranks
are checked without a collective: this rank's pieces of the pack, and all columns.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from libra_hpc.models.architecture import Architecture
from libra_hpc.weights.names import ReplicaPlace

from .attention import Kernel, Segments, has_segments, rectangles
from .context import Columns, pieces
from .kernels import choose, difference
from .packing import PackedLayout, example, pack

LENGTHS = (150, 70, 64, 33)
"""Tokens of each sequence: two blocks of rectangles, one of them padded; one more than a tile of 128."""
SHARED = 66
"""Tokens at the beginning of the first sequence that one more has, too."""
WINDOW = 48
"""Columns of a row where the model has windows; most sequences have more."""
PARTS = ("output", "gradient of the queries", "gradient of the keys", "gradient of the values")


def choose_kernel(shape: Architecture, device: torch.device, dtype: torch.dtype, place: ReplicaPlace) -> Kernel:
    """The kernel of this rank; a fault of the variable-length one is a line on stderr."""
    # The variable-length kernel has no sinks.
    if shape.sinks or not has_segments(device, dtype, shape.head_dim):
        return rectangles
    return choose(
        "attention runs over padded blocks; the variable-length kernel",
        lambda: Segments(torchs_varlen()),
        rectangles,
        lambda kernel: fault(kernel, shape, device, dtype=dtype, place=place),
    )


def torchs_varlen() -> Callable[..., Any]:
    """torch's variable-length kernel; that of torch before 2.13 takes fewer key heads without an argument for it."""
    from torch.nn.attention.varlen import varlen_attn

    newest: Callable[..., Any] = varlen_attn
    try:
        inspect.signature(newest).bind_partial(enable_gqa=True)
    except TypeError:
        return lambda *tensors, enable_gqa, **named: newest(*tensors, **named)
    return newest


def fault(kernel: Kernel, shape: Architecture, device: torch.device, *, dtype: torch.dtype, place: ReplicaPlace) -> str:
    """What the kernel does wrong on this rank of ``place``, in words; empty: nothing."""
    heads, groups = shape.heads // place.tp, max(1, shape.kv_heads // place.tp)
    mask = torch.ones(max(LENGTHS), dtype=torch.bool)
    mask[0] = False
    contents = [torch.full((n,), n) for n in LENGTHS]
    if shape.delta_net is None:
        contents.append(torch.cat((contents[0][:SHARED], torch.zeros(SHARED, dtype=torch.int64))))
    examples = [
        example("", tokens, mask[: len(tokens)], logprobs=torch.zeros(len(tokens)), advantage=1.0)
        for tokens in contents
    ]
    (packed,) = pack(examples, sum(map(len, contents)), device, place, shares=True)
    rows = sum(map(len, contents)) - (SHARED if shape.delta_net is None else 0)
    own = torch.cat([torch.arange(piece.start, piece.stop) for piece in pieces(rows, place)])
    own = own.to(device)
    source = torch.Generator().manual_seed(0)
    # Of every group: its query heads, its key head, its value head.
    sizes = (place.cp * len(own), groups, heads // groups + 2, shape.head_dim)
    mixed = torch.randn(sizes, generator=source).to(device, dtype)
    weights = torch.randn(len(own), heads * shape.head_dim, generator=source).to(device, dtype)
    for window in {min(window, WINDOW) for window in shape.windows} or {0}:
        layout = packed.layout
        got, want = (_run(one, mixed, own, layout, weights=weights, window=window) for one in (kernel, rectangles))
        if problem := difference(got, want, PARTS):
            return f"its {problem}"
    return ""


def _run(
    kernel: Kernel, mixed: torch.Tensor, own: torch.Tensor, layout: PackedLayout, *, weights: torch.Tensor, window: int
) -> tuple[torch.Tensor, ...]:
    """`PARTS`; the gradients are of the sum of the output times ``weights``."""
    mixed = mixed.detach().requires_grad_()
    ratio = mixed.shape[2] - 2
    mine = mixed if not layout.gathered else mixed.index_select(0, own)
    query, key, value = torch.split(mine, [ratio, 1, 1], dim=2)
    whole = None if not layout.gathered else mixed[:, :, ratio:].flatten(2)
    # Rotation copies queries and keys.
    columns = Columns(key.squeeze(2).clone(), value.squeeze(2), whole)
    out = kernel(query.flatten(1, 2), columns, layout, scale=None, window=window)
    (gradient,) = torch.autograd.grad((out * weights).sum(), mixed)
    return (out.detach(), *torch.split(gradient, [ratio, 1, 1], dim=2))
