"""The register of runs: list and note in any folder, and what a register does that is damaged or cannot be written."""

from __future__ import annotations

import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from libra_hpc_cli import register
from libra_hpc_cli.register import RegisterLine

from libra_hpc.facts.rundir import RunDir
from libra_hpc.facts.sweep_record import SweepMember, write_member
from libra_hpc.slurm.queue.query import JobInfo, JobState
from tests.facts import synthetic

from .conftest import Cli, Queue, one_line, write_status

LONG = "qwen3-14b-a800-eta0.lr1e-6.clip0.2.seed0"


@pytest.fixture
def own(site: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a register, which is still missing."""
    path = site / "home" / "runs.jsonl"
    monkeypatch.setenv("LIBRA_HPC_REGISTER", str(path))
    return path


def listed(cli: Cli, *options: str) -> list[str]:
    return [row["run"] for row in json.loads(cli("list", "--json", *options).out)]


def make_run(parent: Path, name: str = "quick") -> RunDir:
    run = synthetic.make_run(parent, name)
    run.toml.write_text("")
    return run


def test_the_place_is_that_of_the_users_data_and_none_means_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/a")
    assert register.place({}) == Path("/home/a/.local/share/libra-hpc/runs.jsonl")
    assert register.place({"XDG_DATA_HOME": "/data"}) == Path("/data/libra-hpc/runs.jsonl")
    assert register.place({"XDG_DATA_HOME": "data"}) == register.place({})
    assert register.place({"LIBRA_HPC_REGISTER": "~/r.jsonl"}) == Path("/home/a/r.jsonl")
    assert register.place({"LIBRA_HPC_REGISTER": "none"}) is None


def test_a_queued_run_is_listed_and_found_by_its_name_from_any_folder(
    own: Path, submitted: RunDir, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = submitted.path.parents[1] / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert listed(cli) == ["quick-001"]
    assert str(submitted.path.parent) in cli("list").out
    assert json.loads(cli("status", "quick-001", "--json").out)["path"] == str(submitted.path)
    assert listed(cli, "--runs", ".") == []
    make_run(elsewhere / "runs")
    cli("list", "--scan", ".")
    (elsewhere / "runs").rename(elsewhere / "away")
    cli("list", "--scan", "away")
    assert "several runs have this name" in one_line(cli("status", "quick-001"))


def test_a_run_is_registered_once_whatever_path_leads_to_it(own: Path, submitted: RunDir, cli: Cli) -> None:
    link = submitted.path.parents[1] / "link"
    link.symlink_to(submitted.path.parent)
    register.remember(RunDir(link / "quick-001"))
    cli("list", "--scan", str(link))
    assert len(own.read_text().splitlines()) == 1
    assert listed(cli) == ["quick-001"]


def test_a_damaged_register_is_read_as_far_as_it_goes(own: Path, cli: Cli) -> None:
    run = make_run(own.parent / "runs")
    whole = json.dumps({"t": 1.0, "run": str(run.path)})
    own.write_bytes(b'{"t": 1.0, "kind": "later"}\n\xff\xfe\n' + whole.encode() + b'\n{"t": 2.0, "run": "/x')
    assert listed(cli) == ["quick-001"]
    assert cli("note", "quick-001", "good").code == 0
    assert register.of_run(run).words == "good", "the torn line before it is closed"


def test_several_shells_append_whole_lines(own: Path) -> None:
    folders = [Path(f"/runs/run-{number:03d}") for number in range(100)]
    with ThreadPoolExecutor(8) as shells:
        list(shells.map(lambda folder: register.add([RegisterLine(str(folder), "note", "x" * 400)]), folders))
    assert set(register.registered()) == set(folders)
    assert all(known.words == "x" * 400 for known in register.registered().values())


def test_a_register_that_cannot_be_written_stops_only_notes(own: Path, site: Path, cli: Cli) -> None:
    own.parent.write_text("no folder")
    outcome = cli("submit", "run.toml")
    assert outcome.code == 0
    assert "`libra-hpc list` finds runs in their folders only: The register of runs" in outcome.err
    assert listed(cli) == ["quick-001"]
    outcome = cli("note", "quick-001", "good")
    assert (outcome.code, "cannot be written" in outcome.err) == (1, True)


def test_without_a_register_a_note_is_refused(site: Path, submitted: RunDir, cli: Cli) -> None:
    assert "there is no register to write to" in one_line(cli("note", "quick-001", "good"))


def test_gone_runs_are_one_line_until_a_scan_forgets_them(own: Path, site: Path, cli: Cli) -> None:
    runs = [make_run(site / "a" / "runs") for _ in range(5)]
    (site / "a" / "model").mkdir()
    (site / "a" / "model" / "config.json").write_text("{}")
    assert "5 runs below a: 5 are new in the register, 0 gone ones are forgotten" in cli("list", "--scan", "a").err
    for run in runs[:4]:
        shutil.rmtree(run.path)
    outcome = cli("list")
    assert "quick-005" in outcome.out
    (line,) = outcome.err.splitlines()
    assert line.startswith(f"gone: {runs[0].path}, ")
    assert "and 1 more" in line
    assert "1 runs below a: 0 are new in the register, 4 gone ones" in cli("list", "--scan", "a").err
    assert cli("list").err == ""
    assert "--scan = 'b': no such folder" in one_line(cli("list", "--scan", "b"))


def test_notes_and_tags_are_shown_and_tags_can_be_removed(own: Path, site: Path, cli: Cli) -> None:
    run = make_run(site / "runs")
    assert cli("note", "quick-001").out == "quick-001: no note and no tag\n"
    assert cli("note", "quick-001", "try  eta 2\nnext", "--tag", "v2", "--tag", "paper").code == 0
    assert cli("note", "quick-001", "better", "--tag", "v2", "--untag", "none").out == "quick-001: #paper #v2  better\n"
    for words in (("list",), ("status", "quick-001")):
        shown = cli(*words).out
        assert "paper" in shown
        assert "quick-001: " in shown
        assert "better" in shown
    (fact,) = json.loads(cli("list", "--json").out)
    assert (fact["tags"], [one["text"] for one in fact["notes"]]) == (["paper", "v2"], ["try eta 2 next", "better"])
    assert json.loads(cli("status", run.name, "--json").out)["notes"] == fact["notes"]
    assert cli("note", "quick-001", "--untag", "paper").out == "quick-001: #v2  better\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("quick-001", ""), "TEXT = '': it has 0 characters; valid: 1 to 500."),
        (("quick-001", "x" * 501), "it has 501 characters; valid: 1 to 500."),
        (("quick-001", "--tag", "a b"), "--tag = 'a b': malformed; valid: at most 32 letters, digits and . _ -"),
        (("quick-009", "x"), "RUN = 'quick-009': no run of that name"),
    ],
)
def test_a_note_that_no_line_can_hold_is_refused(
    words: tuple[str, ...], message: str, own: Path, site: Path, cli: Cli
) -> None:
    make_run(site / "runs")
    assert message in one_line(cli("note", *words))
    assert not own.exists()


def test_a_list_is_filtered_by_state_tag_and_time_and_sorted(own: Path, site: Path, cli: Cli) -> None:
    for place, name in enumerate(("old", "new", "failed")):
        run = make_run(site / "runs", name)
        stamp = time.time() - (3600.0 if place else 9e5) + place
        write_status(run, "failed" if name == "failed" else "completed", step=40 - place, at=stamp)
        run.write_json(run.job, run.read_json(run.job) | {"submitted_at": stamp})
        os.utime(run.status, (stamp, stamp))
    cli("note", "new-001", "--tag", "paper")
    assert listed(cli) == ["old-001", "new-001", "failed-001"]
    assert listed(cli, "--state", "failed") == ["failed-001"]
    assert listed(cli, "--state", "failed", "--state", "completed", "--since", "7d") == ["new-001", "failed-001"]
    assert listed(cli, "--since", "2026-01-31", "--tag", "paper") == ["new-001"]
    assert listed(cli, "--sort", "step") == ["failed-001", "new-001", "old-001"]
    assert cli("list", "--tag", "none").err == "none of 3 runs matches\n"
    assert "--state = 'done': no state of a run; valid: never_queued, pending" in one_line(
        cli("list", "--state", "done")
    )
    assert "--since = '7 days': malformed; valid: a number with m" in one_line(cli("list", "--since", "7 days"))
    assert "--sort = 'steps': unknown value; valid: submitted" in one_line(cli("list", "--sort", "steps"))


@pytest.mark.parametrize("width", [60, 80, 100])
def test_names_of_runs_are_whole_in_every_width(
    width: int, own: Path, site: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("libra_hpc_cli.output.WIDTH", width)
    for name in ("quick", "quick-eta0.seed0", LONG):
        run = make_run(site / "runs", name)
        write_member(run, SweepMember("quick", {}))
    for name in ("a", "quick-eta0.seed10"):
        make_run(site / "other", name)
    cli("note", "quick-001", "--tag", "paper")
    cli("list", "--scan", "other")
    lines = cli("list").out.splitlines()
    for name in ("quick-001", "quick-eta0.seed0-001", f"{LONG}-001", "a-001", "quick-eta0.seed10-001"):
        assert sum(name in line.split() for line in lines) == 1
    assert not any("…" in line for line in lines)
    assert max(len(line) for line in lines if not line.startswith("/")) <= width


def test_a_resume_that_is_cancelled_before_it_starts_takes_no_step_and_no_reward_back(
    site: Path, queue: Queue, cli: Cli
) -> None:
    run = make_run(site / "runs")
    (before,) = json.loads(cli("list", "--json").out)
    run.write_json(run.job, run.read_json(run.job) | {"attempt": 2})
    run.result.unlink()
    queue.answer = JobInfo("4711", JobState.CANCELLED)
    (after,) = json.loads(cli("list", "--json").out)
    assert (after["state"], after["attempt"], after["reason"]) == ("cancelled", 2, "before it started")
    for key in ("step", "steps", "reward_first", "reward", "updated_at"):
        assert after[key] == before[key] is not None
