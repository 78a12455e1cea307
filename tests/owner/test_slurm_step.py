"""What the owner learns of its job from Slurm."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from libra_hpc.facts.rundir import RunDir
from libra_hpc.owner import slurm_step as module
from libra_hpc.owner.slurm_step import ComponentNow, SlurmStep, job_now, requeue, taken_apart

LINE = "JobId={} HetJobId=7 JobName=t JobState={} Reason=None ReqNodeList=(null) NodeList=a800-[0-1] NumNodes={}\n"


def answer(monkeypatch: pytest.MonkeyPatch, *components: tuple[str, str], code: int = 0) -> None:
    """Slurm has these states and node counts, and ends every command with ``code``."""

    def ask(*argv: str) -> tuple[int, str]:
        if argv[1] == "requeue":
            return code, "Job is pending execution for job 7\n"
        if argv[2] == "hostnames":
            return 0, "a800-0\na800-1\n"
        return 0, "".join(LINE.format(7 + offset, *component) for offset, component in enumerate(components))

    monkeypatch.setattr(module, "ask", ask)


def test_a_job_is_taken_apart_where_slurm_lets_only_some_components_run(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, ("COMPLETING", "1"), ("RUNNING", "2"), ("RUNNING", "1"))
    now = job_now({"SLURM_JOB_ID": "7"})
    assert now == [ComponentNow(1, "COMPLETING"), ComponentNow(2, "RUNNING"), ComponentNow(1, "RUNNING")]
    assert taken_apart(now)
    assert [part.nodes for part in job_now({"SLURM_JOB_ID": "7"}, {"a800-1", "a800-7"})] == [0, 1, 0]
    for states in (("RUNNING",), ("RUNNING", "RUNNING"), ("COMPLETING", "COMPLETING"), ()):
        assert not taken_apart([ComponentNow(1, state) for state in states]), states


def test_the_ranks_of_a_node_that_srun_reports_are_gone_with_the_reason_that_slurm_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, node = RunDir(tmp_path), "NodeName=a800-1 State=DOWN Reason=a broken fan [root@2026-11-24T09:26:36]\n"
    logs = run.logs(1)
    logs.mkdir(parents=True)
    output = logs / "slurm.out"
    output.write_text("srun: error: Node failure on a800-0\n")
    monkeypatch.setattr(module, "ask", lambda *argv: (0, node))
    step = SlurmStep(run, 1, 3, ["sh", "-c", f"echo 'srun: error: Node failure on a800-1' >>{output}"])
    step.links.nodes.update(enumerate(("a800-0", "a800-1", "a800-10")))
    while step.poll():
        pass
    why = "Slurm set node a800-1 down: a broken fan, since 2026-11-24 09:26:36"
    assert step.down == {"a800-1": why}, "what an earlier start printed is no news"
    assert step.links.lost == {1: why}
    assert step.links.ended == {1}


def test_a_step_whose_ranks_have_ended_is_over_though_slurm_does_not_tell_srun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, asked = RunDir(tmp_path), list[tuple[str, ...]]()
    run.logs(1).mkdir(parents=True)
    for name, value in {"send": lambda *argv: asked.append(argv), "UNTOLD_S": 0.2, "OVER_S": 1.0}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(os, "environ", {**os.environ, "SLURM_JOB_ID": "7", "SLURM_JOB_ID_HET_GROUP_1": "8"})
    step, now = SlurmStep(run, 1, 2, ["sleep", "60"]), time.monotonic()
    (run.logs(1) / "step").write_text("0\n")
    step.links.gone[0] = now - 60.0
    assert step.poll(), "a rank lives"
    step.links.nodes |= {0: "a800-0", 1: "a800-1"}
    assert step.leave_out() == {"a800-1"}
    assert "node a800-1 is silent" in step.down["a800-1"]
    while step.poll():
        assert time.monotonic() < now + 10.0
    assert set(asked) == {("scancel", "--ctld", "7.0"), ("scancel", "--ctld", "8.0")}
    assert os.environ["SLURM_OVERLAP"] == "1", "the next start goes beside what is left of it"
    step._process.kill()


def test_a_refusal_for_components_that_slurm_has_queued_itself_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, ("COMPLETING", "1"), ("PENDING", "2-2"), code=1)
    assert requeue({"SLURM_JOB_ID": "7"}) == ""
    answer(monkeypatch, ("PENDING", "1"), ("RUNNING", "2"), code=1)
    with pytest.raises(module.SlurmUnreachable, match="Job is pending execution for job 7"):
        requeue({"SLURM_JOB_ID": "7"})


def test_a_controller_that_does_not_answer_is_said_while_it_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, script in {"scontrol": "sleep 60", "squeue": "echo late; sleep 0.5"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    said: list[str] = []
    monkeypatch.setattr(module, "on_wait", [said.append])
    monkeypatch.setattr(module, "WAIT_S", 0.2)
    assert module.ask("squeue") == (0, "late\n"), "what was read before a pause is not lost"
    assert 2 <= len(said) <= 3
    monkeypatch.setattr(module, "COMMAND_S", 0.5)
    began = time.monotonic()
    assert job_now({"SLURM_JOB_ID": "7"}) == []
    assert time.monotonic() - began < 5.0, "also where the command has children"
    assert "`scontrol` has not answered for " in said[-1]
    assert module.ask("nothing-there")[0] == 127
