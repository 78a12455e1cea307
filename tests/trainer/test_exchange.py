"""Who exchanges what in a generation: every element once, with its owner, and every link gets its share."""

from __future__ import annotations

import pytest

from libra_hpc.trainer.exchange import GroupMembers, join_transfers, owned, step_transfers

SIZES = (1000, 3, 129)


@pytest.mark.parametrize("owners", [1, 2, 3])
@pytest.mark.parametrize(("copies", "replicas"), [(1, 1), (2, 1), (1, 3), (4, 2)])
def test_every_element_crosses_once_in_a_step_and_once_to_each_replica_in_a_join(
    owners: int, copies: int, replicas: int
) -> None:
    members = GroupMembers(owners, copies, replicas)
    for plan, times in ((step_transfers(SIZES, members, 50), 1), (join_transfers(SIZES, members, 50), replicas)):
        seen = [[0] * size for size in SIZES]
        for transfer in plan:
            assert 0 < transfer.end - transfer.begin <= 50
            first, last = owned(SIZES[transfer.bucket], owners)[transfer.owner]
            assert first <= transfer.begin < transfer.end <= last
            copy = (transfer.peer - owners) % copies
            first, last = owned(SIZES[transfer.bucket], copies)[copy]
            assert first <= transfer.begin < transfer.end <= last
            for element in range(transfer.begin, transfer.end):
                seen[transfer.bucket][element] += 1
        assert seen == [[times] * size for size in SIZES]


def test_replicas_and_their_copies_stand_for_equal_parts() -> None:
    members = GroupMembers(owners=2, copies=2, replicas=2)
    sent = dict.fromkeys(range(2, members.size), 0)
    for transfer in step_transfers([4096], members, 512):
        sent[transfer.peer] += transfer.end - transfer.begin
    assert set(sent.values()) == {1024}
