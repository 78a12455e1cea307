"""A peer that is lost in a step costs the step, not the process, and no wait for a timeout."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from libra_hpc.trainer.device import wait
from libra_hpc.trainer.exchange import GroupMembers, Transfer, join_transfers, rounds, step_transfers
from libra_hpc.weights.names import ReplicaPlace

from .lost_peer import steps_without_the_lost_peer
from .support import assert_same_state, fixed_run, make_model


@pytest.mark.engine
@pytest.mark.parametrize("fate", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.nightly)])
def test_a_step_goes_on_without_a_peer_that_died_or_hangs(
    fate: signal.Signals, tmp_path: Path, world: ReplicaPlace
) -> None:
    model_dir = tmp_path / "model"
    make_model("qwen3", model_dir)
    core, done = steps_without_the_lost_peer(tmp_path, model_dir, fate, core={}, replica={})
    want, final = fixed_run(model_dir, world, 3)
    assert [one.numbers["grad_norm"] for one in done] == pytest.approx(
        [one.numbers["grad_norm"] for one in want], rel=5e-5
    )
    assert_same_state(core.tensors(3), final)
    assert core.close() == [0]


class _Silent:
    """Work that never ends."""

    def is_completed(self) -> bool:
        return False


def test_a_newer_order_ends_a_wait() -> None:
    answers = iter([False, False, True])
    with pytest.raises(RuntimeError, match="a newer order came"):
        wait(_Silent(), 1e9, lambda: next(answers))


@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.lists(st.integers(1, 1000), min_size=1, max_size=4),
    st.sampled_from([step_transfers, join_transfers]),
)
def test_a_round_moves_at_most_a_chunk_for_every_rank(
    core: int, copies: int, replicas: int, sizes: list[int], transfers: object
) -> None:
    assert callable(transfers)
    plan: list[Transfer] = transfers(sizes, GroupMembers(core, copies, replicas), 64)
    found = rounds(plan, 64)
    assert sorted(transfer for one in found for transfer in one) == sorted(plan)
    for one in found:
        load = torch.zeros(core + copies * replicas, dtype=torch.int64)
        for transfer in one:
            load[[transfer.core, transfer.peer]] += transfer.end - transfer.begin
        assert 0 < load.max() <= 64
    pairs = {(transfer.core, transfer.peer) for transfer in plan}
    assert all(
        [t for one in found for t in one if (t.core, t.peer) == pair] == [t for t in plan if (t.core, t.peer) == pair]
        for pair in pairs
    )
