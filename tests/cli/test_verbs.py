"""The verbs on runs whose facts are known: what they print, what they write, and their exit codes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from libra_hpc_cli import app, follow, jobs, submit

from libra_hpc import compiled
from libra_hpc.errors import OperationError, SlurmUnreachable, UserError
from libra_hpc.facts.journal import LineLog
from libra_hpc.facts.rundir import RunDir
from libra_hpc.facts.status import FINAL, encode_status
from libra_hpc.files import write_atomic
from libra_hpc.preflight import checked_run
from libra_hpc.protocol.layout_order import decode_order
from libra_hpc.slurm.queue.query import JobInfo, JobState
from libra_hpc.slurm.queue.run_state import NoAnswer
from tests.facts import synthetic

from .conftest import Outcome, Queue

Cli = Callable[..., Outcome]


def write_status(run: RunDir, state: str, step: int = 41, age_s: float = 0.0, message: str = "") -> None:
    """A snapshot of ``age_s`` ago, and as rank 0 does before it, the result of a run that is over."""
    now = time.time() - age_s
    status = synthetic.make_status(run, state=state, step=step)
    if state in FINAL:
        run.write_json(run.result, {"state": state, "message": message, "attempt": 1, "t": now})
    times = {"updated_at": now, "started_at": now - 120.0}
    write_atomic(run.status, encode_status(msgspec.structs.replace(status, message=message, **times)))


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


def test_the_files_of_warm_start_and_policy_are_absolute_in_a_queued_run(site: Path, queue: Queue, cli: Cli) -> None:
    line = {"prompt_id": "a", "sample": 0, "prompt_tokens": 3, "turns": [{"new_tokens": 0, "gen_tokens": 5}]}
    (site / "old.jsonl").write_text(json.dumps(line) + "\n")
    shutil.copy(Path(__file__).parents[2] / "bench" / "policies" / "tp_sticky.py", site)
    named = ("-o", "rollout.warm_start=old.jsonl", "-o", "rollout.policy=tp_sticky.py:TpSticky")
    assert cli("submit", "run.toml", *named).code == 0
    run = RunDir(site / "runs" / "quick-001")
    rollout = run.read_json(run.config)["rollout"]
    assert rollout["warm_start"] == str(site / "old.jsonl")
    assert rollout["policy"] == f"{site}/tp_sticky.py:TpSticky"


def test_parsable_and_json_print_nothing_else(site: Path, queue: Queue, cli: Cli) -> None:
    assert cli("submit", "run.toml", "--parsable").out == "4711\n"
    printed = json.loads(cli("submit", "run.toml", "--json").out)
    assert (printed["job_id"], printed["run"], printed["attempt"], printed["executor"]) == (
        "4711",
        "quick-002",
        1,
        "slurm",
    )


def test_a_refused_submission_leaves_nothing_behind(
    site: Path, queue: Queue, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> str:
        raise OperationError("Invalid account or account/partition combination specified.")

    monkeypatch.setattr(jobs, "queue", refuse)
    outcome = cli("submit", "run.toml")
    assert outcome == Outcome(1, "", "error: Invalid account or account/partition combination specified.\n")
    assert list((site / "runs").iterdir()) == []


def test_no_slurm_is_exit_code_3(site: Path, queue: Queue, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable() -> None:
        raise SlurmUnreachable("No Slurm controller answers.")

    monkeypatch.setattr(checked_run, "slurm_environment", unreachable)
    outcome = cli("submit", "run.toml")
    assert (outcome.code, outcome.err) == (3, "error: No Slurm controller answers.\n")
    assert not (site / "runs").exists()


def test_resume_keeps_folder_and_configuration_and_counts_attempts(site: Path, queue: Queue, cli: Cli) -> None:
    cli("submit", "run.toml", "-o", "algorithm.eta=3")
    queue.answer = JobInfo("4711", JobState.RUNNING)
    outcome = cli("submit", "--resume", "quick-001")
    assert outcome.code == 2
    assert "its job 4711 is starting" in outcome.err
    queue.answer = JobInfo("4711", JobState.FAILED)
    assert cli("submit", "--resume", "quick-001", "-o", "run.steps=200").code == 0
    assert queue.submitted == [("quick-001", 1), ("quick-001", 2)]
    config = json.loads((site / "runs" / "quick-001" / "config.json").read_text())
    assert (config["algorithm"]["eta"], config["run"]["steps"]) == (3, 200)
    outcome = cli("submit", "--resume", "quick-001", "-o", "run.name=other")
    assert outcome.code == 2
    assert "keeps its run.name" in outcome.err


@pytest.mark.parametrize(("share", "mode"), [("", 0o700), ("group", 0o750), ("all", 0o755)])
@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_a_run_directory_is_private_unless_it_is_shared(
    share: str, mode: int, umask: int, site: Path, queue: Queue, cli: Cli
) -> None:
    before = os.umask(umask)
    try:
        assert cli("submit", "run.toml", *(("-o", f"run.share={share}") if share else ())).code == 0
    finally:
        os.umask(before)
    path = site / "runs" / "quick-001"
    assert path.stat().st_mode & 0o777 == mode
    queue.answer = JobInfo("4711", JobState.FAILED)
    path.chmod(0o711)
    assert cli("submit", "--resume", "quick-001").code == 0
    assert path.stat().st_mode & 0o777 == 0o711, "what was not asked for stays"
    assert cli("submit", "--resume", "quick-001", "-o", f"run.share={'private' if share else 'all'}").code == 0
    assert path.stat().st_mode & 0o777 == (0o700 if share else 0o755)


@pytest.mark.parametrize("content", ['{"run": {"na', "[]", "[" * 100_000])
def test_a_damaged_configuration_is_named_by_verbs_that_need_it(
    content: str, site: Path, queue: Queue, cli: Cli
) -> None:
    cli("submit", "run.toml")
    config = site / "runs" / "quick-001" / "config.json"
    config.write_text(content)
    queue.answer = JobInfo("4711", JobState.RUNNING)
    verbs = ("status", "status --json", "summary quick-001", "status runs/quick-001", "submit --resume quick-001")
    for verb in verbs:
        outcome = cli(*verb.split())
        assert (outcome.code, outcome.out) == (2, ""), verb
        assert outcome.err.startswith(f"error: {config}: the configuration of the run "), verb
    assert cli("cancel", "quick-001").code == 0, "a run must not go on because a file of it is damaged"
    assert queue.cancelled == ["quick-001"]


def test_a_folder_without_a_configuration_is_no_run(site: Path, queue: Queue, cli: Cli) -> None:
    (site / "runs" / "quick-001").mkdir(parents=True)
    assert "no run of that name" in cli("status", "quick-001").err
    with pytest.raises(UserError, match=r"quick-001 is not a run directory: it has no config\.json\.$"):
        RunDir(site / "runs" / "quick-001").resolved()


@pytest.mark.parametrize(("state", "code"), [("completed", 0), ("failed", 1), ("cancelled", 1)])
def test_wait_ends_with_the_summary_and_the_exit_code_of_the_run(
    state: str, code: int, site: Path, queue: Queue, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "REFRESH_S", 0.0)
    states = iter(["starting", "running", state])
    queue.answer = JobInfo("4711", JobState[state.upper()])

    def rank_0(*arguments: object) -> None:
        run = RunDir(site / "runs" / "quick-001")
        if (now := next(states)) == state:
            synthetic.write_metrics(run)
        write_status(run, now, message="node 3: no memory is left")

    def ask(run: RunDir) -> JobInfo:
        if not run.status.exists():
            rank_0()
            return JobInfo("4711", JobState.RUNNING)
        return JobInfo("4711", JobState[state.upper()])

    monkeypatch.setattr(queue, "ask", ask)
    monkeypatch.setattr(follow, "time", SimpleNamespace(sleep=rank_0, time=time.time, monotonic=time.monotonic))
    outcome = cli("submit", "run.toml", "--wait")
    assert outcome.code == code
    assert "step 41/60  reward 0." in outcome.out
    assert outcome.out.count("planner: node 2 to train: training 1.42 s a batch") == 1
    assert max(map(len, outcome.out.splitlines()[1:])) <= 100
    assert f"quick-001 {state}" in outcome.out
    assert (site / "runs" / "quick-001" / "summary.png").exists()
    logs = f"its logs are in {site}/runs/quick-001/logs/attempt-1 (`libra-hpc logs quick-001`)"
    assert outcome.err == {
        "completed": "",
        "failed": f"error: the run failed: node 3: no memory is left; {logs}.\n",
        "cancelled": "error: the run was cancelled: node 3: no memory is left;"
        " `libra-hpc submit --resume quick-001` goes on.\n",
    }.get(state)


def test_interrupting_wait_leaves_the_job_alone_and_prints_how_to_cancel(
    site: Path, queue: Queue, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(run: RunDir) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(submit, "follow", interrupt)
    outcome = cli("submit", "run.toml", "--wait")
    assert outcome.code == 130
    assert "job 4711 goes on" in outcome.err
    assert "libra-hpc cancel quick-001" in outcome.err
    assert queue.cancelled == []


def test_a_job_that_dies_before_its_first_snapshot_is_noticed(
    site: Path, queue: Queue, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "REFRESH_S", 0.0)
    monkeypatch.setattr(follow, "FIRST_POLL_S", 0.0)
    monkeypatch.setattr(follow, "LONGEST_POLL_S", 0.0)
    answers = iter(
        [
            queue.answer,
            JobInfo("4711", JobState.RUNNING),
            JobInfo("4711", JobState.FAILED, "NonZeroExitCode", exit_code=1),
        ]
    )

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
    assert outcome.err.startswith(
        "error: the run failed: exit code 1; agent-1: ImportError: no libmpi; its logs are in "
    )


def test_the_queue_is_asked_ever_less_often(
    site: Path, queue: Queue, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli("submit", "run.toml")
    now = [0.0]
    asked: list[float] = []

    def ask(run: RunDir) -> JobInfo | NoAnswer:
        asked.append(now[0])
        return queue.answer

    monkeypatch.setattr(queue, "ask", ask)
    follower = follow.Follower(RunDir(site / "runs" / "quick-001"), clock=lambda: now[0])
    while now[0] < 200:
        follower.refresh()
        now[0] += 1.0
    assert asked == [0.0, 2.0, 6.0, 14.0, 30.0, 60.0, 90.0, 120.0, 150.0, 180.0]


def test_status_shows_the_snapshot_or_why_the_job_waits(site: Path, queue: Queue, cli: Cli) -> None:
    cli("submit", "run.toml")
    assert "job 4711 is pending (waiting for free nodes)" in cli("status").out
    run = RunDir(site / "runs" / "quick-001")
    write_status(run, "running")
    queue.answer = JobInfo("4711", JobState.RUNNING)
    assert "41 / 60" in cli("status", "4711").out
    printed = json.loads(cli("status", "quick-001", "--json").out)
    assert (printed["run"], printed["state"], printed["status"]["step"]) == ("quick-001", "running", 41)


LAYOUT = (
    "train.tp=2",
    "rollout.tp=[1,2]",
    "components.train.nodes=2",
    "components.rollout.nodes=2",
    "components.hybrid.nodes=0",
)


@pytest.fixture
def running(site: Path, queue: Queue, cli: Cli) -> RunDir:
    """A run of three training, hybrid and rollout nodes that is under way."""
    cli("submit", "run.toml", "-o", "components.planner.partition=cpu", "-o", "components.rollout.nodes=2")
    run = RunDir(site / "runs" / "quick-001")
    write_status(run, "running")
    queue.answer = JobInfo("4711", JobState.RUNNING)
    return run


def test_an_order_for_another_layout_is_shown_and_left_for_rank_0(running: RunDir, cli: Cli) -> None:
    shown = cli("repartition", "quick-001", *LAYOUT, "--dry-run")
    assert shown.code == 0
    rows = [line.split() for line in shown.out.splitlines()[1:]]
    assert rows == [
        ["1", "train", "TP1", "train", "TP2"],
        ["2", "hybrid", "TP1", "or", "1xTP1", "train", "TP2"],
        ["3", "rollout", "1xTP1", "rollout", "1xTP1"],
        ["4", "rollout", "1xTP1", "rollout", "1xTP2"],
    ]
    assert not running.order.exists()
    printed = json.loads(cli("repartition", "quick-001", *LAYOUT, "--json").out)
    order = decode_order(running.order.read_bytes())
    assert (printed["order"], printed["step"]) == (order.id, None)
    assert printed["changes"] == order.values
    assert (order.attempt, order.values["rollout.tp"]) == (1, [1, 2])


@pytest.mark.parametrize(
    ("answer", "state", "code", "error"),
    [
        ({"kind": "repartitioned", "step": 41}, "running", 0, ""),
        (
            {"kind": "repartitioned", "step": 41},
            "failed",
            1,
            "error: the run ended (failed) in the new layout; `libra-hpc submit --resume quick-001 -o",
        ),
        ({"kind": "repartition_refused", "reason": "no."}, "running", 1, "error: the order was refused: no."),
        (None, "cancelled", 1, "error: the run ended (cancelled) and did not answer the order"),
    ],
)
def test_waiting_for_another_layout_ends_with_its_first_step_or_the_reason_against_it(
    answer: dict[str, object] | None,
    state: str,
    code: int,
    error: str,
    running: RunDir,
    queue: Queue,
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers = iter((1, 2))

    def rank_0(seconds: float) -> None:
        number = next(numbers)
        if number == 1 and answer is not None:
            LineLog(running.events).write({"t": 1.0, "order": decode_order(running.order.read_bytes()).id, **answer})
        write_status(running, state if number == 2 else "running", step=42 if number == 2 else 41)
        if state in FINAL and number == 2:
            queue.answer = JobInfo("4711", JobState[state.upper()])

    monkeypatch.setattr(follow, "time", SimpleNamespace(sleep=rank_0, time=time.time, monotonic=time.monotonic))
    outcome = cli("repartition", "quick-001", *LAYOUT, "--wait")
    assert outcome.code == code
    assert outcome.err.startswith(error)
    assert bool(outcome.err) == bool(error)
    assert ("step 42/60" in outcome.out) == (answer is None or "step" in answer)
    assert ("quick-001: repartitioned after step 41" in outcome.out) == (code == 0)


def test_status_of_a_run_that_was_never_queued(site: Path, queue: Queue, cli: Cli) -> None:
    run = RunDir.create(site / "runs", "quick")
    run.write_json(run.config, {})
    assert cli("status").out == f"quick-001: was never queued; files in {run.path}\n"


def test_a_snapshot_of_an_earlier_attempt_is_not_shown(site: Path, queue: Queue, cli: Cli) -> None:
    cli("submit", "run.toml")
    run = RunDir(site / "runs" / "quick-001")
    write_status(run, "failed")
    queue.answer = JobInfo("4711", JobState.FAILED)
    cli("submit", "--resume", "quick-001")
    queue.answer = JobInfo("4711", JobState.PENDING)
    assert json.loads(cli("status", "--json").out)["status"] is None


def test_a_requeued_run_is_waited_for_and_listed_as_such(site: Path, queue: Queue, cli: Cli) -> None:
    cli("submit", "run.toml")
    run = RunDir(site / "runs" / "quick-001")
    write_status(run, "cancelled", message="step 41 is saved")
    now = [float(run.read_json(run.status)["updated_at"])]
    follower = follow.Follower(run, clock=lambda: now[0])
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


def test_a_start_that_failed_is_listed_as_failed(site: Path, queue: Queue, cli: Cli) -> None:
    cli("submit", "run.toml")
    queue.answer = JobInfo("4711", JobState.FAILED, "NonZeroExitCode", exit_code=1)
    assert json.loads(cli("list", "--json").out)[0]["state"] == "failed"


def test_list_names_every_run(site: Path, queue: Queue, cli: Cli) -> None:
    assert "no runs" in cli("list").err
    synthetic.make_run(site / "runs")
    cli("submit", "run.toml")
    rows = json.loads(cli("list", "--json").out)
    assert {row["run"]: row["state"] for row in rows} == {"quick-001": "completed", "quick-002": "pending"}
    assert "quick-002" in cli("list").out


def test_summary_prints_facts_and_draws_the_picture(site: Path, queue: Queue, cli: Cli) -> None:
    run = synthetic.make_run(site / "runs")
    assert "3 steps, 500 tokens" in cli("summary", "quick-001").out
    printed = json.loads(cli("summary", "quick-001", "--json").out)
    assert printed["steps"] == 60
    assert printed["picture"] == str(run.summary_picture)


def test_cancel_is_idempotent(site: Path, queue: Queue, cli: Cli) -> None:
    cli("submit", "run.toml")
    assert "job 4711 cancelled" in cli("cancel").out
    queue.answer = JobInfo("4711", JobState.CANCELLED)
    outcome = cli("cancel", "quick-001")
    assert outcome.code == 0
    assert "is cancelled (before it started); nothing to cancel" in outcome.out
    assert queue.cancelled == ["quick-001"]
    assert json.loads(cli("cancel", "--json").out) == {
        "run": "quick-001",
        "job_id": "4711",
        "cancelled": False,
        "state": "cancelled",
        "message": "",
    }
    queue.answer = JobInfo("4711", JobState.RUNNING)
    assert json.loads(cli("cancel", "--json").out) == {
        "run": "quick-001",
        "job_id": "4711",
        "cancelled": True,
        "state": "cancelled",
        "message": "",
    }
    assert queue.cancelled == ["quick-001", "quick-001"]


def test_a_run_that_trains_is_asked_to_save_and_its_answer_is_shown(
    running: RunDir, queue: Queue, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answered(seconds: float) -> None:
        assert running.stop.exists()
        if running.result.exists():
            queue.answer = JobInfo("4711", JobState.CANCELLED)
        running.write_json(running.result, {"state": "cancelled", "message": "step 41 is saved", "t": time.time()})

    monkeypatch.setattr("libra_hpc_cli.cancel.time.sleep", answered)
    assert "job 4711 cancelled; step 41 is saved; " in cli("cancel", "quick-001").out
    assert queue.cancelled == []
    over = "only once the job is over, so that the run can be resumed at once"
    assert queue.answer == JobInfo("4711", JobState.CANCELLED), over


def test_a_run_that_does_not_answer_and_one_that_shall_not_be_asked_are_ended(
    running: RunDir, queue: Queue, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("libra_hpc_cli.cancel.PATIENCE_S", 0.0)
    assert "it has no checkpoint" in cli("cancel", "quick-001").out
    assert queue.cancelled == ["quick-001"]
    running.stop.unlink()
    cli("cancel", "quick-001", "--now")
    assert queue.cancelled == ["quick-001"] * 2
    assert not running.stop.exists()


def test_logs_select_by_rank_and_name_and_cut_to_the_tail(site: Path, queue: Queue, cli: Cli) -> None:
    run = synthetic.make_run(site / "runs")
    run.logs(1).mkdir(parents=True)
    for name in ("agent-2", "host2", "r3.0", "t2.0"):
        (run.logs(1) / f"{name}.log").write_text("".join(f"{name} line {i}\n" for i in range(30)))
    out = cli("logs", "--rank", "2", "--tail", "2").out
    assert [line for line in out.splitlines() if "line" in line] == [
        "agent-2 line 28",
        "agent-2 line 29",
        "t2.0 line 28",
        "t2.0 line 29",
    ]
    assert "host2 line 29" in cli("logs", "--process", "host").out
    outcome = cli("logs", "--process", "hots")
    assert outcome.code == 2
    assert "valid: agent-2, host2, r3.0, t2.0" in outcome.err
    assert "--rank = 7: no log file of such a node; valid: 2, 3." in cli("logs", "--rank", "7").err


def test_marks_between_processes_are_no_logs(site: Path, queue: Queue, cli: Cli) -> None:
    run = synthetic.make_run(site / "runs")
    run.logs(1).mkdir(parents=True)
    for name in ("agent-0.log", "slurm.out", "met"):
        (run.logs(1) / name).write_text("a line\n")
    assert [line.split("/")[-1] for line in cli("logs").out.splitlines() if line != "a line"] == [
        "agent-0.log <==",
        "slurm.out <==",
    ]


def test_following_logs_ends_with_the_run_and_misses_nothing(site: Path, queue: Queue, cli: Cli) -> None:
    run = synthetic.make_run(site / "runs")
    run.logs(1).mkdir(parents=True)
    (run.logs(1) / "agent-0.log").write_text("hello\n")
    outcome = cli("logs", "--follow")
    assert "hello" in outcome.out
    assert "quick-001: job 4711 is completed" in outcome.err


def test_the_console_script_prints_errors_without_a_traceback(site: Path) -> None:
    command = [sys.executable, "-m", "libra_hpc_cli.app", "submit", "run.toml", "-o", "algorithm.eta=-1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: algorithm.eta = -1: out of range; valid: an integer >= 0.\n"


VERBS = [
    *(
        "submit",
        "status",
        "logs",
        "cancel",
        "repartition",
        "list",
        "summary",
        "report",
        "check",
        "plan",
        "simulate",
        "make-policy",
    ),
    *("calibrate engine", "calibrate train"),
    *("config show", "config explain"),
    *(
        "cluster up",
        "cluster env",
        "cluster down",
        "cluster status",
        "trace inspect",
        "trace convert",
        "trace generate",
    ),
]


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_names_its_arguments_plainly(verb: str, cli: Cli) -> None:
    outcome = cli(*verb.split(), "--help")
    assert (outcome.code, outcome.err) == (0, "")
    assert f"Usage: libra-hpc {verb}" in outcome.out
    assert "[[" not in outcome.out
    assert "<int" not in outcome.out


def test_config_explain_prints_the_reference_as_text_and_as_json(cli: Cli) -> None:
    text = cli("config", "explain", "rollout.block_size").out
    assert "- `block_size`: an integer >= 8, in tokens; default `32`." in text
    printed = json.loads(cli("config", "explain", "--json").out)
    assert {"rollout.block_size", "components.hybrid.nodes"} <= {record["key"] for record in printed}
    assert cli("config", "explain", "rollout.block").code == 2


def test_the_version_is_that_of_the_package(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiled.INTERPRETED, "1")
    assert cli("--version") == Outcome(0, f"libra-hpc {metadata.version('libra-hpc')} (scheduler interpreted)\n", "")


def test_login_node_verbs_never_import_an_engine() -> None:
    code = (
        "import sys, libra_hpc_cli.app; print(sorted({'torch', 'vllm', 'mpi4py', 'megatron', 'transformers',"
        " 'matplotlib'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_run_that_never_wrote_a_status_ends_logs_when_its_job_has(
    site: Path, queue: Queue, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli("submit", "run.toml")
    logs = RunDir(site / "runs" / "quick-001").logs(1)
    logs.mkdir(parents=True)
    (logs / "slurm.out").write_text("No module named 'mpi4py'\n")
    queue.answer = JobInfo("4711", JobState.FAILED, "NonZeroExitCode", exit_code=1)
    outcome = cli("logs", "quick-001", "--follow")
    assert "No module named 'mpi4py'" in outcome.out
    assert "quick-001: job 4711 is failed" in outcome.err


def test_watching_a_run_that_failed_exits_with_1(running: RunDir, cli: Cli) -> None:
    write_status(running, "failed")
    assert cli("status", "quick-001", "--watch").code == 1
    write_status(running, "completed")
    assert cli("status", "quick-001", "--watch").code == 0


def test_a_complete_run_is_resumed_only_for_more_steps(running: RunDir, queue: Queue, cli: Cli) -> None:
    folder = running.checkpoints / "step-000100"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text("{}")
    running.write_json(running.result, {"state": "completed", "message": "step 100 is saved"})
    queue.answer = JobInfo("4711", JobState.COMPLETED)
    refused = cli("submit", "--resume", "quick-001")
    assert refused.code == 2
    assert "run.steps = 100: the run is complete at step 100; valid: a larger number" in refused.err
    assert cli("submit", "--resume", "quick-001", "-o", "run.steps=120").code == 0


def test_a_run_without_steps_gets_no_picture(site: Path, queue: Queue, cli: Cli) -> None:
    cli("submit", "run.toml")
    assert cli("summary", "quick-001").code == 0
    assert not RunDir(site / "runs" / "quick-001").summary_picture.exists()


def test_a_terminal_without_unicode_is_no_traceback(running: RunDir) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "libra_hpc_cli.app", "status", str(running.path)],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "step" in done.stdout


@pytest.mark.parametrize("verb", app.VERBS)
def test_the_help_lists_every_verb_and_each_has_its_own(verb: str, cli: Cli) -> None:
    assert f" {verb} " in cli("--help").out
    own = cli(verb, "--help")
    assert own.code == 0
    assert f"libra-hpc {verb} " in own.out


def test_the_help_imports_no_verb() -> None:
    code = (
        "import sys; from libra_hpc_cli import app; app.run(['--help'])\n"
        "print(sorted({'pydantic', 'submitit', 'jinja2', 'numpy', 'libra_hpc.config'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_relative_paths_of_a_resumed_run_are_those_of_the_working_folder(site: Path, queue: Queue, cli: Cli) -> None:
    cli("submit", "run.toml")
    queue.answer = JobInfo("4711", JobState.FAILED)
    (site / "other").mkdir()
    for path in (site / "model").iterdir():
        (site / "other" / path.name).write_bytes(path.read_bytes())
    assert cli("submit", "--resume", "quick-001", "-o", "model.path=other").code == 0
    assert RunDir(site / "runs" / "quick-001").resolved()["model"]["path"] == str(site / "other")


def test_options_behind_two_dashes_are_sbatchs(site: Path, queue: Queue, cli: Cli) -> None:
    shown = cli("submit", "run.toml", "--executor", "slurm", "--dry-run", "--", "--exclusive", "--nice=10")
    assert shown.out.count("#SBATCH --exclusive\n#SBATCH --nice=10") == 4
    refused = cli("submit", "run.toml", "other.toml")
    assert refused.code == 2
    assert "slurm.extra[0] = 'other.toml': not an sbatch option" in refused.err
    assert not (site / "runs").exists()


def test_a_run_that_cannot_be_asked_to_save_is_ended_all_the_same(
    running: RunDir, queue: Queue, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("libra_hpc_cli.cancel.write_atomic", full)
    outcome = cli("cancel", "quick-001")
    assert outcome.code == 0
    assert "cannot be asked to save" in outcome.err
    assert "No space left on device" in outcome.err
    assert queue.cancelled == ["quick-001"]


def test_a_queue_that_does_not_answer_is_said(
    site: Path, queue: Queue, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable() -> dict[str, str]:
        raise SlurmUnreachable("No Slurm controller answers.")

    monkeypatch.undo()
    monkeypatch.setattr(jobs, "slurm_environment", unreachable)
    run = RunDir.create(site / "runs", "quick")
    run.write_json(run.job, {"job_id": "4711", "executor": "slurm", "attempt": 1, "submitted_at": 1.0})
    assert jobs.states([run])[str(run.path)].reason == "No Slurm controller answers"
    assert "as their folders have them: No Slurm controller answers." in capsys.readouterr().err
