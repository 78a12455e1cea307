"""Full file systems under real workers: the failure is reported, nothing is left behind, training goes on."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from libra_hpc.protocol.trainer import Offered, OfferFailed, OfferWeights, SaveFailed
from libra_hpc.state import state_folders as folders
from libra_hpc.weights.pieces import offer_path, read_offer

from .support import Replica, join_all, make_model, step_all

pytestmark = pytest.mark.engine


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB, a third of a state of the tiny model."""
    where = tmp_path / "small"
    where.mkdir()
    if (
        os.getuid()
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(where)], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("mounting a small file system takes root")
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True)


def test_without_room_nothing_is_written_and_training_goes_on(tmp_path: Path, small: Path) -> None:
    model_dir = tmp_path / "model"
    make_model("qwen2", model_dir)
    replica = Replica(tmp_path, "a", model_dir, tp=2)
    replica.ready()
    join_all([replica], 1, tmp_path / "g1")
    step_all([replica], 1, 1)
    (small / "snapshot").mkdir()
    assert replica.save(small / "snapshot", 1, SaveFailed, "snapshot").reason.endswith(" bytes free")
    (small / "snapshot").rmdir()
    failed = replica.save(small / "step-000001", 1, SaveFailed)
    assert "small/step-000001/" in failed.reason.split(" needs ")[0]
    assert failed.reason.endswith(" bytes free")
    shutil.rmtree(small / "step-000001", ignore_errors=True)
    free = os.statvfs(small)
    (small / "others").write_bytes(bytes(free.f_bavail * free.f_frsize))
    assert "small" in replica.ask(OfferWeights(str(small), 1, -1), OfferFailed).reason
    assert [path.name for path in small.rglob("*")] == ["others"]
    failed = replica.save(tmp_path / "step-000002", 2, SaveFailed)
    assert failed.reason == "this replica is at step 1, it cannot save step 2"
    assert not (tmp_path / "step-000002").exists()
    assert replica.save(tmp_path / "step-000001", 1).step == 1
    assert folders.read_state(tmp_path / "step-000001").step == 1
    assert replica.close() == [0, 0]


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
