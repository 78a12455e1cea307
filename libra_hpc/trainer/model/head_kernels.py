"""The head's passes over a slice of logits as Triton kernels: one read forward, one read and one write backward.

With `TRITON_INTERPRET=1` before the first import they run on a CPU, slowly.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .kernels import VocabSlice

BLOCK = 1024
"""Logits of a row at a time. Half: more loops of the forward pass. Double: more registers than a program has."""


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


def reduce(one: VocabSlice, sums: torch.Tensor) -> None:
    """`libra_hpc.trainer.model.head.plain_reduce`."""
    logits = one.hidden @ one.weight.t()
    _reduce[(len(logits),)](
        logits, one.column, sums, len(logits), logits.stride(0), logits.shape[1], one.temperature, BLOCK=BLOCK
    )


def slope(one: VocabSlice, logsumexp: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`libra_hpc.trainer.model.head.plain_slope`, in the place of the logits."""
    logits = one.hidden @ one.weight.t()
    width = logits.shape[1]
    grid = (len(logits), triton.cdiv(width, BLOCK))
    _slope[grid](logits, one.column, logsumexp, scale, logits.stride(0), width, one.temperature, BLOCK=BLOCK)
    return logits
