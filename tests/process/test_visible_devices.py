"""Devices of child engines."""

from __future__ import annotations

import pytest

from libra_hpc.process.visible_devices import engine_environment


@pytest.mark.parametrize(
    ("device", "given", "first", "count", "seen"),
    [
        ("cpu", "0,1", 0, 1, ""),
        ("cuda", "", 2, 2, "2,3"),
        ("cuda", "4,5,6,7", 0, 2, "4,5"),
        ("cuda", "4,5,6,7", 2, 2, "6,7"),
        ("cuda", "GPU-a,GPU-b", 1, 1, "GPU-b"),
    ],
)
def test_an_engine_sees_its_share_of_what_the_node_was_given(
    device: str, given: str, first: int, count: int, seen: str
) -> None:
    out = engine_environment({"CUDA_VISIBLE_DEVICES": given, "HOME": "/h"}, device, first, count, 3)
    assert (out["CUDA_VISIBLE_DEVICES"], out["OMP_NUM_THREADS"], out["HOME"]) == (seen, "3", "/h")
