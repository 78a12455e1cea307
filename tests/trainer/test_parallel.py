"""Tensor, pipeline and data parallelism against one process: losses, moments, weights, checkpoints across splits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from libra_hpc.weights.names import ReplicaPlace

from .support import Layout, assert_equals_one_process, make_model

pytestmark = pytest.mark.engine


ONE_GROUP = {"num_key_value_heads": 1}
"""Fewer key/value heads than tensor-parallel ranks."""


@pytest.mark.parametrize(
    ("kind", "keys", "layout", "recompute"),
    [
        ("qwen3", ONE_GROUP, Layout(tp=2), "selective"),
        ("glm4", ONE_GROUP, Layout(tp=2), "none"),
        ("qwen2", {"tied": True, "layers": 3}, Layout(pp=2), "none"),
        ("qwen2", {"tied": True}, Layout(tp=2, pp=2), "full"),
        ("qwen3", {"tied": True}, Layout(dp=3), "none"),
        ("qwen3", {}, Layout(tp=2, dp=2), "none"),
        ("qwen2", {"tied": True, "layers": 3}, Layout(pp=2, dp=2), "none"),
    ],
    ids=str,
)
def test_a_split_replica_equals_one_process(
    tmp_path: Path, world: ReplicaPlace, kind: str, keys: dict[str, Any], layout: Layout, recompute: str
) -> None:
    make_model(kind, tmp_path / "model", **keys)
    assert_equals_one_process(tmp_path, world, layout, recompute=recompute)
