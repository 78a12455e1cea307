"""The policy that whole runs of this folder start from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A barely warm-started policy: it calls tools and fails often, which is all these tests need."""
    folder = tmp_path_factory.mktemp("policy") / "tiny"
    code = f"from libra_hpc.tasks.policy import make_tiny_policy as m; m({str(folder)!r}, steps=120)"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return folder
