"""Splitting a batch over replicas."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from libra_hpc.protocol.codec import pack_f32, pack_i32
from libra_hpc.protocol.mesh import Group
from libra_hpc.protocol.trainer import Sample
from libra_hpc.trainer.shards import loss_tokens_of, shard, tokens_of


def make(index: int, lengths: list[int], advantages: list[float]) -> Group:
    samples = (
        Sample(f"{index}.{i}", pack_i32([0] * n), b"\0" + b"\1" * (n - 1), pack_f32([0.0] * n), a)
        for i, (n, a) in enumerate(zip(lengths, advantages, strict=True))
    )
    return Group(index, tuple(samples))


groups = st.lists(
    st.lists(st.tuples(st.integers(2, 50), st.sampled_from([0.0, 1.0, -1.0])), min_size=1, max_size=6),
    min_size=1,
    max_size=8,
)


@given(groups, st.integers(1, 4), st.integers(1, 3))
def test_every_useful_sample_goes_to_exactly_one_replica(
    spec: list[list[tuple[int, float]]], replicas: int, minibatches: int
) -> None:
    batch = [make(i, [n for n, _ in group], [a for _, a in group]) for i, group in enumerate(spec)]
    shards, totals = shard(batch, replicas, minibatches, skip_zero_advantage=True)
    placed = sorted(s.uid for replica in shards for part in replica for s in part)
    assert placed == sorted(s.uid for g in batch for s in g.samples if s.advantage != 0.0)
    assert len(shards) == replicas
    assert {len(replica) for replica in shards} == {len(totals)}
    assert sum(totals) == sum(loss_tokens_of(s) for g in batch for s in g.samples), (
        "also samples that are left out count in the divisor"
    )


@given(groups, st.integers(2, 4))
def test_token_counts_differ_by_at_most_one_sample(spec: list[list[tuple[int, float]]], replicas: int) -> None:
    batch = [make(i, [n for n, _ in group], [1.0] * len(group)) for i, group in enumerate(spec)]
    shards, _ = shard(batch, replicas, 1, skip_zero_advantage=True)
    loads = [sum(tokens_of(s) for s in replica[0]) for replica in shards]
    assert max(loads) - min(loads) <= max(tokens_of(s) for g in batch for s in g.samples)
