"""archive and du: what of a run is kept, what goes, and what is refused."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from libra_hpc_cli import disk_use, register

from libra_hpc.errors import OperationError
from libra_hpc.facts.rundir import RunDir
from libra_hpc.slurm.queue.query import JobInfo, JobState
from tests.facts import synthetic

from .conftest import Cli, Queue, one_line, write_status

LEFT = {"checkpoints", "decisions.jsonl", "decisions.jsonl.old", "experience", "lease", "logs", "trajectories.jsonl"}


def weights(folder: Path, text: str) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text(text)


@pytest.fixture
def run(site: Path, queue: Queue, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A completed run of every part, in a register; its best reward is that of step 60."""
    monkeypatch.setenv("LIBRA_HPC_REGISTER", str(site / "runs.jsonl"))
    run = synthetic.make_run(site / "runs")
    run.toml.write_text("[run]\n")
    for step in (20, 60):
        weights(run.checkpoint(step) / "policy", f"step {step}")
        (run.checkpoint(step) / "state.json").write_text("{}")
        (run.checkpoint(step) / "optimizer").write_bytes(bytes(1000))
    weights(run.policy, "of an earlier end")
    for path in (run.decisions, run.decisions.with_name("decisions.jsonl.old"), run.logs(1) / "agent-0.log"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(100))
    (run.experience).mkdir()
    (run.experience / "starts.json").write_text("{}")
    (run.path / ".status.json.reserve-0").write_bytes(bytes(5000))
    return run


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_archive_has_the_facts_and_the_report_and_reads_as_a_run(run: RunDir, cli: Cli) -> None:
    cli("note", "quick-001", "best so far", "--tag", "paper")
    before = contents(run.path)
    outcome = cli("archive", "quick-001", "--json")
    assert outcome.code == 0, outcome.err
    assert contents(run.path) == before, "archiving changes nothing of the run"
    facts, place = json.loads(outcome.out), RunDir(run.path.parent / "archive" / "quick-001")
    assert (facts["path"], facts["removed"], facts["policy_step"]) == (str(place.path), False, None)
    assert facts["before"] == disk_use.use(run)["total"]
    assert facts["after"] == disk_use.use(place)["total"]
    names = {path.name for path in place.path.iterdir()}
    assert names == {path.name for path in run.path.iterdir() if not path.name.startswith(".")} - LEFT - {"policy"} | {
        "archive.json",
        "report.html",
        "summary.json",
        "summary.png",
    }
    assert (place.metrics.read_bytes(), place.toml.read_bytes()) == (run.metrics.read_bytes(), b"[run]\n")
    kept = json.loads(place.archive.read_text())
    assert (kept["from"], kept["tags"], kept["notes"][0]["text"]) == (str(run.path), ["paper"], "best so far")
    assert json.loads((place.path / "summary.json").read_text())["steps"] == 60
    assert json.loads(cli("summary", str(place.path), "--json").out)["reward_last"] is not None
    assert place.report.stat().st_mode & 0o777 == 0o600
    assert place.path.stat().st_mode == run.path.stat().st_mode
    assert "an archive, without checkpoints" in one_line(cli("submit", "--resume", str(place.path)))
    assert f"--to = '{place.path.parent}': {place.path} exists" in one_line(cli("archive", "quick-001"))


@pytest.mark.parametrize(("which", "best", "kept"), [("last", 20, 60), ("best", 20, 20), ("best", 60, 60)])
def test_the_policy_that_is_kept_is_the_last_or_that_of_the_best_reward(
    which: str, best: int, kept: int, run: RunDir, cli: Cli
) -> None:
    lines = (json.loads(line) for line in run.metrics.read_text().splitlines())
    text = (json.dumps(line | {"reward": -abs(line["step"] - best)}) for line in lines)
    run.metrics.write_text("\n".join(text))
    outcome = cli("archive", "quick-001", "--policy", which, "--to", "safe")
    assert f"in {run.path.parents[1]}/safe/quick-001 with the policy of step {kept}; {run.path} stays" in outcome.out
    assert (Path("safe/quick-001/policy") / "model.safetensors").read_text() == f"step {kept}"


