"""Packs: nothing is lost, limits hold, blocks waste little, bad samples are refused."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_hpc.protocol.codec import pack_f32, pack_i32
from libra_hpc.protocol.trainer import Sample
from libra_hpc.trainer.model.packing import PADDED_COST, decode, example, pack

CPU = torch.device("cpu")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(2, 90), min_size=1, max_size=20), st.integers(30, 200))
def test_every_loss_token_is_in_one_pack(lengths: list[int], micro_tokens: int) -> None:
    examples = []
    for i, n in enumerate(lengths):
        mask = torch.arange(n) % 3 == 1
        examples.append(example(str(i), torch.arange(n) + 1000 * i, mask, -torch.arange(n) / 10 * mask, float(i)))
    packs = pack(examples, micro_tokens, CPU)
    assert sum(p.tokens.shape[1] for p in packs) == sum(lengths)
    seen = set()
    for p in packs:
        bounds = p.layout.cu_seqlens_q.tolist()
        sizes = [b - a for a, b in pairwise(bounds)]
        assert p.tokens.shape[1] <= micro_tokens or len(sizes) == 1
        assert p.layout.max_seqlen_q == max(sizes)
        for where, target, behaviour, advantage in zip(
            p.where.tolist(), p.targets.tolist(), p.behaviour.tolist(), p.advantages.tolist(), strict=True
        ):
            index, position = divmod(target, 1000)
            assert int(p.tokens[0, where]) == target - 1
            assert int(p.positions[0, where]) == position - 1
            assert behaviour == pytest.approx(-position / 10)
            assert advantage == index
            seen.add(target)
        assert [b.begin for b in p.layout.blocks] + [bounds[-1]] == [0, *(b.end for b in p.layout.blocks)]
        for block in p.layout.blocks:
            inside = [n for start, n in zip(bounds, sizes, strict=False) if block.begin <= start < block.end]
            assert len(inside) == block.rows
            assert max(inside) == block.width
            assert block.rows * block.width**2 <= PADDED_COST * sum(n * n for n in inside)
            if block.place is not None:
                grid = torch.zeros(block.rows * block.width, dtype=torch.long).index_copy(
                    0, block.place, p.tokens[0, block.begin : block.end]
                )
                assert [int(row[0]) % 1000 for row in grid.view(block.rows, block.width)] == [0] * block.rows
    assert seen == {1000 * i + k for i, n in enumerate(lengths) for k in range(n) if k % 3 == 1}


def test_samples_without_loss_tokens_cost_nothing() -> None:
    assert pack([example("a", torch.arange(5), torch.zeros(5, dtype=torch.bool), torch.zeros(5), 1.0)], 64, CPU) == []


@pytest.mark.parametrize(
    ("mask", "logprobs", "complaint"),
    [
        (bytes([0, 1]), [0.0] * 3, "2 mask entries"),
        (bytes([0, 1, 1]), [0.0] * 2, "2 log-probabilities"),
        (bytes([1, 1, 1]), [0.0] * 3, "nothing predicts it"),
    ],
)
def test_a_malformed_sample_is_named(mask: bytes, logprobs: list[float], complaint: str) -> None:
    with pytest.raises(ValueError, match=f"sample u7.*{complaint}"):
        decode(Sample("u7", pack_i32([1, 2, 3]), mask, pack_f32(logprobs), 1.0))
