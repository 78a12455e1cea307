"""Ranks, components, and the check of MPI's world."""

from __future__ import annotations

import pytest

from libra_hpc.config.load import validate
from libra_hpc.errors import OperationError
from libra_hpc.mesh.agent_context import RankLayout, check_world


def layout_of(train: int, hybrid: int, rollout: int) -> RankLayout:
    counts = {"train": {"nodes": train}, "hybrid": {"nodes": hybrid}, "rollout": {"nodes": rollout}}
    return RankLayout.of(validate({"components": counts}))


def test_leaders_are_the_lowest_ranks_of_their_component() -> None:
    layout = layout_of(2, 3, 2)
    assert (layout.train_leader, layout.rollout_leader) == (1, 6)
    assert layout.pool()[2] == (3, "hybrid")
    assert len(layout.components) == 8


def test_entries_of_lists_count_through_hybrid_and_rollout_nodes() -> None:
    layout = layout_of(2, 2, 2)
    assert [layout.engine_node(rank) for rank in range(3, 7)] == [0, 1, 2, 3]


def test_worlds_of_one_name_the_plugin_mistake() -> None:
    layout = layout_of(1, 0, 1)
    check_world(3, layout, {})
    with pytest.raises(OperationError, match=r"1 ranks .* 3 nodes.*own MPI world.*slurm\.mpi"):
        check_world(1, layout, {"SLURM_STEP_NUM_TASKS": "3"})
    with pytest.raises(OperationError, match="2 ranks"):
        check_world(2, layout, {})
