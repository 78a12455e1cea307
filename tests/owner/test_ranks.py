"""The local launcher: what MPI processes get of each other, and what becomes of the others when one rank dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from libra_hpc.config.load import validate
from libra_hpc.facts.rundir import RunDir
from libra_hpc.owner.claim import encode_lease
from libra_hpc.process.lease import lease_file, newest_lease
from libra_hpc.protocol.start_up import KeyValueSpace
from libra_hpc.slurm import local, submit
from libra_hpc.slurm.launch import Launch, job_request
from libra_hpc.slurm.queue.job_record import read_job, write_job
from libra_hpc.slurm.queue.query import JobState

pytestmark = pytest.mark.slow

CONFIG: dict[str, Any] = {"slurm": {"restarts": 0}, "components": {"hybrid": {"nodes": 1}}}
WORLD = """
import asyncio, json, os, pathlib, signal, sys, time
from libra_hpc.process.owner_link import OwnerLink
link = OwnerLink()
if sys.argv[2] == "early" and not (pathlib.Path(sys.argv[1]) / "early").exists():
    if link.rank != 2:
        signal.pause()
    (pathlib.Path(sys.argv[1]) / "early").touch()
    raise RuntimeError("can't start new thread")
if sys.argv[2] == "stumble":
    run, rank = pathlib.Path(sys.argv[1]), link.rank
    with (run / f"starts-{rank}").open("a") as starts:
        starts.write("x")
        number = starts.tell()
    # One that ends has the others killed, which may not have begun.
    while sum(path.stat().st_size >= number for path in run.glob("starts-*")) < 4:
        time.sleep(0.01)
    if number < int(sys.argv[3]):
        os._exit(15)
async def ends():
    link.serve()
    while 2 not in link.lost:
        await asyncio.sleep(0.05)
folder = pathlib.Path(sys.argv[1])
def end(**record):
    (folder / "logs" / "attempt-1" / "ended.json").write_text(json.dumps(record))
assert link.gather(b"%d" % link.rank) == [b"%d" % rank for rank in range(link.size)]
if link.rank == 0:
    link.met()
mine = folder / f".rank-{link.rank}"
mine.write_text(f"{link.size} {os.getpid()}")
mine.rename(folder / f"rank-{link.rank}")
if sys.argv[2] == "lose":
    if link.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    asyncio.run(ends())
    assert link.lost[2] == ""
    (folder / f"survivor-{link.rank}").touch()
    if link.rank == 0:
        while len(list(folder.glob("survivor-*"))) < link.size - 1:
            time.sleep(0.05)
        end(why="completed", sentence="step 9 is saved", step=9)
    os._exit(0)
if sys.argv[2] == "early":
    if link.rank == 0:
        end(why="completed", sentence="step 9 is saved", step=9)
    os._exit(0)
if sys.argv[2] == "stumble":
    os._exit(1)
signal.pause()
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "world.py").write_text(WORLD)
    made = RunDir.create(tmp_path, "run")
    made.write_json(made.config, CONFIG)
    return made


def start(run: RunDir, *how: str) -> None:
    config = validate(CONFIG)
    local.start(Launch(job_request(config), run, 1, arguments=[str(run.path.parent / "world.py"), str(run.path), *how]))


def wait_for(run: RunDir, pattern: str, count: int) -> None:
    """Until that many files are there; the suite's own time limit ends a wait for nothing."""
    while len(list(run.path.glob(pattern))) < count:
        assert not local.state(run).state.ended, [path.read_text() for path in run.logs(1).glob("*.log")]
        time.sleep(0.05)


def wait_end(run: RunDir) -> JobState:
    while not (state := submit.state(run).state).ended:
        time.sleep(0.05)
    return state


def test_processes_get_what_all_have_put_once_all_are_in_the_barrier() -> None:
    first, second = (KeyValueSpace(2, "w1") for _ in range(2))
    assert first.answer("cmd=init pmi_version=1 pmi_subversion=1").startswith("cmd=response_to_init pmi_version=1 ")
    assert second.answer("cmd=get_my_kvsname") == "cmd=my_kvsname kvsname=w1"
    mapping = "cmd=get_result rc=0 msg=success value=(vector,(0,2,1))"
    assert first.answer("cmd=get kvsname=w1 key=PMI_process_mapping") == mapping
    for value in ("a=b#c", "d"):
        first.answer(f"cmd=put kvsname=w1 key=card-{value} value={value}")
        assert second.answer(f"cmd=get kvsname=w1 key=card-{value}").startswith("cmd=get_result rc=-1")
        second.take([first.put(), second.put()])
        assert second.answer(f"cmd=get kvsname=w1 key=card-{value}") == f"cmd=get_result rc=0 msg=success value={value}"
    assert first.answer("cmd=barrier_in") == "", "rank 0 answers that"


