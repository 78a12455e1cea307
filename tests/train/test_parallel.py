"""Tensor, pipeline and data parallelism against one process: losses, moments, weights, checkpoints across splits."""

from __future__ import annotations

from pathlib import Path

import pytest

from libra_hpc.weights.names import ReplicaPlace

from .support import Layout, assert_equals_one_process, make_model

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("kind", "tied", "layers", "layout"),
    [
        ("qwen3", False, 2, Layout(tp=2)),
        ("qwen2", True, 3, Layout(pp=2)),
        ("qwen2", True, 2, Layout(tp=2, pp=2)),
        ("qwen3", True, 2, Layout(dp=3)),
        ("qwen3", False, 2, Layout(tp=2, dp=2)),
        ("qwen2", True, 3, Layout(pp=2, dp=2)),
    ],
    ids=str,
)
def test_a_split_replica_equals_one_process(
    tmp_path: Path, world: ReplicaPlace, kind: str, tied: bool, layers: int, layout: Layout
) -> None:
    make_model(kind, tmp_path / "model", tied=tied, layers=layers)
    assert_equals_one_process(tmp_path, world, layout)
