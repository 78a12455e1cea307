"""The batch script in the hands of a real Slurm: ranks of four components meet, losses, cancelling, refusals."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from libra_hpc.config.load import validate
from libra_hpc.errors import OperationError
from libra_hpc.facts.rundir import RunDir
from libra_hpc.owner.rank_links import RankLinks
from libra_hpc.process.addresses import own_addresses
from libra_hpc.process.owner_link import OWNER
from libra_hpc.slurm import submit
from libra_hpc.slurm.launch import Launch, job_request
from libra_hpc.slurm.queue import query
from libra_hpc.slurm.queue.command import call
from libra_hpc.slurm.queue.job_record import read_job
from libra_hpc.slurm.queue.query import JobInfo, JobState
from libra_hpc.slurm.queue.run_state import RunRecords, run_state
from tests.slurm.scripts import MEETS

pytestmark = pytest.mark.cluster

CONFIG: dict[str, Any] = {
    "run": {"name": "t"},
    "components": {
        # The first component asks for more memory than the others have: nothing of it may leak into them.
        "planner": {"partition": "cpu", "mem": "4G"},
        "train": {"partition": "a800", "gpus": 8, "gpu_type": "a800", "cpus": 8, "mem": "1G"},
        "hybrid": {"partition": "a800", "nodes": 2, "gpus": 2},
        "rollout": {"partition": "cpu"},
    },
}
WORLD = """
import json, os, pathlib, signal, sys, time
from libra_hpc.process.owner_link import OwnerLink
link, folder = OwnerLink(), pathlib.Path(sys.argv[1])
names = ("SLURMD_NODENAME", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "CUDA_VISIBLE_DEVICES", "NOTE")
facts = {"size": link.size, "rank": link.rank, "met": len(link.gather(b"")), "pid": os.getpid()}
print(json.dumps(facts | {n: os.environ.get(n) for n in names}), flush=True)
if sys.argv[2] == "lose" and link.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "lose":
    time.sleep(0.5)
    if link.rank == 0:
        end = {"why": "completed", "sentence": "step 9 is saved", "step": 9}
        (folder / "logs" / "attempt-1" / "ended.json").write_text(json.dumps(end))
    os._exit(0)
number = signal.sigwait({signal.SIGUSR1, signal.SIGTERM})
print(json.dumps({"signal": number}), flush=True)
os._exit(0)
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "world.py").write_text(
        WORLD.replace(
            "from libra", "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})\nfrom libra", 1
        )
    )
    # Both need care in an sbatch script: a space, and Slurm's own file name pattern.
    return RunDir.create(tmp_path / "runs 100%j", "t")


def queue(
    run: RunDir, env: dict[str, str], how: str, attempt: int = 1, changes: Mapping[str, Any] = MappingProxyType({})
) -> str:
    arguments = [str(run.path.parent.parent / "world.py"), str(run.path), how]
    config = validate({**CONFIG, **changes})
    run.write_config(config.as_data())
    return submit.submit(
        Launch(job_request(config), run, attempt, environment={"NOTE": "it's 100%"}, arguments=arguments), env
    )


def records(run: RunDir, attempt: int = 1) -> list[dict[str, Any]]:
    """What the ranks have printed, in rank order."""
    return [
        json.loads(line)
        for path in sorted(run.logs(attempt).glob("agent-*.log"))
        for line in path.read_text().splitlines()
        if line.startswith("{")
    ]


def wait_records(run: RunDir, env: dict[str, str], count: int, attempt: int = 1) -> list[dict[str, Any]]:
    while len(found := records(run, attempt)) < count:
        assert not submit.state(run, env).state.ended, [path.read_text() for path in run.logs(attempt).iterdir()]
        time.sleep(0.1)
    return found


def wait_end(run: RunDir, env: dict[str, str]) -> JobInfo:
    while not (info := submit.state(run, env)).state.ended:
        time.sleep(0.1)
    return info


def test_one_world_over_four_components_survives_a_lost_rank(run: RunDir, slurm_env: dict[str, str]) -> None:
    job_id = queue(run, slurm_env, "lose")
    info = wait_end(run, slurm_env)
    assert (info.job_id, info.state, info.exit_code) == (job_id, JobState.COMPLETED, 0), (
        run.logs(1) / "slurm.out"
    ).read_text()
    found = records(run)
    assert [record["rank"] for record in found] == [0, 1, 2, 3, 4]
    assert {(record["size"], record["met"], record["SLURM_STEP_NUM_TASKS"]) for record in found} == {(5, 5, "5")}
    assert {record["NOTE"] for record in found} == {"it's 100%"}
    assert [str(record["SLURMD_NODENAME"])[:4] for record in found] == ["cpu-", "a800", "a800", "a800", "cpu-"]
    assert len({record["SLURMD_NODENAME"] for record in found}) == 5
    assert [record["CUDA_VISIBLE_DEVICES"] for record in found] == [None, "0,1,2,3,4,5,6,7", "0,1", "0,1", None]
    assert [component.offset for component in info.components] == [0, 1, 2, 3]


