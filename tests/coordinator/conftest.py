"""Rank 0 of a run of four nodes, all of which are there, and its clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from libra_hpc.coordinator import coordinator as module

from .test_coordinator import Scene


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Epoch seconds as the coordinator sees them."""
    found = [1000.0]
    monkeypatch.setattr(module.time, "time", lambda: found[0])
    return found
