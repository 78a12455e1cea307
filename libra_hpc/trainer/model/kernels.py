"""Where a kernel takes the place of plain torch: once compared on a small problem, before it is used.

- no package for it -> plain torch, in silence
- it raises, or differs by more than rounding -> plain torch, and the reason on stderr

On CUDA alone, the gated activation: 3 passes over a half of its input, and 5 for the gradient. Without Triton 5, and 11
for the gradient, 29 in Megatron-Core's form without a compiler. Both round less often than that, so a CPU keeps it and
its numbers.

Gradients of weights: a product adds to the float32 sums, 8 bytes a parameter and pack. With an addition behind it 12,
one launch more, and each pack's gradient is rounded to 16 bits before.

Products of several experts are one kernel, `torch.nn.functional.grouped_mm`: on Hopper and Blackwell in bfloat16 one
launch, elsewhere a loop inside of torch. Before 2.13 torch refuses widths that are no multiple of 16 bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from types import SimpleNamespace
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F

from .mcore import fused_bias_swiglu, layers

K = TypeVar("K")
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""`one_by_one`, or what computes the same."""
TOLERANCE = 0.05
"""Share of the largest value. Two sums of bfloat16 values differ by about 0.01, a wrong mask or sequence by about 1."""
ROWS = 24, 0, 40
"""Tokens of each expert on which a product is compared."""


def choose(what: str, kernel: Callable[[], K], plain: K, fault: Callable[[K], str]) -> K:
    """``kernel()`` unless ``fault`` finds one, in words; ``what`` begins the line on stderr about it."""
    try:
        found = kernel()
        problem = fault(found)
    except ImportError:
        return plain
    except Exception as error:
        # A torch without it, a GPU or a compiler that it refuses: there are many errors for that.
        problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if problem:
        print(f"{what} failed: {problem}", file=sys.stderr)
    return plain if problem else found


def difference(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], names: Sequence[str]) -> str:
    """Which one of the tensors differs by more than rounding, and by how much; empty: none."""
    for name, mine, theirs in zip(names, got, want, strict=True):
        error = float((mine.float() - theirs.float()).abs().max() / theirs.float().abs().max())
        # Also when it is not a number.
        if not error <= TOLERANCE:
            return f"{name} differs by {error:.2g} of the largest value"
    return ""


def one_by_one(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Products of groups of tokens, of which each ends before one of ``ends``.

    [t, k] @ [groups, k, n] -> [t, n], and [n, t] @ [t, k] -> [groups, n, k].
    """
    counts = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    if right.dim() == 3:
        return torch.cat([rows @ matrix for rows, matrix in zip(torch.split(left, counts), right, strict=True)])
    pairs = zip(torch.split(left, counts, dim=1), torch.split(right, counts), strict=True)
    return torch.stack([columns @ rows for columns, rows in pairs])


def grouped(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """`one_by_one` as torch has it."""
    return F.grouped_mm(left, right, offs=ends)


@cache
def choose_product(inner: int, outer: int, device: torch.device, dtype: torch.dtype) -> Product:
    """The product of rows of ``inner`` values with matrices of ``outer`` columns, and that of their gradients."""
    source = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=source).to(device, dtype)

    def results(product: Product) -> list[torch.Tensor]:
        out = product(rows, weights.mT, ends)
        # What a kernel does not write of its result would otherwise be zero by chance.
        torch.full_like(weights, torch.nan)
        return [out, product(gradient, weights, ends), product(gradient.t(), rows, ends)]

    def fault(product: Product) -> str:
        names = "the output", "gradient of tokens", "gradient of weights"
        return difference(results(product), results(one_by_one), names)

    rows, gradient = random(sum(ROWS), inner), random(sum(ROWS), outer)
    ends = torch.tensor(ROWS, device=device).cumsum(0).int()
    # As in Megatron-Core's flat buffer, something else lies between two experts.
    weights = random(len(ROWS), 2 * outer, inner)[:, :outer]
    with torch.no_grad():
        return choose("experts run one by one; grouped products", lambda: grouped, one_by_one, fault)


def gated_gradient(gradient: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
    """Gradient of ``silu(gate) * up`` by ``both``, which is gate and up side by side."""
    gate, up = both.chunk(2, dim=-1)
    out = both.new_empty(both.shape, dtype=torch.promote_types(gradient.dtype, both.dtype))
    of_gate, of_up = out.chunk(2, dim=-1)
    torch.ops.aten.silu_backward.grad_input(gradient * up, gate, grad_input=of_gate)
    torch.mul(gradient, F.silu(gate), out=of_up)
    return out


class Gate(NamedTuple):
    """``silu(gate) * up`` of both side by side, and its gradient."""

    forward: Callable[[torch.Tensor], torch.Tensor]
    backward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


PLAIN_GATE = Gate(fused_bias_swiglu.swiglu, gated_gradient)


def gate_kernels() -> Gate:
    """Triton's kernels of a gated activation; raises `ImportError` without Triton."""
    from . import triton_kernels

    return Gate(triton_kernels.gate, triton_kernels.gate_back)


def gate_fault(device: torch.device, dtype: torch.dtype, gate: Gate) -> str:
    """How ``gate`` differs from `PLAIN_GATE`; empty: by no more than rounding."""
    source = torch.Generator().manual_seed(0)
    gradient, both = (torch.randn(5, size, generator=source).to(device, dtype) for size in (1100, 2200))
    wide = gradient.float()
    got = gate.forward(both), gate.backward(gradient, both), gate.backward(wide, both)
    want = PLAIN_GATE.forward(both), gated_gradient(gradient, both), gated_gradient(wide, both)
    return difference(got, want, ("the output", "the gradient", "the gradient of experts"))


@cache
def install_gate(device: torch.device, dtype: torch.dtype) -> None:
    """Let Megatron-Core's gated activation use the kernels or `gated_gradient` on CUDA."""
    if device.type == "cuda":
        fault = partial(gate_fault, device, dtype)
        chosen = choose("the gated activation has passes of its own; its kernels", gate_kernels, PLAIN_GATE, fault)
        fused_bias_swiglu.swiglu, fused_bias_swiglu.swiglu_back = chosen


def add_product(tokens: torch.Tensor, gradient: torch.Tensor, total: torch.Tensor) -> None:
    """Add a weight's gradient to its float32 sum: ``total += gradient.T @ tokens``."""
    torch.addmm(total, gradient.t(), tokens, out_dtype=total.dtype, out=total)


def add_afterwards(tokens: torch.Tensor, gradient: torch.Tensor, total: torch.Tensor) -> None:
    """`add_product` as Megatron-Core does it by default."""
    total.add_(gradient.t() @ tokens)


@cache
def sum_in_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Have Megatron-Core's linear layers use `add_product` where they ask for Apex's kernel; whether they may ask."""

    def fault(kernel: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]) -> str:
        source, found = torch.Generator().manual_seed(0), []
        tokens, gradient, before = (torch.randn(64, n, generator=source).to(device, dtype) for n in (48, 64, 48))
        for one in (kernel, add_afterwards):
            found.append(before.float())
            one(tokens, gradient, found[-1])
        return difference(found[:1], found[1:], ["the sum"])

    if device.type != "cuda" or dtype is torch.float32:
        return False
    what = "gradients of weights are added after their products; products with a float32 sum"
    chosen = choose(what, lambda: add_product, add_afterwards, fault)
    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=chosen)
    layers._grad_accum_fusion_available = True
    return chosen is not add_afterwards
