"""The state of a run in the verbs: which questions the queue gets, and what a follower makes of the answers."""

from __future__ import annotations

import json
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from libra_hpc_cli import jobs
from libra_hpc_cli.follow import LONGEST_POLL_S, LOST_S, Follower

from libra_hpc.errors import SlurmUnreachable
from libra_hpc.facts import status
from libra_hpc.facts.rundir import RunDir
from libra_hpc.facts.sweep_record import SweepMember, write_member
from libra_hpc.slurm.queue import query
from libra_hpc.slurm.queue.query import JobInfo, JobState
from libra_hpc.slurm.queue.run_state import SILENT_S, NoAnswer

from .conftest import Cli, Queue, one_line, write_status


def make_run(parent: Path, job_id: str = "4711") -> RunDir:
    run = RunDir.create(parent, "quick")
    run.write_json(run.config, {})
    facts = {"job_id": job_id, "executor": "slurm", "attempt": 1, "submitted_at": 1.0, "cluster": "libra"}
    run.write_json(run.job, facts)
    return run


class Calls:
    """Stands for Slurm's commands: counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[str] = []
        self.known: dict[str, JobInfo] = {}
        monkeypatch.setattr(jobs, "slurm_environment", lambda: self.made.append("ping") or {})
        monkeypatch.setattr(
            query, "own_jobs", lambda env, cluster: self.made.append(f"squeue{cluster}") or dict(self.known)
        )
        monkeypatch.setattr(query, "accounts", self.accounts)

    def accounts(self, env: object, ids: list[str], cluster: str) -> dict[str, JobInfo]:
        self.made.append(f"sacct {','.join(ids)}")
        return {job_id: JobInfo(job_id, JobState.TIMEOUT) for job_id in ids}


def test_a_list_of_many_runs_is_one_question_to_the_queue_and_one_to_the_accounting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch)
    runs = [make_run(tmp_path, str(number)) for number in range(1, 6)]
    runs[4].write_json(runs[4].result, {"state": "completed", "message": "", "attempt": 1, "t": 2.0})
    calls.known = {
        "1": JobInfo("1", JobState.RUNNING, script=f"{runs[0].path}/job.sbatch"),
        "2": JobInfo("2", JobState.RUNNING, script="/elsewhere/other-001/job.sbatch"),
    }
    states = [state.state for state in jobs.states(runs).values()]
    assert states == ["starting", "unknown", "time_limit", "time_limit", "completed"]
    assert calls.made == ["ping", "squeue", "sacct 3,4"]
    calls.made.clear()
    assert jobs.states([runs[4]])[str(runs[4].path)].over
    assert calls.made == [], "a run that is complete needs no queue"


def test_a_follower_finds_slurm_once_and_asks_one_question_a_poll(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch)
    monkeypatch.setattr("libra_hpc.slurm.submit.job", lambda env, job_id, cluster: JobInfo(job_id, JobState.PENDING))
    now = [100.0]
    follower = Follower(make_run(tmp_path), clock=lambda: now[0])
    for _ in range(5):
        follower.refresh()
        now[0] += LONGEST_POLL_S
    assert calls.made == ["ping"]


def test_unknown_is_not_failed_and_ends_a_wait_only_where_slurm_answers(site: Path, queue: Queue) -> None:
    now = [1000.0]
    follower = Follower(make_run(site / "runs"), clock=lambda: now[0])
    queue.answer = NoAnswer("No Slurm controller answers")
    for _ in range(20):
        found = follower.refresh()
        now[0] += LONGEST_POLL_S
        assert (found.state, found.over, found.reason) == ("unknown", False, "No Slurm controller answers")
    queue.answer = JobInfo("4711", JobState.UNKNOWN)
    asked = now[0]
    while not (found := follower.refresh()).over:
        now[0] += 1.0
    assert (found.state, now[0] - asked) == ("unknown", LOST_S)


def test_an_answer_is_forgotten_once_the_run_has_written_something_newer(site: Path, queue: Queue) -> None:
    run, now = make_run(site / "runs"), [1000.0]
    follower = Follower(run, clock=lambda: now[0])
    queue.answer = JobInfo("4711", JobState.PENDING, "Resources")
    assert follower.refresh().state == "pending"
    now[0] += 1.0
    write_status(run, at=now[0])
    assert follower.refresh().state == "running"
    run.write_json(run.result, {"state": "completed", "message": "step 60 is saved", "attempt": 1, "t": now[0] + 0.5})
    assert (follower.refresh().state, follower.state.over) == ("completed", True)


def test_a_stop_is_over_only_once_the_queue_has_answered_after_it(site: Path, queue: Queue) -> None:
    run, now = make_run(site / "runs"), [1000.0]
    follower = Follower(run, clock=lambda: now[0])
    write_status(run, at=now[0])
    queue.answer = JobInfo("4711", JobState.PENDING, "BeginTime")
    assert follower.refresh().state == "running"
    now[0] += 1.0
    run.write_json(run.result, {"state": "time_limit", "message": "step 41 is saved", "attempt": 1, "t": now[0]})
    assert (follower.refresh().state, follower.state.over) == ("requeued", False)


def test_a_silent_run_is_not_asked_to_save_and_one_that_falls_silent_is_ended(
    site: Path, queue: Queue, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(site / "runs")
    queue.answer = JobInfo("4711", JobState.RUNNING)
    write_status(run, age_s=SILENT_S + 5.0)
    outcome = cli("cancel", "quick-001")
    assert "job 4711 is not asked to save: no status for 1:05" in outcome.err
    assert (queue.cancelled, run.stop.exists()) == (["quick-001"], False)
    write_status(run)
    monkeypatch.setattr("libra_hpc_cli.cancel.ASK_S", 0.0)
    monkeypatch.setattr("libra_hpc_cli.cancel.POLL_S", 0.0)
    monkeypatch.setattr("libra_hpc_cli.cancel.print_note", lambda text: write_status(run, at=1.0))
    assert "job 4711 cancelled" in cli("cancel", "quick-001").out
    assert (queue.cancelled, run.stop.exists()) == (["quick-001"] * 2, True)


def test_a_run_that_is_queued_again_while_it_stops_is_cancelled_all_the_same(
    site: Path, queue: Queue, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(site / "runs")
    queue.answer = JobInfo("4711", JobState.RUNNING)
    write_status(run)

    def rank_0(text: str) -> None:
        run.write_json(run.result, {"state": "cancelled", "message": "saved", "attempt": 1, "t": time.time()})
        queue.answer = JobInfo("4711", JobState.PENDING, "BeginTime")

    monkeypatch.setattr("libra_hpc_cli.cancel.print_note", rank_0)
    assert "job 4711 cancelled; saved" in cli("cancel").out
    assert queue.cancelled == ["quick-001"]


def test_a_sweep_is_cancelled_from_its_last_waiting_run_on_and_its_running_ones_save_together(
    site: Path, queue: Queue, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"quick-{number:03d}" for number in range(1, 7)]
    runs = [make_run(site / "runs", str(number)) for number in range(1, 7)]
    for run in runs[:5]:
        write_member(run, SweepMember("eta", {}))
    waits, trains = JobInfo("1", JobState.PENDING, "Dependency"), JobInfo("1", JobState.RUNNING)
    for run in runs[:2]:
        write_status(run)
    runs[2].write_json(runs[2].result, {"state": "completed", "message": "", "attempt": 1, "t": 2.0})
    answers = dict(zip(names, (trains, trains, NoAnswer(), waits, waits, waits), strict=True))
    monkeypatch.setattr(queue, "ask", lambda run: answers[run.name])
    stops: list[list[bool]] = []

    def rank_0(run: RunDir, *_: object) -> str:
        stops.append([one.stop.exists() for one in runs])
        answers[run.name] = JobInfo("1", JobState.CANCELLED)
        return "saved"

    monkeypatch.setattr("libra_hpc_cli.cancel.answer", rank_0)
    outcome = cli("cancel", "--sweep", "eta")
    assert queue.cancelled == ["quick-005", "quick-004"]
    assert stops == [[True, True, False, False, False, False]] * 2
    lines = outcome.out.splitlines()
    assert [line.split(":")[0] for line in lines] == [names[place] for place in (4, 3, 2, 0, 1)]
    assert "job 2 cancelled; saved" in lines[-1]
    assert "nothing to cancel" in lines[2]
    printed = json.loads(cli("cancel", "--sweep", "eta", "--json").out)
    assert (printed["sweep"], len(printed["runs"])) == ("eta", 5)
    monkeypatch.setattr("libra_hpc_cli.cancel.is_own", lambda run: run.name > "quick-002")
    outcome = cli("cancel", "--sweep", "eta")
    assert "left alone: 2 of 5 runs, which are other users'" in outcome.err
    assert len(outcome.out.splitlines()) == 3
    assert "--sweep = 'et': no sweep of that name has runs below runs/; valid: eta" in one_line(
        cli("cancel", "--sweep", "et")
    )
    assert "either a run or --sweep NAME" in one_line(cli("cancel", "quick-001", "--sweep", "eta"))


def test_nothing_is_cancelled_where_slurm_has_no_record_of_the_job(
    site: Path, queue: Queue, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(site / "runs")
    queue.answer = JobInfo("4711", JobState.UNKNOWN)
    monkeypatch.setattr(jobs, "cancel", lambda run: False)
    assert cli("cancel").out == "quick-001: job 4711 is unknown (Slurm has no record of its job); nothing to cancel\n"


def test_a_job_id_finds_its_run_in_another_folder(
    site: Path, queue: Queue, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(site / "elsewhere")
    monkeypatch.setattr(jobs, "run_folder", lambda job_id: run.path if job_id == "4711" else None)
    assert json.loads(cli("status", "4711", "--json").out)["path"] == str(run.path)
    assert "no run of that name, folder or job id below runs/" in cli("status", "4712").err


def test_a_run_is_found_by_a_job_id_without_a_slurm_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable() -> dict[str, str]:
        raise SlurmUnreachable("No Slurm controller answers.")

    monkeypatch.setattr(jobs, "slurm_environment", unreachable)
    assert jobs.run_folder("4711") is None
    assert jobs.run_folder("local-17") is None


def test_json_has_the_state_its_reason_and_the_cluster(site: Path, queue: Queue, cli: Cli) -> None:
    run = make_run(site / "runs")
    run.write_json(run.result, {"state": "time_limit", "message": "step 41 is saved", "attempt": 1, "t": 2.0})
    queue.answer = JobInfo("4711", JobState.FAILED)
    for printed in (json.loads(cli("status", "--json").out), json.loads(cli("list", "--json").out)[0]):
        facts = [printed[key] for key in ("job_id", "cluster", "state", "reason", "since", "over")]
        assert facts == ["4711", "libra", "time_limit", "step 41 is saved", 2.0, True]
    assert "quick-001: job 4711 on libra is stopped by its time limit (step 41 is saved)" in cli("status").out


def test_the_line_of_a_run_that_is_over_has_no_present_speeds(site: Path, queue: Queue) -> None:
    run = make_run(site / "runs")
    write_status(run, "running", step=41)
    queue.answer = JobInfo("4711", JobState.RUNNING, start_time=1.0)
    follower = Follower(run)
    follower.refresh()
    assert follower.line().endswith("train 912 generated/s, rollout 2,346  nodes 1+2")
    write_status(run, "completed", step=60)
    follower.refresh()
    assert "completed  step 60/60  " in follower.line()
    assert "generated/s" not in follower.line()


@pytest.mark.parametrize("hours", [-5.0, 5.0])
def test_a_run_whose_machine_has_another_time_lives_while_its_status_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: float
) -> None:
    run, now, looks = make_run(tmp_path), time.time(), list[float]()
    there = now + 3600.0 * hours
    write_status(run, at=there)

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        write_status(run, at=there + seconds)

    monkeypatch.setattr(jobs.time, "sleep", sleep)
    running = JobInfo("4711", JobState.RUNNING)
    assert [jobs.judge(run, running, now + later).state for later in (0.0, 1.0, 2.0)] == 3 * ["running"]
    assert looks == [jobs.LOOK_S], "the difference of the clocks is known"
    monkeypatch.setattr(jobs.time, "sleep", looks.append)
    found = jobs.judge(run, running, now + 2.0 * SILENT_S)
    assert (found.state, found.reason) == ("silent", "no status for 2:00")
    assert jobs.judge(run, NoAnswer(), now).state == "running", "without Slurm too"


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (
            OSError(122, "Disk quota exceeded"),
            "its status is 25 s old, because RUN takes no writes: Disk quota exceeded",
        ),
        (PermissionError(13, "Permission denied"), ""),
        (None, ""),
    ],
)
def test_a_status_that_cannot_be_written_has_its_age_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: OSError | None, told: str
) -> None:
    run, now = make_run(tmp_path), time.time()
    write_status(run, at=now - 25.0)
    if fault is not None:
        monkeypatch.setattr(status, "write_atomic", Mock(side_effect=fault))
    found = jobs.judge(run, JobInfo("4711", JobState.RUNNING), now)
    assert (found.state, found.reason) == ("running", told.replace("RUN", str(run.path)))
    assert not [path for path in run.path.iterdir() if "probe" in path.name]


def test_a_dead_run_whose_clock_was_ahead_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, now, looks = make_run(tmp_path), time.time(), list[float]()
    monkeypatch.setattr(jobs.time, "sleep", looks.append)
    write_status(run, at=now + 3600.0)
    found = [jobs.judge(run, JobInfo("4711", JobState.RUNNING), now + later).state for later in (0.0, 2.0)]
    assert (found, looks) == (["silent"] * 2, [jobs.LOOK_S])
    follower = Follower(run, clock=lambda: now)
    follower.refresh()
    assert follower.state.state == "unknown"