def write_means(run: RunDir, means: dict[int, float]) -> None:
    """Evaluations of the task of ``checkpoint.best``, by step."""
    run.write_json(run.config, run.resolved() | {"checkpoint": {"best": "held"}})
    known = {"task": "held", "stderr": 0.0, "best_of": 1.0, "samples": 1, "failed": 0}
    lines = (json.dumps({**known, "step": step, "mean": mean}) for step, mean in means.items())
    run.evaluations.write_text("\n".join(lines))


@pytest.mark.parametrize(("mean", "kept"), [(0.5, 20), (0.3, 60)])
def test_the_best_policy_is_that_of_the_best_evaluation(mean: float, kept: int, run: RunDir, cli: Cli) -> None:
    write_means(run, {0: 0.1, 25: mean, 60: 0.4})
    assert f"with the policy of step {kept}" in cli("archive", "quick-001", "--policy", "best").out


def test_a_best_evaluation_before_any_checkpoint_is_refused(run: RunDir, cli: Cli) -> None:
    write_means(run, {0: 0.1})
    assert "the best evaluation is of step 0" in one_line(cli("archive", "quick-001", "--policy", "best"))


def test_without_checkpoints_the_exported_policy_is_kept(run: RunDir, cli: Cli) -> None:
    shutil.rmtree(run.checkpoints)
    assert "with the policy of step 60" in cli("archive", "quick-001", "--policy", "best").out
    place = RunDir(run.path.parent / "archive" / "quick-001")
    assert (place.policy / "model.safetensors").read_text() == "of an earlier end"


def test_parts_are_kept_when_asked_for(run: RunDir, cli: Cli) -> None:
    cli("archive", "quick-001", "--keep", "logs", "--keep", "decisions", "--keep", "trajectories")
    place = RunDir(run.path.parent / "archive" / "quick-001")
    for path in (
        place.decisions,
        place.path / "decisions.jsonl.old",
        place.trajectories,
        place.logs(1) / "agent-0.log",
    ):
        assert path.is_file()
    assert not place.checkpoints.exists()


def test_a_run_that_is_removed_goes_after_its_archive_is_there_and_its_notes_stay(run: RunDir, cli: Cli) -> None:
    cli("note", "quick-001", "best so far", "--tag", "paper")
    noted = register.of_run(run)
    assert "--remove needs --policy last, best or none" in one_line(cli("archive", "quick-001", "--remove"))
    outcome = cli("archive", "quick-001", "--remove", "--policy", "last")
    assert outcome.code == 0, outcome.err
    assert "; the run's folder is removed\n" in outcome.out
    assert [path.name for path in run.path.parent.iterdir()] == ["archive"]
    (fact,) = json.loads(cli("list", "--json").out)
    place = RunDir(fact["path"])
    assert (place.path, fact["state"], fact["tags"]) == (
        run.path.parent / "archive" / "quick-001",
        "completed",
        ["paper"],
    )
    assert register.of_run(place) == noted
    assert cli("list").err == "", "no run is gone"


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.PENDING, JobState.UNKNOWN])
def test_a_run_that_lives_is_refused(state: JobState, run: RunDir, queue: Queue, cli: Cli) -> None:
    run.result.unlink()
    write_status(run)
    if state is JobState.UNKNOWN:
        run.status.unlink()
    queue.answer = JobInfo("4711", state)
    before = contents(run.path)
    refused = one_line(cli("archive", "quick-001", "--remove", "--policy", "none"))
    assert refused.startswith("error: RUN = 'quick-001': its job 4711 is ")
    assert "valid: a run that has ended" in refused
    assert contents(run.path) == before
    assert not (run.path.parent / "archive").exists()


def test_a_run_that_somebody_owns_is_not_removed(run: RunDir, cli: Cli) -> None:
    from libra_hpc.owner.claim import acquire

    with acquire(run.leases):
        assert f"process {os.getpid()} on " in one_line(cli("archive", "quick-001", "--remove", "--policy", "none"))
    assert run.metrics.exists()
    assert not (run.path.parent / "archive").exists()


