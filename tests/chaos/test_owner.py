"""The owner of a run: it is killed, another machine wants the run, its disk is full, an agent has a defect."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import msgspec
import pytest

from libra_hpc.files import OTHERS_WRITE
from libra_hpc.owner.claim import encode_lease
from libra_hpc.process.lease import lease_file, newest_lease
from libra_hpc.slurm.queue.job_record import read_job

from .harness import Chaos, nothing_left, processes, sound
from .test_agents import PLANNER, ROLLOUT
from .test_storage import disk, fill

__all__ = ["disk"]
pytestmark = [pytest.mark.timeout(300)]


@pytest.mark.chaos
def test_ranks_of_a_killed_owner_save_and_say_so_and_the_run_goes_on(tmp_path: Path) -> None:
    case = Chaos(tmp_path, steps=60)
    run = case.submit()
    case.reach(8)
    owner = read_job(run).pid
    os.kill(owner, signal.SIGKILL)
    case.wait(lambda: case.status()["state"] == "failed", "the last status, of ranks that ended")
    message = case.status()["message"]
    assert message.startswith(f"the owner of the run (process {owner} on "), message
    assert message.endswith(" is saved; continue with --resume")
    nothing_left(run)
    shown = case.cli("status", str(run.path)).stdout
    assert "failed" in shown
    assert f"process {owner}" in shown
    case.resume()
    sound(case)
    assert case.events("job_started")[-1]["step"] >= 8


@pytest.mark.chaos
def test_a_world_that_finds_another_owner_stops_and_writes_nothing_more(tmp_path: Path) -> None:
    case = Chaos(tmp_path, steps=4000)
    run = case.submit()
    case.reach(5)
    os.kill(owner := read_job(run).pid, signal.SIGSTOP)
    generation, lease = newest_lease(run.leases)
    assert lease is not None
    lease_file(run.leases, generation + 1).write_bytes(
        encode_lease(msgspec.structs.replace(lease, nonce="other", host="far", pid=1))
    )
    log = run.logs(1) / "agent-0.log"
    case.wait(lambda: "another owner has the run" in log.read_text(), "rank 0 sees the other")
    files = [run.events, run.metrics, run.status]
    sizes = [path.stat().st_mtime_ns for path in files]
    checkpoints = [path for _, path in run.complete_checkpoints()]
    os.kill(owner, signal.SIGCONT)
    # What was kept for the next start stays for the other, until it is an orphan.
    case.wait(lambda: not processes(run), "all its processes have ended")
    assert [path.stat().st_mtime_ns for path in files] == sizes
    assert [path for _, path in run.complete_checkpoints()] == checkpoints
    assert not run.result.exists()


@pytest.mark.chaos
def test_a_planner_killed_on_a_full_disk_goes_on_once_there_is_room(tmp_path: Path, disk: Path) -> None:
    case = Chaos(tmp_path, steps=60)
    run = case.submit()
    case.reach(8)
    planner, filler = case.agent(PLANNER), fill(disk)
    os.kill(planner, signal.SIGKILL)

    def named() -> bool:
        status = case.status()
        said = " ".join([status["message"], *status["notices"]])
        # Blocks that the dead planner held may take a few lines more, and no checkpoint.
        return str(run.path) in said and ("No space left on device" in said or "bytes free" in said)

    case.wait(named, "the status that names the disk")
    time.sleep(10.0)
    filler.unlink()
    sound(case)
    assert len(case.events("restart")) == 1


@pytest.mark.chaos
def test_a_signal_to_the_owner_saves_and_stops_the_run_whose_files_it_alone_can_write(tmp_path: Path) -> None:
    case, before = Chaos(tmp_path, steps=400), os.umask(0)
    try:
        run = case.submit("-o", "run.share=all")
    finally:
        os.umask(before)
    case.reach(8)
    for agent in (case.agent(PLANNER), case.agent(ROLLOUT)):
        for number in (signal.SIGUSR2, signal.SIGALRM, signal.SIGHUP):
            os.kill(agent, number)
    os.kill(case.agent(ROLLOUT), signal.SIGTERM)
    case.wait(lambda: case.events("signal_ignored"), "a notice of the agent that rank 0 alone acts on it")
    os.kill(read_job(run).pid, signal.SIGTERM)
    case.wait(lambda: run.result.exists(), "its end")
    assert " is saved" in case.message()
    sound(case, "cancelled")
    assert len(case.events("stop_requested")) == 1
    assert not case.events("restart")
    log = (run.logs(1) / "agent-0.log").read_text()
    assert "most recent call first" in log
    assert f"signal 14 ({signal.strsignal(14)}) means nothing here" in log
    assert [path for path in run.path.rglob("*") if path.stat().st_mode & OTHERS_WRITE] == []
