"""Splitting a batch over replicas, and who exchanges which elements in a generation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_hpc.protocol.agents import Group
from libra_hpc.protocol.codec import pack_f32, pack_i32
from libra_hpc.protocol.trainer import Sample
from libra_hpc.trainer.exchange import GroupMembers, join_transfers, owned, step_transfers
from libra_hpc.trainer.shards import divisor, loss_tokens_of, shard


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


def test_the_divisor_counts_a_trajectory_once_however_many_samples_it_has() -> None:
    def part(uid: str, loss: int) -> Sample:
        return Sample(uid, pack_i32([0] * (loss + 2)), bytes(2) + b"\1" * loss, pack_f32([0.0] * (loss + 2)), 1.0)

    samples = [part("0.0.0", 3), part("0.0.1", 2), part("0.0.2", 0), part("0.1.0", 4), part("1.0.0", 0)]
    assert [divisor(samples, name, 50) for name in ("token", "sequence", "constant")] == [9, 2, 100]


SIZES = (1000, 3, 129)


@pytest.mark.parametrize("core", [1, 2, 3])
@pytest.mark.parametrize(("copies", "replicas"), [(1, 1), (2, 1), (1, 3), (4, 2)])
def test_every_element_crosses_once_in_a_step_and_once_to_each_replica_in_a_join(
    core: int, copies: int, replicas: int
) -> None:
    members = GroupMembers(core, copies, replicas)
    for plan, times in ((step_transfers(SIZES, members, 50), 1), (join_transfers(SIZES, members, 50), replicas)):
        seen = [[0] * size for size in SIZES]
        for transfer in plan:
            assert 0 < transfer.end - transfer.begin <= 50
            first, last = owned(SIZES[transfer.bucket], core)[transfer.core]
            assert first <= transfer.begin < transfer.end <= last
            copy = (transfer.peer - core) % copies
            first, last = owned(SIZES[transfer.bucket], copies)[copy]
            assert first <= transfer.begin < transfer.end <= last
            for element in range(transfer.begin, transfer.end):
                seen[transfer.bucket][element] += 1
        assert seen == [[times] * size for size in SIZES]


def test_replicas_and_their_copies_stand_for_equal_parts() -> None:
    members = GroupMembers(core=2, copies=2, replicas=2)
    sent = dict.fromkeys(range(2, members.size), 0)
    for transfer in step_transfers([4096], members, 512):
        sent[transfer.peer] += transfer.end - transfer.begin
    assert set(sent.values()) == {1024}
