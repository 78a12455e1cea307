"""The policy that whole runs of this folder start from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from libra_hpc.annexes.devcluster.packages import locked
from tests.conftest import shared


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A barely warm-started policy: it calls tools and fails often, which is all these tests need.  The first worker
    that wants it makes it for all."""
    folder = shared(tmp_path_factory) / "tiny-policy"
    made = folder.with_suffix(".new")
    code = f"from libra_hpc.tasks.policy import make_tiny_policy as m; m({str(made)!r}, steps=120)"
    command = [sys.executable, "-c", code]
    with locked(folder.with_suffix(".lock")):
        if not folder.exists():
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            made.rename(folder)
    return folder
