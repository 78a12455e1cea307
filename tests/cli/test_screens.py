"""Every screen in a terminal of 80 columns, where no cell is cut, and in one that knows ASCII alone."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import termios
import time
from pathlib import Path

import msgspec
import pytest
from libra_hpc_cli import app, output, plan_tables
from rich.console import Console

from libra_hpc.annexes.lend import lender_record as records
from libra_hpc.annexes.lend.lender_record import LendTerms
from libra_hpc.facts.rundir import RunDir
from libra_hpc.facts.status import NodeStatus, encode_status
from libra_hpc.facts.view import status_screen
from libra_hpc.files import write_atomic
from libra_hpc.models.shapes import model_shape
from libra_hpc.slurm.queue.query import JobInfo, JobState
from tests.facts import synthetic
from tests.slurm.test_examples import EXAMPLES, model_folder

from .conftest import Cli, Queue, Sleep, write_status

pytestmark = pytest.mark.usefixtures("few_batches")

COLUMNS = 80
SCREENS = [
    "check run.toml",
    "plan RUN.toml --explain",
    "plan RUN.toml --gpus 16..32",
    "trace inspect t.jsonl",
    "simulate t.jsonl",
    "doctor",
    "config show RUN.toml --toml",
    "config explain components",
]


@pytest.fixture
def words(site: Path, queue: Queue, cli: Cli, screen: str) -> list[str]:
    """The words of a screen's command line, with the files that it needs."""
    model = model_folder(site / "policy", model_shape("qwen3-14b"))
    (site / "RUN.toml").write_text((EXAMPLES / "a800-48-qwen3-14b.toml").read_text())
    run = synthetic.make_run(site / "runs")
    write_atomic(run.status, encode_status(synthetic.make_status(run)))
    found = screen.split()
    if "RUN.toml" in found:
        found += ["-o", f"model.path={model}", "-o", "slurm.time_limit=12:00:00"]
    if "t.jsonl" in found:
        cli("trace", "generate", "t.jsonl", "--trajectories", "64")
    return found


@pytest.mark.parametrize("screen", SCREENS)
def test_a_screen_is_whole_in_80_columns(
    words: list[str], site: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (output, plan_tables):
        monkeypatch.setattr(module, "WIDTH", COLUMNS)
    outcome = cli(*words)
    assert outcome.code in (0, 1), outcome.err
    assert "…" not in outcome.out
    # A sentence has no cells: the terminal folds it. The folder of a test is longer than a user's.
    lines = outcome.out.replace(str(site), "/site").splitlines()
    assert all(len(line) <= COLUMNS or ": " in line for line in lines)


HOSTILE = "\x1b[2J\x1b]0;title\x07\x9b31mred\u202e\rover\x00\b"
"""Would clear the screen, rename the window, colour and reorder the text, and write over it."""


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\nc é 日 €", "a\tb\nc é 日 €"),
        (HOSTILE, "redover"),
        ("\x1b[1;31mfailed\x1b[0m", "failed"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1bP1$tx\x9cafter", "after"),
        ("open \x1b]0;to the end of its line\nnext", "open \nnext"),
        ("\x1b(0 \x1b", " "),
        ("a\u2066b\u2069\u200f", "ab"),
    ],
)
def test_commands_to_the_terminal_are_left_out(text: str, shown: str) -> None:
    assert output.plain(text) == shown


@pytest.mark.parametrize("screen", ["status quick-001", "status quick-001 --json", "logs quick-001"])
def test_what_a_run_wrote_commands_no_terminal(words: list[str], site: Path, cli: Cli, queue: Queue) -> None:
    run = RunDir(site / "runs" / "quick-001")
    log = run.logs(1) / "r2.0.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(f"{HOSTILE}\n")
    status = msgspec.structs.replace(synthetic.make_status(run), message=HOSTILE, notices=(HOSTILE,))
    write_atomic(run.status, encode_status(status))
    run.write_json(run.result, {"state": "failed", "message": HOSTILE, "step": 1, "attempt": 1, "t": 1.0})
    outcome = cli(*words)
    assert outcome.code == 0
    assert "red" in outcome.out
    assert not re.search(r"[^\n\t -~\u00a1-\u1fff\u2010-\u2027\u2100-\uffff]", outcome.out + outcome.err)
    mistake = cli("status", f"no-{HOSTILE}")
    assert not re.search(r"[^\n -~]", mistake.err)


def test_markup_in_the_name_of_a_host_is_text(site: Path, cli: Cli, queue: Queue) -> None:
    run = synthetic.make_run(site / "runs")
    run.result.unlink()
    status = synthetic.make_status(run)
    nodes = [msgspec.structs.replace(node, host="[red]n1[/]") for node in status.nodes]
    write_atomic(run.status, encode_status(msgspec.structs.replace(status, nodes=nodes)))
    assert "[red]n1[/]" in cli("status", "quick-001").out


@pytest.mark.parametrize("screen", [*SCREENS, "list", "status quick-001", "submit run.toml --dry-run"])
def test_a_terminal_that_knows_ascii_alone_gets_every_screen(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "argv", ["libra-hpc", *words])
    with pytest.raises(SystemExit) as ended:
        app.main()
    assert ended.value.code in (0, 1)
    assert stream.tell() > 0


