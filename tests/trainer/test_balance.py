"""Samples are spread by their work: attention grows with the square of a sample's length."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_hpc.config.run import RunConfig
from libra_hpc.models.shapes import model_shape
from libra_hpc.protocol.codec import pack_i32
from libra_hpc.protocol.trainer import Sample
from libra_hpc.trainer.settings import sample_work
from libra_hpc.trainer.shards import PLAIN, SampleWork, spread, tokens_of


def samples(lengths: list[int]) -> list[Sample]:
    return [Sample(str(i), pack_i32([0] * n), b"", b"", 1.0) for i, n in enumerate(lengths)]


def loads(own: list[tuple[Sample, ...]], attention: float) -> list[float]:
    return [sum(tokens_of(one) + attention * tokens_of(one) ** 2 for one in part) for part in own]


@given(st.lists(st.integers(1, 100), min_size=1, max_size=30), st.integers(1, 5), st.floats(0.0, 1.0))
def test_every_sample_has_one_rank_and_work_differs_by_one_sample(
    lengths: list[int], ranks: int, attention: float
) -> None:
    batch = samples(lengths)
    own = spread(batch, ranks, SampleWork(attention))
    assert sorted(one.uid for part in own for one in part) == sorted(one.uid for one in batch)
    assert spread(batch[::-1], ranks, SampleWork(attention)) == own, "of the samples alone, not of their order"
    work = loads(own, attention)
    assert max(work) - min(work) <= (1 + 1e-9) * (max(lengths) + attention * max(lengths) ** 2)


def test_eight_ranks_share_long_contexts_evenly() -> None:
    attention = sample_work(RunConfig().changed(model={"path": "qwen3-30b-a3b"})).attention
    shape = model_shape("qwen3-30b-a3b")
    # FLOPs of a token's own layers against those of its attention over 128k tokens before it.
    assert attention * 2**17 == pytest.approx(
        2**16 * shape.attention_flops_per_pair / (shape.layer_flops_per_token + shape.head_flops_per_token)
    )
    chance = random.Random(1)
    batch = samples([min(2**17, int(chance.lognormvariate(9.3, 1.0))) for _ in range(256)])
    by_tokens, by_work = (loads(spread(batch, 8, SampleWork(one)), attention) for one in (0.0, attention))
    assert max(by_tokens) * 8 > 1.1 * sum(by_tokens)
    assert max(by_work) * 8 < 1.01 * sum(by_work)


def test_a_model_that_is_not_known_is_balanced_by_tokens() -> None:
    assert sample_work(RunConfig()) == PLAIN
