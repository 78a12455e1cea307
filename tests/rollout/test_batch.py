"""What the coordinator is told of a batch."""

from __future__ import annotations

from libra_hpc.protocol.codec import pack_i32
from libra_hpc.protocol.mesh import Batch, BatchReady, Group
from libra_hpc.protocol.trainer import Sample
from libra_hpc.rollout.batch import batch_ready


def sample(uid: str, tokens: int, generated: int, advantage: float) -> Sample:
    mask = bytes([0] * (tokens - generated) + [1] * generated)
    return Sample(uid, pack_i32(range(tokens)), mask, b"\0" * (4 * tokens), advantage)


def test_a_batch_is_summed_over_groups_with_and_without_what_has_no_gradient() -> None:
    groups = (
        Group(4, (sample("4.0", 10, 3, 0.7), sample("4.1", 20, 12, -0.7))),
        Group(5, (sample("5.0", 7, 5, 0.0), sample("5.1", 9, 2, 0.0))),
    )
    assert batch_ready(Batch(3, groups, {})) == BatchReady(3, 46, 30, 12)
    assert batch_ready(Batch(1, (), {})) == BatchReady(1, 0, 0, 0)