def test_a_lost_rank_ends_no_other(run: RunDir) -> None:
    start(run, "lose")
    assert wait_end(run) is JobState.COMPLETED
    assert sorted(path.name for path in run.path.glob("survivor-*")) == ["survivor-0", "survivor-1", "survivor-3"]
    assert (run.path / "rank-0").read_text().split()[0::2] == ["4"]
    assert (run.logs(1) / "launcher.log").read_text().startswith("exit codes by rank: 0 0 -9 0\n")


@pytest.mark.parametrize(("meets_at", "starts"), [(2, 2), (9, 3)])
def test_a_start_without_meeting_is_repeated_a_few_times(run: RunDir, meets_at: int, starts: int) -> None:
    start(run, "stumble", str(meets_at))
    assert wait_end(run) is JobState.FAILED
    assert [(run.path / f"starts-{rank}").read_text() for rank in range(4)] == ["x" * starts] * 4
    assert (run.logs(1) / "launcher.log").read_text().count("repeat: start") == starts - 1
    assert ("did not meet" in run.read_json(run.result)["message"]) is (meets_at > starts)


def test_an_agent_that_dies_before_the_ranks_meet_ends_that_start_with_its_cause(run: RunDir) -> None:
    start(run, "early")
    assert wait_end(run) is JobState.COMPLETED
    output = (run.logs(1) / "launcher.log").read_text()
    assert "repeat: start 1: the agents did not meet; agent-2: RuntimeError: can't start new thread\n" in output
    assert "exit codes by rank: -9 -9 1 -9\n" in output


def test_a_second_owner_is_refused_and_writes_nothing_but_a_result(run: RunDir) -> None:
    start(run, "wait")
    wait_for(run, "rank-*", 4)
    pid = read_job(run).pid
    argv = ["--run", str(run.path), "--attempt", "2", "--size", "1", "--", "true"]
    done = subprocess.run(
        [sys.executable, "-c", f"from libra_hpc.owner import owner as o; o.LEASE_S = 0.0; o.main({argv})"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stdout.startswith(f"the run does not start: process {pid} on ")
    assert not run.logs(2).exists()
    assert run.read_json(run.result)["message"] == done.stdout.strip()
    assert submit.cancel(run) is True


def test_an_owner_whose_run_another_has_taken_kills_its_ranks_and_writes_nothing(run: RunDir) -> None:
    start(run, "wait")
    wait_for(run, "rank-*", 4)
    generation, lease = newest_lease(run.leases)
    assert lease is not None
    other = msgspec.structs.replace(lease, nonce="other", host="far", pid=4711)
    lease_file(run.leases, generation + 1).write_bytes(encode_lease(other))
    while local._alive(read_job(run)):
        time.sleep(0.05)
    assert (
        "this owner of the run ends: another owner has taken the run: process 4711 on far"
        in (run.logs(1) / "launcher.log").read_text()
    )
    assert not run.result.exists()


def test_cancel_reaches_every_rank_and_is_idempotent(run: RunDir) -> None:
    start(run, "wait")
    wait_for(run, "rank-*", 4)
    assert submit.state(run).state is JobState.RUNNING
    assert submit.cancel(run) is True
    assert submit.cancel(run) is False
    assert submit.state(run).state is JobState.CANCELLED
    assert (run.logs(1) / "launcher.log").read_text().startswith("exit codes by rank: -15 -15 -15 -15\n")


def test_ranks_do_not_outlive_a_killed_launcher(run: RunDir) -> None:
    start(run, "wait")
    wait_for(run, "rank-*", 4)
    os.kill(read_job(run).pid, signal.SIGKILL)
    assert wait_end(run) is JobState.FAILED
    for path in run.path.glob("rank-*"):
        cmdline = Path(f"/proc/{path.read_text().split()[1]}/cmdline")
        while cmdline.exists() and cmdline.read_bytes():
            time.sleep(0.05)


def test_a_reused_pid_is_not_taken_for_the_run(run: RunDir) -> None:
    start(run, "wait")
    record = read_job(run)
    # The same process id as recorded, started at another time: this test's own.
    write_job(run, msgspec.structs.replace(record, pid=os.getpid()))
    assert submit.state(run).state is JobState.FAILED
    assert submit.cancel(run) is False
    write_job(run, record)
    assert submit.cancel(run) is True
