"""The kernels of causal attention over a pack, and which of them a model uses.

- `Segments`: one variable-length kernel call per piece of a pack. It pads nothing and prepares nothing for new shapes.
- `rectangles`: one scaled-dot-product kernel call per block of similar lengths, padded.

`attention_check.choose_kernel`: CUDA, a 16-bit type, a head size that the kernel has, and no fault in a check ->
`Segments`. Otherwise `rectangles`.

The variable-length kernel takes fewer rows than columns, and the last row of a segment sees its last column. So it
serves context ranks too: within a piece the columns of consecutive sequences are consecutive.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from . import context
from .packing import PackedLayout
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
