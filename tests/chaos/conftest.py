"""What the tests of faults share: the policy of real engines, and no run outlives its test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from libra_hpc.errors import UserError
from libra_hpc.facts.rundir import RunDir
from libra_hpc.slurm import local
from libra_hpc.slurm.queue.job_record import read_job
from tests.cluster.conftest import policy

__all__ = ["policy"]


@pytest.fixture(autouse=True)
def ended(tmp_path: Path) -> Iterator[None]:
    """A failed test leaves a run behind, which would disturb those after it."""
    yield
    for folder in (tmp_path / "runs").glob("*-*"):
        try:
            if read_job(RunDir(folder)).executor == "local":
                local.cancel(RunDir(folder))
        except UserError:
            continue
