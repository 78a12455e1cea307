"""submit, its ``--wait`` and check: what is queued and written, what a wait prints, and their exit codes."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from libra_hpc_cli import follow, jobs, submit

from libra_hpc.errors import OperationError, SlurmUnreachable
from libra_hpc.facts.rundir import RunDir
from libra_hpc.owner.claim import acquire
from libra_hpc.preflight import checked_run
from libra_hpc.preflight.task_trial import TaskTrial
from libra_hpc.slurm import local
from libra_hpc.slurm.queue.command import WAYS_OUT
from libra_hpc.slurm.queue.query import HetComponent, JobInfo, JobState
from libra_hpc.slurm.queue.run_state import SILENT_S, NoAnswer
from tests.facts import synthetic

from .conftest import Cli, Outcome, Queue, Sleep, one_line, write_status
from .mistake_rows import GPU_NODES


def test_submit_writes_the_run_directory_and_prints_id_and_folder(site: Path, queue: Queue, cli: Cli) -> None:
    outcome = cli("submit", "run.toml", "-o", "algorithm.eta=3")
    run = RunDir(site / "runs" / "quick-001")
    assert outcome == Outcome(0, f"Submitted 4711  run={run.path}\n", "")
    assert queue.submitted == [("quick-001", 1)]
    assert run.toml.read_bytes() == (site / "run.toml").read_bytes()
    config = run.read_json(run.config)
    assert config["algorithm"]["eta"] == 3
    # The job starts in another folder than the user.
    assert config["model"]["path"] == str(site / "model")
    assert config["run"]["dir"] == str(site / "runs")


def test_parsable_and_json_print_nothing_else(site: Path, queue: Queue, cli: Cli) -> None:
    assert cli("submit", "run.toml", "--parsable").out == "4711\n"
    printed = json.loads(cli("submit", "run.toml", "--json").out)
    found = [printed[key] for key in ("job_id", "run", "attempt", "executor")]
    assert found == ["4711", "quick-002", 1, "slurm"]


def test_a_refused_submission_leaves_nothing_behind(
    site: Path, queue: Queue, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> str:
        raise OperationError("Invalid account or account/partition combination specified.")

    monkeypatch.setattr(jobs, "queue", refuse)
    outcome = cli("submit", "run.toml")
    assert outcome == Outcome(1, "", "error: Invalid account or account/partition combination specified.\n")
    assert list((site / "runs").iterdir()) == []


@pytest.mark.parametrize("where", ["write_atomic", "keep_user_files", "queue"])
def test_a_full_disk_while_a_run_is_queued_is_one_sentence_and_leaves_nothing_behind(
    site: Path, queue: Queue, cli: Cli, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def full(*_: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device", "/runs/quick-001/files/my.py")

    module = jobs if where == "queue" else submit
    monkeypatch.setattr(module, where, full)
    line = one_line(cli("submit", "run.toml"))
    made = "no run directory can be made there" if where == "write_atomic" else "/runs/quick-001/files/my.py cannot be"
    assert f"{made} " in line
    assert "(No space left on device); valid: a writable folder" in line
    assert line.startswith(f"error: run.dir = '{site / 'runs'}': ")
    assert list((site / "runs").iterdir()) == []


def test_options_behind_two_dashes_are_sbatchs(site: Path, queue: Queue, cli: Cli) -> None:
    shown = cli("submit", "run.toml", "--executor", "slurm", "--dry-run", "--", "--exclusive", "--nice=10")
    assert shown.out.count("#SBATCH --exclusive\n#SBATCH --nice=10") == shown.out.count("#SBATCH --nodes=")
    refused = cli("submit", "run.toml", "other.toml")
    assert refused.code == 2
    assert "slurm.extra[0] = 'other.toml': not an sbatch option" in refused.err
    assert not (site / "runs").exists()


def test_a_dry_run_without_slurm_prints_what_a_run_starts(
    site: Path, queue: Queue, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(jobs, "queue", lambda launch, environment: local.start(launch))
    monkeypatch.setattr(os, "posix_spawn", lambda *given, **_: started.extend(given) or os.getpid())
    words = ("submit", "run.toml", "--executor", "local", "-o", 'compute.env={A = "it\'s $HOME"}')
    shown = shlex.split(cli(*words, "--dry-run").out.replace("quick-NNN", "quick-001"))
    assert cli(*words).code == 0
    _, argv, env = started
    assert shown == ["env", f"A=it's {env['HOME']}", "PYTHONUNBUFFERED=1", *argv]


def test_resume_keeps_folder_and_configuration_and_counts_attempts(site: Path, queue: Queue, cli: Cli) -> None:
    (site / "planned.jsonl").touch()
    cli("submit", "run.toml", "-o", "algorithm.eta=3", "-o", "task.work.trace=planned.jsonl")
    (site / "planned.jsonl").unlink()
    queue.answer = JobInfo("4711", JobState.FAILED)
    assert cli("submit", "--resume", "quick-001", "-o", "run.steps=200").code == 0
    assert queue.submitted == [("quick-001", 1), ("quick-001", 2)]
    config = json.loads((site / "runs" / "quick-001" / "config.json").read_text())
    assert (config["algorithm"]["eta"], config["run"]["steps"]) == (3, 200)


def test_a_run_that_an_owner_has_is_not_resumed(site: Path, queue: Queue, cli: Cli) -> None:
    cli("submit", "run.toml")
    queue.answer = JobInfo("4711", JobState.UNKNOWN)
    with acquire(site / "runs" / "quick-001" / "lease"):
        outcome = cli("submit", "--resume", "quick-001")
    assert outcome.code == 2
    assert outcome.err.startswith(f"error: --resume = 'quick-001': process {os.getpid()} on ")
    assert outcome.err.endswith("valid: a run that has ended.\n")
    assert queue.submitted == [("quick-001", 1)]
    assert cli("submit", "--resume", "quick-001").code == 0


def test_relative_paths_of_a_resumed_run_are_those_of_the_working_folder(
    submitted: RunDir, site: Path, queue: Queue, cli: Cli
) -> None:
    queue.answer = JobInfo("4711", JobState.FAILED)
    (site / "other").mkdir()
    for path in (site / "model").iterdir():
        (site / "other" / path.name).write_bytes(path.read_bytes())
    assert cli("submit", "--resume", "quick-001", "-o", "model.path=other").code == 0
    assert submitted.resolved()["model"]["path"] == str(site / "other")


@pytest.mark.parametrize("share", ["private", "all"])
def test_a_resume_changes_the_mode_of_a_run_only_where_it_is_asked_to(
    share: str, site: Path, queue: Queue, cli: Cli
) -> None:
    assert cli("submit", "run.toml", "-o", f"run.share={share}").code == 0
    queue.answer, path = JobInfo("4711", JobState.FAILED), site / "runs" / "quick-001"
    path.chmod(0o711)
    assert cli("submit", "--resume", "quick-001").code == 0
    assert path.stat().st_mode & 0o777 == 0o711, "what was not asked for stays"
    other = "private" if share == "all" else "all"
    assert cli("submit", "--resume", "quick-001", "-o", f"run.share={other}").code == 0
    assert path.stat().st_mode & 0o777 == (0o700 if share == "all" else 0o755)


def test_a_run_that_is_shared_later_can_still_be_written_by_its_owner_alone(
    submitted: RunDir, queue: Queue, cli: Cli
) -> None:
    queue.answer = JobInfo("4711", JobState.FAILED)
    submitted.logs(1).mkdir(parents=True)
    log = submitted.logs(1) / "agent-0.log"
    log.touch()
    for path in (submitted.logs(1), submitted.logs(1).parent, log, submitted.toml, submitted.config):
        path.chmod(0o777)
    assert cli("submit", "--resume", "quick-001", "-o", "run.share=group").code == 0
    assert [path for path in submitted.path.rglob("*") if path.stat().st_mode & 0o022] == []
    assert {path.stat().st_mode & 0o777 for path in (submitted.toml, submitted.config)} == {0o600}
    assert cli("submit", "--resume", "quick-001", "-o", "run.share=private").code == 0
    assert not submitted.shared_config.exists()


@pytest.mark.parametrize(("state", "code"), [("completed", 0), ("failed", 1), ("cancelled", 1), ("paused", 1)])
def test_wait_ends_with_the_summary_and_the_exit_code_of_the_run(
    state: str, code: int, site: Path, queue: Queue, cli: Cli, sleep: Sleep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "REFRESH_S", 0.0)
    states = iter(["starting", "running", state])
    ended = queue.answer = JobInfo("4711", JobState.FAILED if state == "paused" else JobState[state.upper()])

    def rank_0(*arguments: object) -> None:
        run = RunDir(site / "runs" / "quick-001")
        if (now := next(states)) == state:
            synthetic.write_metrics(run)
            run.write_json(run.result, {"state": state, "message": "node 3: no memory is left", "t": 1.0})
        write_status(run, now, message="node 3: no memory is left")

    def ask(run: RunDir) -> JobInfo:
        if not run.status.exists():
            rank_0()
            return JobInfo("4711", JobState.RUNNING)
        return ended

    monkeypatch.setattr(queue, "ask", ask)
    sleep(rank_0)
    outcome = cli("submit", "run.toml", "--wait")
    assert outcome.code == code
    assert bool(re.search("message +node 3: no memory is left", outcome.out)) == bool(code)
    assert "step 41/60  reward 0." in outcome.out
    assert outcome.out.count("planner: node 2 to train: training 1.42 s a batch") == 1
    assert max(map(len, outcome.out.splitlines()[1:])) <= 100
    assert f"quick-001 {state}" in outcome.out
    assert (site / "runs" / "quick-001" / "summary.svg").exists()
    logs = f"its logs are in {site}/runs/quick-001/logs/attempt-1 (`libra-hpc logs quick-001`)"
    assert (
        outcome.err
        == {
            "completed": "",
            "failed": f"error: the run failed: node 3: no memory is left; {logs}.\n",
            "cancelled": "error: the run was cancelled: node 3: no memory is left;"
            " `libra-hpc submit --resume quick-001` goes on.\n",
            "paused": "error: the run was paused: node 3: no memory is left.\n",
        }[state]
    )


def test_interrupting_wait_leaves_the_job_alone_and_prints_how_to_cancel(
    site: Path, queue: Queue, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(run: RunDir) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(follow, "follow", interrupt)
    outcome = cli("submit", "run.toml", "--wait")
    assert outcome.code == 130
    assert "job 4711 goes on" in outcome.err
    assert "libra-hpc cancel quick-001" in outcome.err
    assert queue.cancelled == []


def test_a_job_that_dies_before_its_first_snapshot_is_noticed(
    site: Path, queue: Queue, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("REFRESH_S", "FIRST_POLL_S", "LONGEST_POLL_S"):
        monkeypatch.setattr(follow, name, 0.0)
    failed = JobInfo("4711", JobState.FAILED, "NonZeroExitCode", exit_code=1)
    answers = iter([queue.answer, JobInfo("4711", JobState.RUNNING), failed])

    def ask(run: RunDir) -> JobInfo | NoAnswer:
        run.logs(1).mkdir(parents=True, exist_ok=True)
        (run.logs(1) / "agent-1.log").write_text("Traceback (most recent call last):\nImportError: no libmpi\n")
        return next(answers)

    monkeypatch.setattr(queue, "ask", ask)
    outcome = cli("submit", "run.toml", "--wait")
    assert outcome.code == 1
    lines = outcome.out.splitlines()
    assert lines[1:4] == [
        "job 4711 is pending (waiting for free nodes)",
        "job 4711 is starting (its agents are starting)",
        "job 4711 is failed (exit code 1; agent-1: ImportError: no libmpi)",
    ]
    why = "exit code 1; agent-1: ImportError: no libmpi"
    assert outcome.err.startswith(f"error: the run failed: {why}; its logs are in ")


def test_the_queue_is_asked_ever_less_often(
    submitted: RunDir, queue: Queue, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    asked: list[float] = []

    def ask(run: RunDir) -> JobInfo | NoAnswer:
        asked.append(now[0])
        return queue.answer

    monkeypatch.setattr(queue, "ask", ask)
    follower = follow.Follower(submitted, clock=lambda: now[0])
    while now[0] < 200:
        follower.refresh()
        now[0] += 1.0
    assert asked == [0.0, 2.0, 6.0, 14.0, 30.0, 60.0, 90.0, 120.0, 150.0, 180.0]


def test_a_requeued_run_is_waited_for_and_listed_as_such(submitted: RunDir, queue: Queue, cli: Cli) -> None:
    write_status(submitted, "cancelled", message="step 41 is saved")
    now = [float(submitted.read_json(submitted.status)["updated_at"])]
    follower = follow.Follower(submitted, clock=lambda: now[0])
    queue.answer = JobInfo("4711", JobState.RUNNING)
    assert (follower.refresh().state, follower.state.over) == ("running", False), "the job has not ended yet"
    now[0] += 5.0
    queue.answer = JobInfo("4711", JobState.PENDING, "Resources")
    assert follower.refresh().state == "requeued"
    assert follower.line() == "job 4711 is requeued (step 41 is saved; waiting for free nodes)"
    assert json.loads(cli("list", "--json").out)[0]["state"] == "requeued"
    assert json.loads(cli("status", "--json").out)["state"] == "requeued"
    now[0] += 5.0
    queue.answer = JobInfo("4711", JobState.CANCELLED)
    assert (follower.refresh().state, follower.state.over) == ("cancelled", True)


def test_until_done_goes_on_where_slurm_broke_the_job(
    site: Path, queue: Queue, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner died with the node of the planner, and the other components wait for ever."""
    parts = [HetComponent(0, "4711", JobState.PENDING, ""), HetComponent(1, "4712", JobState.FAILED, "")]
    broken = JobInfo("4711", JobState.PENDING, "Resources", components=tuple(parts))

    def ask(run: RunDir) -> JobInfo:
        if len(queue.submitted) == 1:
            write_status(run, age_s=SILENT_S + 1.0)
            return broken
        return JobInfo("4711", JobState.CANCELLED)

    monkeypatch.setattr(queue, "ask", ask)
    outcome = cli("submit", "run.toml", "--until-done", "--wait")
    assert queue.submitted == [("quick-001", 1), ("quick-001", 2)]
    assert queue.cancelled == ["quick-001"], "what was left of the first job"
    assert "Slurm has ended a part of its job" in outcome.err
    assert "job 4711 goes on" in outcome.err
    monkeypatch.setattr(queue, "submitted", [])
    assert "error: the run failed: Slurm has ended a part" in cli("submit", "run.toml", "--wait").err
    assert queue.submitted == [("quick-002", 1)], "without --until-done nothing follows"
    assert cli("cancel", "quick-002").out.startswith("quick-002: job 4711 cancelled; ")


