"""Ranks, components, and the check of MPI's world."""

from __future__ import annotations

import pytest

from libra_hpc.errors import OperationError
from libra_hpc.pool.layout import Layout, check_world


def test_leaders_are_the_lowest_ranks_of_their_component() -> None:
    layout = Layout.parse("planner:1,train:2,hybrid:3,rollout:2")
    assert (layout.train_leader, layout.rollout_leader) == (1, 6)
    assert layout.pool()[2] == (3, "hybrid")
    assert len(layout.components) == 8


def test_entries_of_lists_count_through_hybrid_and_rollout_nodes() -> None:
    layout = Layout.parse("planner:1,train:2,hybrid:2,rollout:2")
    assert [layout.engine_node(rank) for rank in range(3, 7)] == [0, 1, 2, 3]


@pytest.mark.parametrize("text", ["", "planner:1", "train:1,rollout:1", "train:1,planner:1,rollout:1", "planner:1,train:x,rollout:1", "planner:1,gpu:1"])
def test_a_malformed_layout_is_one_sentence(text: str) -> None:
    with pytest.raises(OperationError) as caught:
        Layout.parse(text)
    assert "LIBRA_COMPONENTS" in str(caught.value)


def test_worlds_of_one_name_the_plugin_mistake() -> None:
    layout = Layout.parse("planner:1,train:1,rollout:1")
    check_world(3, layout, {})
    with pytest.raises(OperationError, match=r"1 ranks .* 3 nodes.*own MPI world.*slurm\.mpi"):
        check_world(1, layout, {"SLURM_STEP_NUM_TASKS": "3"})
    with pytest.raises(OperationError, match="2 ranks"):
        check_world(2, layout, {})
