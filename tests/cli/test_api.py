"""`libra_hpc.api`: it does what the verbs do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from libra_hpc import api
from libra_hpc.errors import OperationError, UserError
from libra_hpc.facts.rundir import RunDir
from libra_hpc.slurm.queue.query import JobInfo, JobState
from tests.facts import synthetic

from .conftest import Outcome, Queue, write_status

Cli = Callable[..., Outcome]


def test_a_run_is_queued_looked_at_and_resumed(site: Path, queue: Queue, cli: Cli) -> None:
    job = api.submit(
        "run.toml", {"run.steps": 200, "optimizer": {"lr": 1e-6}, "slurm.extra": ["-x", "a"]}, until_done=True
    )
    assert (job.name, queue.submitted) == ("quick-001", [("quick-001", 1)])
    config = RunDir(job.path).resolved()
    assert (config["run"]["steps"], config["optimizer"]["lr"], config["slurm"]["requeues"]) == (200, 1e-6, 1000)
    assert config["slurm"]["extra"] == ["-x", "a"]
    for name in (job.path, "quick-001", "4711"):
        assert api.Runs()[name].status() == json.loads(cli("status", "quick-001", "--json").out)
    assert [one.path for one in api.Runs("runs")] == [job.path]
    assert (job.state, job.metrics(), job.logs()) == ("pending", [], {})
    with pytest.raises(UserError, match="--resume = 'quick-001': its job 4711 is pending; valid: a run"):
        api.resume(job)
    queue.answer = JobInfo("4711", JobState.CANCELLED)
    assert api.resume("quick-001", {"run.steps": 300}).path == job.path
    assert queue.submitted[1:] == [("quick-001", 2)]
    assert RunDir(job.path).resolved()["run"]["steps"] == 300


def test_metrics_are_the_lines_of_the_steps(tmp_path: Path) -> None:
    job = api.Runs(tmp_path)[synthetic.make_run(tmp_path).name]
    found = job.metrics()
    assert [line["step"] for line in found] == list(range(1, len(found) + 1))
    assert {"reward", "step_s"} <= set(found[0])
    assert job.metrics(since=len(found) - 2) == found[-2:]
    assert sum(one.generated for one in job.trajectories()) > 0


@pytest.mark.parametrize(
    ("sbatch", "extra"),
    [({"mail_type": "END", "exclusive": True, "overcommit": False}, ["--mail-type=END", "--exclusive"]), ({}, [])],
)
def test_options_of_sbatch_are_keywords(sbatch: dict[str, Any], extra: list[str], site: Path, queue: Queue) -> None:
    assert RunDir(api.submit("run.toml", **sbatch).path).resolved()["slurm"]["extra"] == extra


def test_values_are_those_of_the_run_file_whatever_holds_them(site: Path, queue: Queue) -> None:
    values = {
        "run.dir": Path("runs"),
        "run.steps": np.int64(3),
        "optimizer.lr": np.float32(0.5),
        "slurm.extra": ("-H",),
    }
    config = RunDir(api.submit("run.toml", {**values, "slurm.extra": ("-H",)}).path).resolved()
    assert (config["run"]["steps"], config["optimizer"]["lr"], config["slurm"]["extra"]) == (3, 0.5, ["-H"])
    jobs = api.sweep("run.toml", {"run.seed": np.arange(2), "rollout.policy": ("cmlfq", "sticky")})
    assert len(jobs) == 4


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: api.submit("run.toml", {"run.steps": {1}}), "run.steps = {1}: a set; valid: a text"),
        (lambda: api.submit("run.toml", {"run.steps": None}), "run.steps = None: a NoneType; valid: a text"),
        (lambda: api.submit("run.toml", time="1:00"), "slurm.time_limit"),
        (lambda: api.sweep("run.toml", {"run.seed": 3}), "over['run.seed'] = 3: one value; valid: a list"),
        (lambda: api.sweep("run.toml", {"run.name": "ab"}), "over['run.name'] = 'ab': one value; valid: a list"),
        (lambda: api.Runs()["quikc"], "RUN = 'quikc'"),
    ],
)
def test_a_mistake_of_python_is_one_sentence(
    call: Callable[[], object], sentence: str, site: Path, queue: Queue
) -> None:
    with pytest.raises(UserError) as raised:
        call()
    assert sentence in str(raised.value)
    assert queue.submitted == []


def test_waiting_ends_with_the_run_or_the_time(site: Path, queue: Queue) -> None:
    job = api.submit("run.toml")
    assert not job.wait(0.0).over
    queue.answer = JobInfo("4711", JobState.COMPLETED)
    write_status(RunDir(job.path), "completed", 100, message="step 100 is saved")
    state = job.wait()
    assert (state.state, state.reason, state.over) == ("completed", "step 100 is saved", True)
    assert job.result()["state"] == "completed"
    write_status(RunDir(job.path), "failed", 100, message="no node is left")
    with pytest.raises(OperationError, match="quick-001 is failed: no node is left"):
        job.result()


def test_a_waiting_run_is_cancelled(site: Path, queue: Queue) -> None:
    api.submit("run.toml").cancel()
    assert queue.cancelled == ["quick-001"]


def test_a_sweep_returns_its_jobs_and_the_same_call_queues_none_twice(site: Path, queue: Queue, cli: Cli) -> None:
    over = {"algorithm.eta": [0, 2], "planner.enabled": [False]}
    jobs = api.sweep("run.toml", over, {"run.steps": 9}, name="eta")
    names = ["quick-eta0.enabled_false-001", "quick-eta2.enabled_false-001"]
    assert [job.name for job in jobs] == [name for name, _ in queue.submitted] == names
    config = RunDir(jobs[1].path).resolved()
    assert (config["algorithm"]["eta"], config["planner"]["enabled"], config["run"]["steps"]) == (2, False, 9)
    assert {row["sweep"] for row in json.loads(cli("list", "--json").out)} == {"eta"}
    assert [job.path for job in api.sweep("run.toml", over, {"run.steps": 9}, name="eta")] == [job.path for job in jobs]
    assert len(queue.submitted) == 2
    with pytest.raises(UserError, match=r"With algorithm\.eta=-1"):
        api.sweep("run.toml", {"algorithm.eta": [0, -1]})


@pytest.mark.usefixtures("few_batches")
@pytest.mark.parametrize(("gpus", "words"), [(0, ()), (48, ("--gpus", "48"))])
def test_a_plan_is_what_the_verb_prints(gpus: int, words: tuple[str, ...], site: Path, queue: Queue, cli: Cli) -> None:
    options = {"planner.model": "qwen3-14b", "planner.device": "a800", "components.train.nodes": 2}
    overrides = [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
    printed = json.loads(cli("plan", "run.toml", *overrides, *words, "--best", "2", "--json").out)
    made = api.plan("run.toml", options, gpus=gpus, best=2)
    assert len(made["plans"]) == 2
    assert json.loads(json.dumps(made)) == printed | {"kept": True}


@pytest.mark.parametrize("verb", [api.check, api.submit])
def test_a_mistake_is_one_sentence_and_queues_nothing(verb: Callable[..., object], site: Path, queue: Queue) -> None:
    assert api.check("run.toml", ["run.steps=200"]) == []
    with pytest.raises(UserError, match=r"run\.steps = 0: "):
        verb("run.toml", {"run.steps": 0})
    assert queue.submitted == []
