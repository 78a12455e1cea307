"""The variable-length kernel against padded blocks, by a plain implementation of its contract; which kernel is used.

The real kernel runs on GPUs alone (`tests/gpu/test_gpu_attention.py`).
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from libra_hpc.models.architecture import Architecture, read_shape
from libra_hpc.trainer.model import attention
from libra_hpc.trainer.model.attention import Kernel, Segments, choose_kernel, fault, has_segments, rectangles
from libra_hpc.trainer.model.context import Columns, pieces
from libra_hpc.trainer.model.delta_net import CHUNK, LENGTHS, delta_rule, each_sequence, rule_fault
from libra_hpc.trainer.model.packing import ALONE, decode, pack
from libra_hpc.weights.names import ReplicaPlace

from .batches import samples
from .support import make_model

CPU = torch.device("cpu")
HEAD = 8


def test_the_delta_rule_in_chunks_is_that_of_one_token_after_the_other() -> None:
    source = torch.Generator().manual_seed(0)
    tokens, heads, width, value_width = 2 * CHUNK + 9, 3, 4, 5
    query, key = (torch.randn(tokens, heads, width, generator=source, dtype=torch.float64) for _ in range(2))
    value = torch.randn(tokens, heads, value_width, generator=source, dtype=torch.float64)
    decay, beta = (torch.rand(tokens, heads, generator=source, dtype=torch.float64) for _ in range(2))
    got = delta_rule(query, key, value, -decay, beta)
    state = torch.zeros(heads, width, value_width, dtype=torch.float64)
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    for t in range(tokens):
        state = state * torch.exp(-decay[t])[:, None, None]
        moved = beta[t][:, None] * (value[t] - torch.einsum("hkv,hk->hv", state, key[t]))
        state = state + key[t][:, :, None] * moved[:, None]
        want = torch.einsum("hkv,hk->hv", state, query[t]) / width**0.5
        assert (got[t] - want).abs().max() < 1e-12


def test_strong_decays_of_the_delta_rule_lose_no_digits() -> None:
    """Sums of decays reach 3,000 in a chunk: in float32 gradients of decays lost 3e-5."""
    source = torch.Generator().manual_seed(0)
    wide = [torch.randn(200, 2, 16, generator=source) for _ in range(3)]
    inputs = [*wide, -40 * torch.rand(200, 2, generator=source), torch.rand(200, 2, generator=source)]
    gradients = []
    for dtype in (torch.float32, torch.float64):
        own = [x.to(dtype).requires_grad_() for x in inputs]
        gradients.append(torch.autograd.grad(delta_rule(*own).square().sum(), own))
    for got, want in zip(*gradients, strict=True):
        assert (got - want).norm() < 1e-6 * want.norm()


def test_a_wrong_kernel_of_delta_nets_is_named() -> None:
    arguments = 8, 12, torch.device("cpu"), torch.float32
    assert rule_fault(each_sequence, *arguments) == ""

    def one_sequence(*inputs: torch.Tensor) -> torch.Tensor:
        return delta_rule(*inputs[:-1])

    assert rule_fault(one_sequence, *arguments).startswith("the output differs by")
    assert sum(LENGTHS) > 2 * CHUNK


def test_a_layer_that_is_computed_again_compares_its_kernel_once() -> None:
    compared: list[str] = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        if not compared:
            compared.append(rule_fault(each_sequence, 8, 12, x.device, x.dtype))
        return (x * 2).exp()

    x = torch.ones(3, requires_grad=True)
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert compared == [""]


def varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    shift: int = 0,
) -> torch.Tensor:
    """The contract of ``varlen_attn`` with a softmax per segment; ``shift`` moves the causal mask to the right."""
    left, right = window_size
    assert right == 0
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    bounds, columns = cu_seq_q.tolist(), cu_seq_k.tolist()
    assert (bounds[-1], columns[-1]) == (len(query), len(key)) == (len(query), len(value))
    lengths = [[b - a for a, b in pairwise(cu)] for cu in (bounds, columns)]
    assert [max(found) for found in lengths] == [max_q, max_k]
    parts = []
    for begin, first, rows, width in zip(bounds, columns, *lengths, strict=False):
        q = query[begin : begin + rows]
        k, v = (x[first : first + width].repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", q, k) * (scale or query.shape[-1] ** -0.5)
        hidden = torch.ones(rows, width, dtype=torch.bool).triu(width - rows + 1 + shift)
        if left >= 0:
            hidden |= torch.ones(rows, width, dtype=torch.bool).tril(width - rows - left - 1)
        parts.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v))
    return torch.cat(parts)


def raises(*_arguments: Any, **_named: Any) -> torch.Tensor:
    raise RuntimeError("FlashAttention only supports\nAmpere GPUs or newer.")


def sees_ahead(*arguments: Any, **named: Any) -> torch.Tensor:
    return varlen(*arguments, **named, shift=1)


def wrong_backward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any, **named: Any) -> Any:
    return varlen(query, key, 1.2 * value - 0.2 * value.detach(), *others, **named)


def place_of(cp: int = 1, cp_rank: int = 0, tp: int = 1) -> ReplicaPlace:
    return ReplicaPlace(tp=tp, tp_rank=0, pp=1, pp_rank=0, cp=cp, cp_rank=cp_rank)


@pytest.mark.parametrize(("heads", "groups", "window"), [(4, 4, 0), (4, 2, 7), (2, 1, 7)])
@pytest.mark.parametrize(("cp", "tp"), [(1, 1), (1, 4), (2, 1), (3, 2)])
def test_both_kernels_have_the_same_outputs_and_gradients(
    heads: int, groups: int, window: int, cp: int, tp: int
) -> None:
    torch.manual_seed(0)
    batch = [decode(sample) for sample in samples(3)]
    tails = shorter = 0
    for cp_rank in range(cp):
        place = place_of(cp, cp_rank, tp)
        (packed,) = pack(batch, 4096, CPU, place)
        tails += len(packed.layout.tails)
        shorter += sum(piece.row_bounds is not piece.column_bounds for piece in packed.layout.pieces)
        own = torch.cat([torch.arange(r.start, r.stop) for r in pieces(sum(len(e.tokens) for e in batch), place)])
        whole = torch.randn(cp * len(own), groups, 2 * HEAD, requires_grad=True)
        query = torch.randn(len(own), heads, HEAD, requires_grad=True)
        weights = torch.randn(len(own), heads * HEAD)
        found = []
        for kernel in (Segments(varlen), rectangles):
            columns = Columns(*whole[own].chunk(2, -1), whole if cp > 1 else None)
            out = kernel(query, columns, packed.layout, scale=0.3, window=window)
            found.append([out, *torch.autograd.grad((out * weights).sum(), (query, whole))])
        for mine, theirs in zip(*found, strict=True):
            assert torch.allclose(mine, theirs, atol=2e-5)
    # Some rows attend to columns of other ranks.
    assert tails == shorter
    assert (cp > 1) == (tails > 0)


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "wanted"),
    [
        ("cuda", torch.bfloat16, 128, True),
        ("cuda", torch.float16, 80, True),
        ("cuda", torch.bfloat16, 256, True),
        ("cuda", torch.bfloat16, 264, False),
        ("cuda", torch.bfloat16, 100, False),
        ("cuda", torch.float32, 128, False),
        ("cpu", torch.bfloat16, 128, False),
    ],
)
def test_what_the_variable_length_kernel_is_for(device: str, dtype: torch.dtype, head_dim: int, wanted: bool) -> None:
    assert has_segments(torch.device(device), dtype, head_dim) == wanted


@pytest.fixture
def shape(tmp_path: Path) -> Architecture:
    make_model("qwen3", tmp_path)
    return read_shape(tmp_path)


def test_a_cpu_attends_over_padded_blocks(shape: Architecture) -> None:
    assert choose_kernel(shape, CPU, torch.bfloat16, ALONE) is rectangles


@pytest.mark.parametrize("place", [place_of(), place_of(tp=4), place_of(cp=2), place_of(cp=2, cp_rank=1, tp=2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_kernel_has_no_fault(shape: Architecture, place: ReplicaPlace, dtype: torch.dtype) -> None:
    assert fault(Segments(varlen), shape, CPU, dtype=dtype, place=place) == ""


@pytest.mark.parametrize("place", [place_of(), place_of(cp=2)])
def test_a_mask_aligned_to_the_first_column_is_a_fault(shape: Architecture, place: ReplicaPlace) -> None:
    def first_column(*arguments: Any, **named: Any) -> torch.Tensor:
        shorter = arguments[6] - arguments[5]
        return varlen(*arguments, **named, shift=-shorter)

    found = fault(Segments(first_column), shape, CPU, dtype=torch.float32, place=place)
    assert found.startswith("its output differs by")


@pytest.mark.parametrize(
    ("kernel", "line"),
    [
        (varlen, ""),
        (raises, "failed: RuntimeError: FlashAttention only supports Ampere GPUs or newer.\n"),
        (sees_ahead, "failed: its output differs by"),
        (wrong_backward, "failed: its gradient of the values differs by 0.19 of the largest value\n"),
        (lambda *a, **n: varlen(*a, **n) * torch.nan, "failed: its output differs by nan"),
        (None, "failed: NotImplementedError: "),
    ],
)
def test_a_kernel_that_fails_at_the_start_is_not_used(
    shape: Architecture, kernel: Any, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(attention, "has_segments", lambda *_: True)
    # Without a kernel the real one, which a CPU lacks.
    if kernel is not None:
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    chosen: Kernel = choose_kernel(shape, CPU, torch.bfloat16, ALONE)
    printed = capsys.readouterr().err
    assert isinstance(chosen, Segments) == (kernel is varlen)
    assert (chosen is rectangles) == (kernel is not varlen)
    assert line in printed
    assert printed.count("\n") == (kernel is not varlen)


def test_a_kernel_of_an_older_torch_is_not_told_of_fewer_key_heads(
    shape: Architecture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def older(
        *arguments: Any, scale: float | None = None, window_size: tuple[int, int] = (-1, -1), return_aux: Any = None
    ) -> torch.Tensor:
        return varlen(*arguments, scale=scale, window_size=window_size, enable_gqa=True)

    monkeypatch.setattr(attention, "has_segments", lambda *_: True)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", older)
    assert isinstance(choose_kernel(shape, CPU, torch.bfloat16, ALONE), Segments)
