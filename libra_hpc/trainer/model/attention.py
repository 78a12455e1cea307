"""The kernels of causal attention over a pack, and which of them a model uses.

- `Segments`: one variable-length kernel call per piece of a pack. It pads nothing and prepares nothing for new shapes.
- `rectangles`: one scaled-dot-product kernel call per block of similar lengths, padded.

`choose_kernel`: CUDA, a 16-bit type, a head size that the kernel has, and on a tiny pack no difference from
`rectangles` -> `Segments`. Outputs and gradients are compared, with the strides that the projection's parts have in
Megatron-Core, on context ranks without a collective. Otherwise `rectangles`.

The variable-length kernel takes fewer rows than columns, and the last row of a segment sees its last column. So it
serves context ranks too: within a piece the columns of consecutive sequences are consecutive.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from libra_hpc.models.architecture import Architecture
from libra_hpc.weights.names import ReplicaPlace

from . import context
from .context import Columns, pieces
from .kernels import choose, difference
from .packing import PackedLayout, example, pack
from .recompute import can_recompute

LARGEST_HEAD = 256
HEAD_MULTIPLE = 8
"""Head sizes of the variable-length kernel: multiples of 8 up to 256."""


class Kernel(Protocol):
    def __call__(
        self,
        query: torch.Tensor,
        columns: context.Columns,
        layout: PackedLayout,
        *,
        scale: float | None,
        window: int = 0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend within each sequence: query [t, heads, d] -> [t, heads * d]; ``scale`` None: 1 / sqrt(d).

        ``window``: columns that a row sees, its own among them; 0: all up to its own. ``sinks``: of
        `context.attention`.
        """


def rectangles(
    query: torch.Tensor,
    columns: context.Columns,
    layout: PackedLayout,
    *,
    scale: float | None,
    window: int = 0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """One call per block and tail of ``layout``."""
    key, value, _ = columns
    parts = {
        tail.begin: context.attend(query, *columns.pair(), tail, scale=scale, window=window, sinks=sinks)
        for tail in layout.tails
    }
    padded = []
    for begin, end, rows, width, index in layout.blocks:
        q, k, v = (_rectangle(x[begin:end], rows, width, index) for x in (query, key, value))
        # Padding follows each sequence, so the causal mask hides it.
        masked = sinks is not None or 0 < window < width
        mask = context.band(width, width, window, q.device) if masked else None
        out = context.attention(q, k, v, mask, scale=scale, sinks=sinks)
        flat = out.transpose(1, 2).reshape(rows * width, -1)
        parts[begin] = flat if index is None else flat.index_select(0, index)
        padded.append(out)
    ordered = [parts[begin] for begin in sorted(parts)]
    result = torch.cat(ordered) if len(ordered) > 1 else ordered[0]
    if len(ordered) > 1 or (layout.blocks and layout.blocks[0].place is not None):
        # The result is a copy, from which the padded outputs follow, but for padding, whose gradient is zero.
        rows_of = result.detach().view(-1, *query.shape[1:])
        for out, (begin, end, rows, width, index) in zip(padded, layout.blocks, strict=True):
            can_recompute(out, partial(_rectangle, rows_of[begin:end], rows, width, index))
    return result


def _rectangle(x: torch.Tensor, rows: int, width: int, index: torch.Tensor | None) -> torch.Tensor:
    if index is not None:
        # Unlike `index_copy`, this stores no copy of ``x`` for the backward pass.
        x = x.new_zeros(rows * width, *x.shape[1:]).index_put((index,), x)
    return x.view(rows, width, *x.shape[1:]).transpose(1, 2)


class Segments:
    """One call per piece of ``layout``: one, or two with context parallelism."""

    def __init__(self, varlen: Callable[..., Any]) -> None:
        """``varlen``: with the contract of ``torch.nn.attention.varlen.varlen_attn``."""
        self._varlen = varlen

    def __call__(
        self,
        query: torch.Tensor,
        columns: context.Columns,
        layout: PackedLayout,
        *,
        scale: float | None,
        window: int = 0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        key, value = columns.pair()
        pieces = layout.pieces
        # A split of one part would copy its gradient.
        rows = (query,) if len(pieces) == 1 else torch.split(query, [len(piece.rows) for piece in pieces])
        parts = [
            self._varlen(
                q,
                context.part(key, piece.columns),
                context.part(value, piece.columns),
                piece.row_bounds,
                piece.column_bounds,
                piece.most_rows,
                piece.most_columns,
                scale=scale,
                # Columns to the left, where -1 is any number, and to the right.
                window_size=(window - 1, 0),
                enable_gqa=q.shape[1] != key.shape[1],
            )
            for q, piece in zip(rows, pieces, strict=True)
        ]
        return (torch.cat(parts) if len(parts) > 1 else parts[0]).flatten(1)


def has_segments(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the variable-length kernel exists for the arguments."""
    sizes = head_dim % HEAD_MULTIPLE == 0 and head_dim <= LARGEST_HEAD
    return device.type == "cuda" and dtype in (torch.float16, torch.bfloat16) and sizes


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