THREE = ["planner", "train", "rollout"]
SIX = ["planner", "train", "to_train", "to_rollout", "rollout", "lost"]


def test_the_lenders_of_a_running_run_are_whole_in_80_columns(tmp_path: Path) -> None:
    status, out = synthetic.make_status(synthetic.make_run(tmp_path)), io.StringIO()
    Console(file=out, width=COLUMNS).print(status_screen(status, now=status.updated_at))
    found = " ".join(re.sub("[│ ]+", " ", out.getvalue()).split())
    assert "gpu-017-vllm-4711 lender 62% 58% 1,204 310k users 3 min (now), silent server 12 s" in found
    assert "t-104 spot gone 90% 2,412 910k -" in found


def test_what_servers_offer_cost_and_gave_is_whole_in_80_columns(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(records.VARIABLE, str(tmp_path))
    monkeypatch.setattr(output, "WIDTH", COLUMNS)
    status = synthetic.make_status(run := synthetic.make_run(tmp_path / "runs"))
    decision = msgspec.structs.replace(status.decision, lenders={"gpu-1": (1340.2, 170.0)})
    write_atomic(run.status, encode_status(msgspec.structs.replace(status, decision=decision)))
    gave = records.LenderRecord("gpu-1", "gpu", "b", 1, 1, "4711", LendTerms(0.5), "lends", lent_s=5300.0, alone_ms=99)
    gave = msgspec.structs.replace(gave, tokens=310_400, beside_ms=157.4, revoked=3, offers=(str(run.path), "/gone"))
    for one in (gave, msgspec.structs.replace(gave, name="l", state="paused", why="revoked", offers=())):
        records.write_record(tmp_path, one)
    lines = cli("lend", "list").out.splitlines()
    found = " ".join(" ".join(lines).split())
    assert max(map(len, lines)) <= COLUMNS
    assert "gpu-1 lends quick-00 1,340 s 170 s 1:28:20 310k 3 99 → 157 1 - - gone" in found
    first = json.loads(cli("lend", "list", "--json").out)[0]
    assert first["offers"][0] == {"run": str(run.path), "saves_s": 1340.2, "price_s": 170.0}


@pytest.mark.parametrize(("speedup", "decided"), [(1.0, "2 s"), (60.0, "2:00")])
def test_the_times_of_a_dry_run_are_simulated_ones(tmp_path: Path, speedup: float, decided: str) -> None:
    made = synthetic.make_status(synthetic.make_run(tmp_path))
    assert made.decision is not None
    decision = msgspec.structs.replace(made.decision, at=made.updated_at - 2.0)
    status, out = msgspec.structs.replace(made, speedup=speedup, decision=decision), io.StringIO()
    Console(file=out, width=120).print(status_screen(status, now=status.updated_at))
    assert re.search(rf"planner .* {decided} ago ", out.getvalue())


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("roles", [THREE, SIX, ["planner", *["rollout", "train"] * 30]])
def test_a_watched_run_fits_a_terminal_of_80x24(
    site: Path, queue: Queue, sleep: Sleep, roles: list[str], encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = synthetic.make_run(site / "runs")
    run.result.unlink()
    run.write_json(run.job, {"job_id": "4711", "executor": "slurm", "attempt": 1, "submitted_at": 1.0})
    queue.answer = JobInfo("4711", JobState.RUNNING, start_time=1.0)
    ready = {f"v.{number}": "ready" for number in range(8)}
    nodes = [
        NodeStatus(n, f"a800-{n:02d}", "hybrid", role, ready if n else {}, 41, 0.1) for n, role in enumerate(roles)
    ]
    changed = {"nodes": nodes, "updated_at": time.time(), "message": "starting engines"}
    status = msgspec.structs.replace(synthetic.make_status(run), **changed)
    write_atomic(run.status, encode_status(status))
    sleep(lambda seconds: write_status(run, "completed"))
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    monkeypatch.setattr(sys, "argv", ["libra-hpc", "status", "quick-001", "--watch"])
    for name, value in {"TERM": "xterm", "LINES": "24", "COLUMNS": "80"}.items():
        monkeypatch.setenv(name, value)
    with open(theirs, "w", encoding=encoding) as stream, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", stream)
        with pytest.raises(SystemExit):
            app.main()
    written = b""
    with open(ours, "rb", buffering=0) as terminal, contextlib.suppress(OSError):
        while found := terminal.read(1 << 16):
            written += found
    # Before the cursor goes up to write over it.
    first = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", written.decode(encoding).split("\x1b[1A")[0]).splitlines()
    assert len(first) <= 24
    assert {len(line) for line in first} == {80}
    text = "\n".join(first)
    assert "?" not in text
    for role in roles:
        assert f" {role.replace('to_', '→ ' if encoding == 'utf-8' else '> ')} " in text
    assert re.search("planner +node 2 . train .* training 1.42 s a batch", text)
    assert " rank " not in text


def test_what_goes_on_is_seen_in_a_pipe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(output, "SILENT_S", 0.01)
    seen = ""
    with output.busy("checking") as shown:
        shown.update("playing plans: 7")
        while not re.search(r"^playing plans: 7 \(\d+ s\)$", seen, re.MULTILINE):
            seen += capsys.readouterr().err
