"""Run directories that fill up, and checkpoints that are not what was written."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from .harness import Chaos, memory, sound

pytestmark = [pytest.mark.timeout(300)]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB for the run directory."""
    folder = tmp_path / "runs"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("file systems may not be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path) -> Path:
    """Leave no free block; returns the file that holds them."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(65536))
    return filler


@pytest.mark.chaos
def test_a_run_goes_on_through_a_full_disk_and_loses_nothing(tmp_path: Path, disk: Path) -> None:
    case = Chaos(tmp_path, steps=80)
    case.submit()
    case.reach(5)
    filler = fill(disk)
    case.wait(lambda: any("storage fault" in notice for notice in case.status()["notices"]), "the status that says so")
    step = case.status()["step"]
    case.wait(lambda: case.status()["step"] > step + 2, "steps meanwhile")
    filler.unlink()
    case.wait(lambda: case.events("storage_ok"), "writes again")
    sound(case)


@pytest.mark.chaos
def test_a_disk_that_stays_full_stops_the_run_with_that_reason(tmp_path: Path, disk: Path) -> None:
    case = Chaos(tmp_path, steps=4000)
    run = case.submit("-o", "deadlines.storage_s=5")
    case.reach(5)
    fill(disk)
    case.wait(lambda: run.result.exists(), "it ended")
    newest = run.latest_checkpoint()
    assert (run.read_json(run.result)["state"], run.read_json(run.result)["step"]) == ("failed", newest and newest[0])
    assert "No space left" in case.message() or "free" in case.message(), case.message()
    case.wait(lambda: case.status()["state"] == "failed", "the status of its end, which ended on a full disk")
    assert not case.events("recovered"), "a restart would find the same full disk"


@pytest.mark.chaos
@pytest.mark.parametrize("ranks", [(3, 4), (1, 2, 3, 4)], ids=["of rollout nodes", "of all nodes"])
def test_weights_arrive_again_after_folders_in_shared_memory_were_removed(
    tmp_path: Path, ranks: tuple[int, ...]
) -> None:
    case = Chaos(tmp_path, steps=60)
    case.submit()
    case.reach(5)
    for folder in memory({str(case.agent(rank)) for rank in ranks}):
        if "kept" not in folder.name:
            # Aside first: a carrier may write another file while those there are removed.
            shutil.rmtree(folder.rename(folder.with_name(f"{folder.name}.removed")))
    case.wait(lambda: {event["rank"] for event in case.events("folder_lost")} == set(ranks), "agents that notice")
    step = case.steps()[-1]
    case.wait(
        lambda: any(one["version"] > step + 2 and one["engines"] == 2 for one in case.events("weights_applied")),
        "new weights in both engines",
    )
    reasons = {event["rank"]: event["reason"] for event in case.events("folder_lost")}
    assert "was removed while the agent of rank 3 ran" in reasons[3]
    sound(case)
    assert not case.events("recovered")
