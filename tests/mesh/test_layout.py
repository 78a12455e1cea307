"""Ranks and components."""

from __future__ import annotations

from libra_hpc.config.load import validate
from libra_hpc.mesh.agent_context import RankLayout


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