def test_a_link_to_a_run_goes_with_it(run: RunDir, site: Path, cli: Cli) -> None:
    away = site / "scratch" / "quick-001"
    away.parent.mkdir()
    run.path.rename(away)
    run.path.symlink_to(away)
    assert "it is inside the run" in one_line(cli("archive", "quick-001", "--to", str(away / "logs")))
    assert cli("archive", "quick-001", "--remove", "--policy", "none").code == 0
    assert not any(path.is_symlink() for path in run.path.parent.iterdir())
    assert list(away.parent.iterdir()) == []
    assert (run.path.parent / "archive" / "quick-001" / "metrics.jsonl").is_file()


def test_what_cannot_be_removed_is_named_and_the_archive_is_complete(
    run: RunDir, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(folder: Path, **_: object) -> None:
        if folder.exists():
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    monkeypatch.setattr(shutil, "rmtree", busy)
    outcome = cli("archive", "quick-001", "--remove", "--policy", "none")
    left = run.path.parent / ".quick-001.removed"
    assert f"is complete, but {left} cannot be removed: Device or resource busy." in outcome.err
    assert outcome.code == 1
    (fact,) = json.loads(cli("list", "--json").out)
    assert fact["path"] == str(run.path.parent / "archive" / "quick-001")


def test_a_full_disk_leaves_no_archive_and_the_run(run: RunDir, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(run.path)

    def full(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copy2", full)
        outcome = cli("archive", "quick-001", "--remove", "--policy", "last")
    assert (outcome.code, "cannot be written: No space left on device" in outcome.err) == (
        OperationError.exit_code,
        True,
    )
    # The lease that was held stays, released.
    assert {name: data for name, data in contents(run.path).items() if not name.startswith("lease")} == before
    assert list((run.path.parent / "archive").iterdir()) == []
    assert cli("archive", "quick-001").code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--policy", "first"), "--policy = 'first': unknown value; valid: none, last, best."),
        (
            ("--keep", "log"),
            "--keep = 'log': unknown value; valid: logs, trajectories, decisions (did you mean 'logs'?)",
        ),
    ],
)
def test_mistakes_name_what_is_valid(words: tuple[str, ...], message: str, run: RunDir, cli: Cli) -> None:
    assert message in one_line(cli("archive", "quick-001", *words))
    shutil.rmtree(run.checkpoints)
    shutil.rmtree(run.policy)
    refused = one_line(cli("archive", "quick-001", "--policy", "best"))
    assert "--policy = 'best': quick-001 has no checkpoint and no exported policy" in refused


def test_du_counts_each_file_once_and_names_the_largest_run_last(run: RunDir, site: Path, cli: Cli) -> None:
    os.link(run.policy / "model.safetensors", run.checkpoint(60) / "again")
    small = synthetic.make_run(site / "elsewhere", "small")
    cli("list", "--scan", "elsewhere")
    small.toml.write_text("")
    cli("list", "--scan", "elsewhere")
    rows = json.loads(cli("du", "--json").out)
    assert [row["run"] for row in rows] == ["small-001", "quick-001"]
    parts = rows[1]
    assert (parts["decisions"], parts["logs"]) == (200, 100)
    assert parts["checkpoints"] + parts["exports"] == 2 * (1000 + 4 + 7) + 2 + len("of an earlier end")
    assert parts["total"] == sum(path.stat().st_size for path in run.path.rglob("*") if path.is_file()) - 17
    assert parts["total"] == sum(parts[part] for part in (*disk_use.PARTS, "rest"))
    assert [row["run"] for row in json.loads(cli("du", "quick-001", "--json").out)] == ["quick-001"]
    assert cli("du").out.endswith(f"{disk_use.in_words(sum(row['total'] for row in rows))} in 2 runs\n")


def test_du_is_whole_in_80_columns(run: RunDir, site: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("libra_hpc_cli.output.WIDTH", 80)
    synthetic.make_run(site / "runs", "qwen3-14b-a800-eta0.lr1e-6.clip0.2.seed0")
    lines = cli("du").out.splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    assert any("trajectories 1" in line for line in lines)


@pytest.mark.parametrize(
    ("size", "words"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (9_949, "9.9 kB"), (9_950, "10 kB"), (999.6e9, "1.0 TB")],
)
def test_sizes_have_three_digits_at_most(size: float, words: str) -> None:
    assert disk_use.in_words(size) == words
