"""`libra_hpc.api`: it does what the verbs do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from libra_hpc import api
from libra_hpc.errors import UserError
from libra_hpc.facts.rundir import RunDir
from libra_hpc.slurm.queue.query import JobInfo, JobState
from tests.facts import synthetic

from .conftest import Outcome, Queue, write_status

Cli = Callable[..., Outcome]


def test_a_run_is_queued_looked_at_and_resumed(site: Path, queue: Queue, cli: Cli) -> None:
    run = api.submit("run.toml", ["run.steps=200", "optimizer.lr=1e-6"], until_done=True)
    assert (run.name, queue.submitted) == ("quick-001", [("quick-001", 1)])
    config = run.resolved()
    assert (config["run"]["steps"], config["optimizer"]["lr"], config["slurm"]["requeues"]) == (200, 1e-6, 1000)
    for name in (run, run.path, "quick-001", "4711"):
        assert api.status(name) == json.loads(cli("status", "quick-001", "--json").out)
    assert (api.status(run)["state"], api.metrics(run)) == ("pending", [])
    with pytest.raises(UserError, match="--resume = 'quick-001': its job 4711 is pending; valid: a run"):
        api.submit(resume=run)
    queue.answer = JobInfo("4711", JobState.CANCELLED)
    assert api.submit(resume=run).path == run.path
    assert queue.submitted[1:] == [("quick-001", 2)]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("run.toml", ["run.steps=0"]), "run.steps = 0: "),
        ((None,), "submit needs either a run file or --resume RUN"),
        (("no.toml",), "no.toml"),
    ],
)
def test_a_mistake_is_one_sentence_and_queues_nothing(
    site: Path, queue: Queue, arguments: tuple[object, ...], why: str
) -> None:
    with pytest.raises(UserError, match=why):
        api.submit(*arguments)  # type: ignore[arg-type]
    assert queue.submitted == []


def test_metrics_are_the_lines_of_the_steps(tmp_path: Path) -> None:
    run = synthetic.make_run(tmp_path)
    found = api.metrics(run.path)
    assert [line["step"] for line in found] == list(range(1, len(found) + 1))
    assert {"reward", "step_s"} <= set(found[0])


def test_waiting_ends_with_the_run_or_the_time(site: Path, queue: Queue) -> None:
    run = RunDir(api.submit("run.toml").path)
    assert not api.wait(run, 0.0).over
    queue.answer = JobInfo("4711", JobState.COMPLETED)
    write_status(run, "completed", 100, message="step 100 is saved")
    state = api.wait(run)
    assert (state.state, state.reason, state.over) == ("completed", "step 100 is saved", True)


def test_a_waiting_run_is_cancelled(site: Path, queue: Queue) -> None:
    run = api.submit("run.toml")
    api.cancel(run)
    assert queue.cancelled == ["quick-001"]
