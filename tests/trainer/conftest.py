from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

from libra_hpc.trainer.device import choose_device, local_store
from libra_hpc.trainer.train_engine import close_world, init_world
from libra_hpc.weights.names import ReplicaPlace


@pytest.fixture(scope="module")
def world() -> Iterator[ReplicaPlace]:
    """A torch world of this process alone."""
    yield init_world(choose_device("cpu", 0, 1), 1, 1, 0, local_store(), 60.0)
    close_world()
