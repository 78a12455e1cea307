"""Context parallelism: the tokens of one pack are spread over ranks, and keys and values are gathered in every layer.

- A pack is cut into ``2 * cp`` equal pieces. Rank ``i`` has pieces ``i`` and ``2 * cp - 1 - i``: under a causal mask a
  late piece costs what an early one saves.
- A sequence that begins in a piece needs own tokens only. One that began earlier, or in the rows of another sequence
  with the same beginning, is a `Tail`: its own rows attend to all columns of the sequence up to themselves.
- Everything else of a layer is token by token, so only keys and values are ever whole.

Source: gathered keys and values as in arXiv 2407.21783, section 3.3.2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from libra_hpc.weights.names import ReplicaPlace

from .mcore import parallel_state


class Tail(NamedTuple):
    """Own rows ``begin:end`` of a sequence that began before their piece, or in the rows of another."""

    begin: int
    end: int
    columns: range | torch.Tensor
    """Tokens of the sequence up to the last row, in the whole pack."""


def pieces(tokens: int, place: ReplicaPlace) -> tuple[range, ...]:
    """Own tokens of a pack of ``tokens``, as ranges of the whole pack; beyond its end they are padding.

    A piece is a multiple of the tensor ranks, which share its tokens (sequence parallelism).
    """
    count = 1 if place.cp == 1 else 2 * place.cp
    size = -(-tokens // (count * place.tp)) * place.tp
    return tuple(range(i * size, (i + 1) * size) for i in sorted({place.cp_rank, count - 1 - place.cp_rank}))


class _Gather(torch.autograd.Function):
    """Own keys and values -> the same, and those of the whole pack in one tensor.

    The own ones pass through, so that every rank takes part in the backward pass, also one without tails.
    """

    @staticmethod
    def forward(
        ctx: Any, key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.group, ctx.ranks, ctx.width = group, dist.get_world_size(group), key.shape[-1]
        own = torch.cat((key, value), dim=-1)
        whole = own.new_empty(ctx.ranks, 2, own.shape[0] // 2, *own.shape[1:])
        dist.all_gather_into_tensor(whole.flatten(0, 2), own, group=group)
        return key, value, torch.cat((whole[:, 0], whole[:, 1].flip(0))).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        key, value, whole = grads
        early, late = whole.view(2, ctx.ranks, -1, *whole.shape[1:])
        own = whole.new_empty(key.shape[0], *whole.shape[1:])
        dist.reduce_scatter_tensor(own, torch.stack((early, late.flip(0)), dim=1).flatten(0, 2), group=ctx.group)
        return key + own[..., : ctx.width], value + own[..., ctx.width :], None


class Columns(NamedTuple):
    """What the rows of a pack attend to."""

    key: torch.Tensor
    """Own keys, [rows, groups, d]."""
    value: torch.Tensor
    whole: torch.Tensor | None
    """Keys and values of the whole pack, [tokens, groups, 2 d]; None: the own ones are the whole."""

    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the whole pack, [tokens, groups, d]."""
        if self.whole is None:
            return self.key, self.value
        key, value = self.whole.chunk(2, dim=-1)
        return key, value


def part(x: torch.Tensor, rows: range | torch.Tensor) -> torch.Tensor:
    """The rows of ``x``."""
    if isinstance(rows, torch.Tensor):
        return x.index_select(0, rows)
    # A slice of the whole would copy its gradient.
    return x if len(rows) == len(x) else x[rows.start : rows.stop]


def gather(key: torch.Tensor, value: torch.Tensor) -> Columns:
    """Gather keys and values [rows, groups, d] over the context ranks; collective, so is the backward pass."""
    group = parallel_state.get_context_parallel_group()
    return Columns(*_Gather.apply(key, value, group))  # type: ignore[no-untyped-call]


def band(rows: int, width: int, window: int, device: torch.device) -> torch.Tensor:
    """Columns that each row sees, bool [rows, width]; the last row sees the last column."""
    mask = torch.ones(rows, width, dtype=torch.bool, device=device).tril(width - rows)
    return mask.triu(width - rows + 1 - window) if window else mask


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scale: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention [.., heads, rows, d]; without a mask it is causal.

    ``sinks``, [heads]: scores of a column without a value, which takes a share of each row; they need a mask.
    """
    grouped = query.shape[-3] != key.shape[-3]
    if sinks is not None:
        assert mask is not None
        hidden = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf).expand(len(sinks), -1, -1)
        mask = torch.cat((hidden, sinks[:, None, None].expand(-1, len(mask), 1).to(query.dtype)), dim=-1)[None]
        key, value = (F.pad(x, (0, 0, 0, 1)) for x in (key, value))
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tail: Tail,
    *,
    scale: float | None,
    window: int,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of one tail; query [rows, heads, d], key and value of the whole pack -> [tail rows, heads * d]."""
    q, key, value = query[tail.begin : tail.end], part(key, tail.columns), part(value, tail.columns)
    rows, width = q.shape[0], key.shape[0]
    # Without a window no mask is stored on a GPU; on the CPU the class has no kernel.
    lower = q.is_cuda and not 0 < window < width and sinks is None
    mask = causal_lower_right(rows, width) if lower else band(rows, width, window, q.device)
    q, key, value = (x.transpose(0, 1)[None] for x in (q, key, value))
    out = attention(q, key, value, mask, scale=scale, sinks=sinks)
    return out[0].transpose(0, 1).flatten(1)
