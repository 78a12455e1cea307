"""The policy that whole runs of this folder start from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from libra_hpc.annexes.devcluster.packages import locked
from tests.conftest import shared
from tests.example_files import KEYCHAIN_TASK


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A barely warm-started policy: it calls tools and fails often, which is all these tests need.  The first worker
    that wants it makes it for all."""
    folder = shared(tmp_path_factory) / "tiny-policy"
    made = folder.with_suffix(".new")
    make = f"make_tiny_policy({str(made)!r}, {KEYCHAIN_TASK!r}, steps=120)"
    code = f"from libra_hpc_cli.jobs import make_tiny_policy; {make}"
    command = [sys.executable, "-c", code]
    with locked(folder.with_suffix(".lock")):
        if not folder.exists():
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            made.rename(folder)
    return folder
