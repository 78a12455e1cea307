"""The variable-length attention kernel of a real GPU against padded blocks: numbers, and the speed of both."""

from __future__ import annotations

import pytest
import torch

from libra_hpc.models.architecture import Architecture
from libra_hpc.trainer.model.attention import Segments, choose_kernel, rectangles
from libra_hpc.trainer.model.context import Columns
from libra_hpc.trainer.model.packing import ALONE, example, pack
from libra_hpc.weights.names import ReplicaPlace

HEADS, GROUPS, WIDTH = 32, 8, 128
"""Of Qwen3-4B and 8B."""
LENGTHS = (3300, 2000, 1200, 800, 500, 300, 92)


def _shape(heads: int, groups: int, head_dim: int) -> Architecture:
    return Architecture(
        name="qwen3",
        family="qwen3",
        qk_norm=True,
        layers=2,
        windows=(0, 64),
        hidden=heads * head_dim,
        heads=heads,
        kv_heads=groups,
        head_dim=head_dim,
        intermediate=64,
        vocab=64,
        tied_embeddings=True,
        norm_eps=1e-6,
        rope={},
        qkv_bias=False,
        max_positions=4096,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "groups", "head_dim"), [(HEADS, GROUPS, WIDTH), (14, 2, 64), (8, 8, 96), (4, 1, 256)]
)
@pytest.mark.parametrize(("cp", "cp_rank", "tp"), [(1, 0, 1), (1, 0, 2), (2, 0, 1), (2, 1, 2)])
def test_the_kernel_passes_its_check(
    dtype: torch.dtype, heads: int, groups: int, head_dim: int, cp: int, cp_rank: int, tp: int
) -> None:
    place = ReplicaPlace(tp=tp, tp_rank=0, pp=1, pp_rank=0, cp=cp, cp_rank=cp_rank)
    assert isinstance(choose_kernel(_shape(heads, groups, head_dim), torch.device("cuda"), dtype, place), Segments)


def test_a_pack_of_mixed_lengths_attends_alike_with_both() -> None:
    device = torch.device("cuda")
    kernel = choose_kernel(_shape(HEADS, GROUPS, WIDTH), device, torch.bfloat16, ALONE)
    assert isinstance(kernel, Segments)
    mask = torch.ones(max(LENGTHS), dtype=torch.bool)
    mask[0] = False
    examples = [example(str(n), torch.zeros(n).long(), mask[:n], torch.zeros(n), 1.0) for n in LENGTHS]
    (packed,) = pack(examples, sum(LENGTHS), device)
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(sum(LENGTHS), heads, WIDTH, device=device, dtype=torch.bfloat16, requires_grad=True)
        for heads in (HEADS, GROUPS, GROUPS)
    )
    weights = torch.randn_like(query).flatten(1)
    found = []
    for one in (kernel, rectangles):
        out = one(query, Columns(key, value, None), packed.layout, scale=None)
        gradients = torch.autograd.grad(out, (query, key, value), weights)
        found.append((out.detach(), *gradients))
    for mine, theirs in zip(*found, strict=True):
        assert (mine - theirs).abs().max() < 0.05 * theirs.abs().max()