def test_check_finds_the_same_mistakes_and_prints_what_it_found(
    site: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = "core: 1 node x 1 process, TP1 PP1, 1 replica; hybrid: 1 node x 1 process, 1 replica"
    engines = "engines run 256 of 384 turns, no step ahead; an update drops KV caches"
    outcome = cli("check", "run.toml")
    lines = outcome.out.splitlines()
    packed = "train.micro_tokens: 4,096, not 8,192, by the memory of the nodes"
    caches = "rollout.kv_cache_mb: 88, not 0, by the memory of the nodes"
    assert ([*lines[:4], lines[-1]], outcome.err) == ([layout, engines, packed, caches, "run.toml is good"], "")
    assert any(line.startswith(" rollout node") and " 2.1 " in line for line in lines), "of its mem"
    facts = json.loads(cli("check", "run.toml", "--json").out)
    expected = {"checked_against_slurm": True, "warnings": [], "expected_start": None, "split": None}
    expected |= {"layout": layout, "facts": [engines, packed, caches], "memory": facts["memory"]}
    assert facts == {"run_file": "run.toml", "good": True, **expected}
    outcome = cli("check", "run.toml", "-o", "components.train.partition=a80")
    assert "warning: components.train.partition = 'a80': no such partition" in outcome.err, "Slurm is the judge"
    monkeypatch.setattr(
        checked_run, "try_task", lambda config: nullcontext(lambda: TaskTrial([], ["chat: template ab"]))
    )
    assert cli("check", "run.toml").out.startswith(f"{layout}\n{engines}\nchat: template ab\n")
    synchronous = ("check", "run.toml", "-o", "algorithm.eta=0", "-o")
    assert "whole batches" not in cli(*synchronous, "algorithm.minibatches=1").out
    lines = cli(*synchronous, "algorithm.minibatches=2").out.splitlines()
    why = "training waits for whole batches: algorithm.minibatches = 2 has updates within a batch"
    assert why in lines


def test_without_slurm_the_way_out_is_one_that_can_work(
    site: Path, queue: Queue, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable() -> dict[str, str]:
        raise SlurmUnreachable(f"No Slurm controller answers; {WAYS_OUT}.")

    monkeypatch.undo()
    monkeypatch.chdir(site)
    monkeypatch.setattr(checked_run, "slurm_environment", unreachable)
    monkeypatch.setattr(checked_run, "try_task", lambda config: nullcontext(lambda: TaskTrial([], [])))
    small = cli("submit", "run.toml")
    assert (small.code, small.out) == (3, "")
    assert "`libra-hpc cluster up`, or run without Slurm with `--executor local`." in small.err
    monkeypatch.setattr(checked_run, "gpus_here", lambda: 0)
    large = cli("submit", "run.toml", *GPU_NODES, "-o", "components.train.mem=0")
    assert (large.code, large.out) == (3, "")
    assert large.err == (
        "error: No Slurm controller answers; submit where `sinfo` answers: the run needs 24 GPUs, and this machine has"
        " 0.\n"
    )
    assert not (site / "runs").exists()


@pytest.mark.cluster
def test_what_only_sbatch_knows_names_its_field_and_leaves_nothing(
    site: Path, slurm_env: dict[str, str], cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.chdir(site)
    refused = {
        "--exclusiv-nodes": "slurm.extra[1] = '--exclusiv-nodes': Slurm refuses it (unrecognized option",
        "--begin=yesterdays": "slurm.extra[1] = '--begin=yesterdays': Slurm refuses it (",
    }
    small = ["-o", "components.hybrid.nodes=0", "-o", "slurm.executor=slurm", "-o", "task.trial=false"]
    for option, sentence in refused.items():
        outcome = cli("submit", "run.toml", *small, "-o", f"slurm.extra=['--nice=1', '{option}']")
        assert sentence in one_line(outcome)
        assert not any((site / "runs").glob("*"))


def test_options_of_sbatch_may_follow_a_run_that_is_resumed(submitted: RunDir, queue: Queue, cli: Cli) -> None:
    queue.answer = JobInfo("4711", JobState.FAILED)
    assert cli("submit", "--resume", "quick-001", "--", "--exclude", "a800-3", "-Q").code == 0
    assert queue.submitted[-1] == ("quick-001", 2)
    assert submitted.read_json(submitted.config)["slurm"]["extra"] == ["--exclude", "a800-3", "-Q"]


@pytest.mark.parametrize("step", ["0", "20"])
def test_the_step_of_a_start_is_an_argument_of_the_agents_and_no_key_of_the_run(
    submitted: RunDir, queue: Queue, cli: Cli, step: str
) -> None:
    queue.answer = JobInfo("4711", JobState.FAILED)
    submitted.checkpoint(20).mkdir(parents=True)
    (submitted.checkpoint(20) / "state.json").write_text("{}")
    before, resume = submitted.config.read_text(), ("submit", "--resume", "quick-001")
    assert f"--attempt 2 --from-step {step}" in cli(*resume, "--from-step", step, "--dry-run").out
    assert "--from-step" not in cli(*resume, "--dry-run").out
    assert cli(*resume, "--from-step", step).code == 0
    assert submitted.config.read_text() == before