TWO_STEPS = """#!/bin/bash
#SBATCH --nodes=2 --partition=a800
#SBATCH hetjob
#SBATCH --nodes=1 --partition=cpu
export {owner}
srun --mpi=none --het-group=0 {rank} &
srun --mpi=none --het-group=1 bash -c 'SLURM_PROCID=2 exec "$@"' - {rank} &
wait
"""


def test_two_steps_of_a_job_are_one_mpi_world(slurm_env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "world.py").write_text(f'{MEETS}\n(folder / f"met-{{owner.rank}}").touch()\nowner.gather(b"")\n')
    links, script = RankLinks(3), tmp_path / "job.sbatch"
    rank = shlex.join([sys.executable, "-m", "libra_hpc.slurm.rank", str(tmp_path / "world.py"), str(tmp_path)])
    script.write_text(TWO_STEPS.format(owner=shlex.quote(f"{OWNER}={links.open(own_addresses())}"), rank=rank))
    call(["sbatch", f"--output={tmp_path}/slurm.out", str(script)], slurm_env)
    while len(list(tmp_path.glob("met-*"))) < 3:
        links.wait(0.1)
    links.close()


def test_a_set_up_line_that_fails_ends_the_run_with_its_cause(run: RunDir, slurm_env: dict[str, str]) -> None:
    queue(run, slurm_env, "wait", changes={"compute": {"setup": ["module load cuda"]}})
    info = wait_end(run, slurm_env)
    cause = "the set-up of the job ended at 'module load cuda' with exit code 127 (compute.setup, compute.env)"
    assert (info.state, info.exit_code) == (JobState.FAILED, 1)
    assert run.read_json(run.result)["message"] == cause
    assert cause in (run.logs(1) / "slurm.out").read_text().splitlines()


def test_a_job_that_leaves_its_script_is_not_completed(run: RunDir, slurm_env: dict[str, str]) -> None:
    queue(run, slurm_env, "wait", changes={"compute": {"setup": ["trap - EXIT", "exit 0"]}})
    info = wait_end(run, slurm_env)
    assert info.state is JobState.COMPLETED
    found = run_state(RunRecords(read_job(run), None, None), info, time.time())
    assert (found.state, found.reason) == ("failed", "its job ended without a result")


def test_notice_cancel_and_the_next_attempt(run: RunDir, slurm_env: dict[str, str]) -> None:
    job_id = queue(run, slurm_env, "wait")
    wait_records(run, slurm_env, 5)
    assert submit.state(run, slurm_env).state is JobState.RUNNING
    # What Slurm itself sends to the script before the time limit.
    call(["scancel", "--batch", "--signal=USR1", job_id], slurm_env)
    info = wait_end(run, slurm_env)
    assert [record["signal"] for record in records(run) if "signal" in record] == [signal.SIGUSR1] * 5
    # No verdict was written: the job failed, whatever srun says.
    assert (info.state, info.exit_code) == (JobState.FAILED, 1)
    assert "the run was stopped by the time limit: time limit at step 0" in (run.logs(1) / "slurm.out").read_text()

    run.result.write_text('{"state": "completed"}')
    second = queue(run, slurm_env, "wait", attempt=2)
    assert second != job_id
    assert not run.result.exists()
    pids = [record["pid"] for record in wait_records(run, slurm_env, 5, attempt=2)]
    assert submit.cancel(run, slurm_env) is True
    assert wait_end(run, slurm_env).state is JobState.CANCELLED
    assert submit.cancel(run, slurm_env) is False
    assert submit.cancel(second, slurm_env) is False
    for pid in pids:
        while os.path.exists(f"/proc/{pid}") and Path(f"/proc/{pid}/cmdline").read_bytes():
            time.sleep(0.05)


def test_nothing_is_queued_where_the_cluster_cannot_be_named(
    slurm_env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(env: object) -> str:
        raise OperationError("Slurm does not answer scontrol")

    monkeypatch.setattr(submit, "cluster_name", unreachable)
    run = RunDir.create(tmp_path, "t")
    before = set(query.own_jobs(slurm_env))
    with pytest.raises(OperationError, match="does not answer"):
        submit.submit(Launch(job_request(validate(CONFIG)), run, 1), slurm_env)
    assert set(query.own_jobs(slurm_env)) == before
