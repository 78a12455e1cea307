"""A full file system under a real worker: the failure is reported, nothing is left behind, training goes on."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path

import pytest

from libra_hpc.protocol.trainer import Offered, OfferFailed, OfferWeights, SaveFailed
from libra_hpc.weights.pieces import offer_path, read_offer

from .support import Replica, join_all, make_model, step_all

pytestmark = pytest.mark.engine


def test_a_write_that_fails_half_way_leaves_nothing_and_works_again_later(tmp_path: Path) -> None:
    model_dir = tmp_path / "model"
    make_model("qwen2", model_dir)
    shm = tmp_path / "shm"
    shm.mkdir()
    replica = Replica(tmp_path, "a", model_dir)
    replica.ready()
    join_all([replica], 1, tmp_path / "g1")
    step_all([replica], 1, 1)
    folder, offers = tmp_path / "step-000001", tmp_path / "offers"
    offers.mkdir()
    replica.save(folder, 1)
    refused = replica.save(tmp_path / "step-000002", 2, SaveFailed)
    assert refused.reason == "this replica is at step 1, it cannot save step 2"
    pid = replica.processes[0].pid
    whole = resource.prlimit(pid, resource.RLIMIT_FSIZE, (16384, resource.RLIM_INFINITY))
    replica.save(tmp_path / "torn", 1, SaveFailed)
    shutil.rmtree(tmp_path / "torn")
    replica.ask(OfferWeights(str(offers), 1, -1), OfferFailed)
    step_all([replica], 2, 1)
    replica.save(shm, 2, SaveFailed, "snapshot")
    assert sorted(path.name for path in tmp_path.iterdir() if "step" in path.name or "safetensors" in path.name) == [
        "step-000001"
    ]
    assert not list(offers.iterdir())
    resource.prlimit(pid, resource.RLIMIT_FSIZE, whole)
    offered = replica.ask(OfferWeights(str(offers), 2, -1), Offered)
    assert read_offer(offer_path(offers, 2, offered.writer)).size == offered.size
    replica.save(tmp_path / "step-000002", 2)
    assert replica.close() == [0]
