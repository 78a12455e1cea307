"""The trainer's Triton kernels: the head's passes over a slice of logits, and a layer's elementwise operations.

Each value is read once and written once, and rounded where the plain forms round. With `TRITON_INTERPRET=1` before the
first import they run on a CPU, slowly.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024
"""Values of a row at a time. Half: more loops of the forward pass. Double: more registers than a program has."""
HEADS = 8
"""Heads of a token at a time."""


@triton.jit
def _reduce(logits, column, sums, rows, stride, width, temperature, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    peak = tl.load(sums + row)
    total = tl.load(sums + rows + row)
    spread = tl.load(sums + 2 * rows + row)
    for first in range(0, width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < width
        x = tl.load(logits + row * stride + at, mask=inside, other=0.0).to(tl.float32) / temperature
        above = tl.maximum(peak, tl.max(tl.where(inside, x, peak), axis=0))
        y = x - above
        e = tl.where(inside, tl.exp(y), 0.0)
        moved = peak - above
        factor = tl.exp(moved)
        spread = (spread + total * moved) * factor + tl.sum(e * y, axis=0)
        total = total * factor + tl.sum(e, axis=0)
        peak = above
    tl.store(sums + row, peak)
    tl.store(sums + rows + row, total)
    tl.store(sums + 2 * rows + row, spread)
    target = tl.load(column + row)
    if (target >= 0) & (target < width):
        chosen = tl.load(logits + row * stride + target).to(tl.float32) / temperature
        tl.store(sums + 3 * rows + row, chosen)


@triton.jit
def _slope(logits, column, logsumexp, scale, stride, width, temperature, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    place = logits + row * stride + at
    x = tl.load(place, mask=inside, other=0.0).to(tl.float32) / temperature
    p = tl.exp(x - tl.load(logsumexp + row))
    hit = at == tl.load(column + row)
    out = (p - tl.where(hit, 1.0, 0.0)) * tl.load(scale + row)
    tl.store(place, out.to(logits.dtype.element_ty), mask=inside)


def reduce(logits: torch.Tensor, column: torch.Tensor, temperature: float, sums: torch.Tensor) -> None:
    """`libra_hpc.trainer.model.head.plain_reduce` of logits that are there."""
    _reduce[(len(logits),)](
        logits, column, sums, len(logits), logits.stride(0), logits.shape[1], temperature, BLOCK=BLOCK
    )


def slope(
    logits: torch.Tensor, column: torch.Tensor, temperature: float, logsumexp: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """`libra_hpc.trainer.model.head.plain_slope`, in the place of the logits."""
    width = logits.shape[1]
    grid = (len(logits), triton.cdiv(width, BLOCK))
    _slope[grid](logits, column, logsumexp, scale, logits.stride(0), width, temperature, BLOCK=BLOCK)
    return logits


@triton.jit
def _gate(both, out, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    own = both + row * 2 * width + at
    gate = tl.load(own, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(own + width, mask=inside, other=0.0).to(tl.float32)
    opened = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + at, (opened * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate_back(gradient, both, out, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    own = row * 2 * width + at
    g = tl.load(gradient + row * width + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(both + own, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + own + width, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    opened = (gate * share).to(both.dtype.element_ty).to(tl.float32)
    slope = (g * up).to(out.dtype.element_ty).to(tl.float32) * share * (1.0 + gate * (1.0 - share))
    tl.store(out + own, slope.to(out.dtype.element_ty), mask=inside)
    tl.store(out + own + width, (g * opened).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _turn(  # type: ignore[no-untyped-def]
    x, cos, sin, out, heads, size, width, token, head, sign, pairs: tl.constexpr, H: tl.constexpr, D: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64)
    h = (tl.program_id(1) * H + tl.arange(0, H))[:, None]
    at = tl.arange(0, D)[None, :]
    inside = (h < heads) & (at < size)
    turns = at < width
    first = (at % 2 == 0) if pairs else (at < width // 2)
    step = 1 if pairs else width // 2
    other = tl.where(turns, tl.where(first, at + step, at - step), at)
    own = x + t * token + h * head
    mine = tl.load(own + at, mask=inside, other=0.0)
    theirs = tl.load(own + other, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + t * width + at, mask=turns, other=0.0).to(tl.float32)
    s = tl.load(sin + t * width + at, mask=turns, other=0.0).to(tl.float32)
    kept = (mine.to(tl.float32) * c).to(out.dtype.element_ty).to(tl.float32)
    turned = kept + tl.where(first, -sign, sign) * theirs * s
    found = tl.where(turns, turned.to(out.dtype.element_ty), mine)
    tl.store(out + (t * heads + h) * size + at, found, mask=inside)


def gate(both: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``, where ``both`` is gate and up side by side."""
    both = both.contiguous()
    width = both.shape[-1] // 2
    out = both.new_empty(*both.shape[:-1], width)
    if out.numel():
        _gate[(out.numel() // width, triton.cdiv(width, BLOCK))](both, out, width, BLOCK=BLOCK)
    return out


def gate_back(gradient: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
    """The kernel of `libra_hpc.trainer.model.kernels.gated_gradient`."""
    gradient, both = gradient.contiguous(), both.contiguous()
    width = both.shape[-1] // 2
    out = both.new_empty(both.shape, dtype=torch.promote_types(gradient.dtype, both.dtype))
    if out.numel():
        _gate_back[(gradient.numel() // width, triton.cdiv(width, BLOCK))](gradient, both, out, width, BLOCK=BLOCK)
    return out


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, sign: int) -> torch.Tensor:
    """The kernel of `libra_hpc.trainer.model.rotary.turned`."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    tokens, heads, size = x.shape
    out = x.new_empty(x.shape)
    if out.numel():
        places = heads, size, cos.shape[-1], x.stride(0), x.stride(1), float(sign)
        blocks = {"H": HEADS, "D": triton.next_power_of_2(size)}
        _turn[(tokens, triton.cdiv(heads, HEADS))](x, cos, sin, out, *places, pairs=interleaved, **blocks)
    return out
